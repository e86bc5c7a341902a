"""Records the step trace that calibration reads: one row a batch result, in rotated files.

The schema is ``controller.trace_schema``'s. Rows are checked and written on a background thread.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from controller.errors import TraceError
from controller.trace import TraceHeader, TraceRow, TraceWriter
from engine_hooks.background import BackgroundWriter

logger = logging.getLogger(__name__)

TraceFields = tuple[
    str, int | None, int, int, int, float | None, int | None, float | None, float | None
]
"""The fields of a ``TraceRow`` in order; it is built, and checked, on the thread."""

MAX_FILE_BYTES = 64 << 20
MAX_FILES = 8


@dataclass(frozen=True)
class Rotation:
    """When a file is full, and how many are kept.

    Attributes:
        max_bytes: Size from which the next file is begun.
        max_files: Files of this recording that are kept; the oldest goes first.
    """

    max_bytes: int = MAX_FILE_BYTES
    max_files: int = MAX_FILES


class TraceRecorder:
    """Writes a step trace.

    Attributes:
        files: Files of this recording, oldest first.
        refused: Rows that break the schema; they are left out.
    """

    def __init__(
        self,
        path: Path,
        header: TraceHeader,
        rotation: Rotation | None = None,
        start: Callable[..., BackgroundWriter[TraceFields]] | None = None,
    ) -> None:
        """Create the first file, so that a bad path shows at once.

        Args:
            path: File to write; if it is there already, the next free ``NAME-1``, ``NAME-2``, ...
            header: The recorded system.
            rotation: When to begin the next file.
            start: Starts the writer; for tests.

        Raises:
            OSError: If no file can be created.
        """
        self.files: list[Path] = []
        self.refused = 0
        self._path = path
        self._header = header
        self._rotation = rotation or Rotation()
        self._file = self._next_file()
        self._writer = (start or BackgroundWriter)(self._write, "specgovernor trace")
        self.put = self._writer.put

    @property
    def dropped(self) -> int:
        """Rows that were lost because the disk did not keep up."""
        return self._writer.dropped

    def close(self) -> None:
        """Write what is queued and finish the file."""
        self._writer.close()
        self._file.close()

    def _next_file(self) -> TraceWriter:
        suffixes = "".join(self._path.suffixes)
        stem = self._path.name.removesuffix(suffixes)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        path, number = self._path, 0
        while path.exists():
            number += 1
            path = self._path.with_name(f"{stem}-{number}{suffixes}")
        writer = TraceWriter(path, self._header)
        writer.flush()
        self.files.append(path)
        while len(self.files) > self._rotation.max_files:
            self.files.pop(0).unlink(missing_ok=True)
        return writer

    def _write(self, rows: list[TraceFields]) -> None:
        for fields in rows:
            try:
                self._file.write(TraceRow(*fields))
            except TraceError as error:
                self.refused += 1
                if self.refused == 1:
                    logger.warning("specgovernor trace: a row was left out: %s", error)
        self._file.flush()
        try:
            full = self._file.path.stat().st_size >= self._rotation.max_bytes
        except FileNotFoundError:  # Somebody took it away: go on in a new one.
            full = True
        if full:
            self._file.close()
            self._file = self._next_file()
