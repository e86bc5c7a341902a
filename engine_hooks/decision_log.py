"""The decision log: one JSON line a decode round, for tests and for whoever doubts a decision.

Unlike the step trace it names requests, and every rank writes its own file, so that ranks can be
compared.
"""

import json
from pathlib import Path
from typing import Any

from engine_hooks.background import BackgroundWriter


class DecisionLog:
    """Appends rounds to a file."""

    def __init__(self, path: Path, rank: int) -> None:
        """Open the file, to go on at its end; ranks but the first add their number to its name.

        Raises:
            OSError: If it cannot be created.
        """
        self.path = path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a", encoding="utf-8")
        self._writer: BackgroundWriter[dict[str, Any]] = BackgroundWriter(
            self._write, "specgovernor decisions"
        )
        self.put = self._writer.put

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._writer.close()
        self._file.close()

    def _write(self, rows: list[dict[str, Any]]) -> None:
        # At once, so that lines of two servers on one file do not mix.
        self._file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
        self._file.flush()
