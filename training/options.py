"""What the sources of a calibration do not say and a user may."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from controller.errors import CalibrationError
from training.columns import ALIASES

DEFAULT_NUM_STEPS = 3
DEFAULT_ACCEPT_RATE = 0.7
SPECULATIVE_MAX_RUNNING = 48
"""Running requests that SGLang allows with speculation unless told otherwise."""


@dataclass(frozen=True)
class TableOptions:
    """What sources do not say.

    Attributes:
        num_steps: Depth of rows and logs that do not say theirs, 0 for none; None if not given.
        num_steps_of: The same by file name, which comes first.
        accept_len: Accept length of speculative rows that give none; None for independent
            acceptance of ``DEFAULT_ACCEPT_RATE`` a draft token.
        speculative_max_running: Most running requests with speculation.
        zero_steps: What a ``num_steps`` of 0 means: ``"native"``, ``"warm"`` or ``"cold"``; None to
            go by ``config``.
        columns: Names of a table's columns by the names above.
        where: Pairs of a column and a text; only rows whose column contains it count.

    Raises:
        CalibrationError: If ``columns`` has a name that is none of ours.
    """

    num_steps: int | None = None
    num_steps_of: Mapping[str, int] = field(default_factory=dict)
    accept_len: float | None = None
    speculative_max_running: int = SPECULATIVE_MAX_RUNNING
    zero_steps: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    where: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if name not in ALIASES:
                raise CalibrationError(
                    f"--column {name}={column}: expected NAME=COLUMN with one of the names "
                    f"{', '.join(ALIASES)}, got {name!r:.60}"
                )

    def depth(self, path: Path) -> int | None:
        """Return the depth that was told for a file."""
        return self.num_steps_of.get(path.name, self.num_steps)


def expected_accept_len(num_steps: int, accept_rate: float = DEFAULT_ACCEPT_RATE) -> float:
    """Return ``1 + p + ... + p**num_steps``, the accept length of a chain of drafts.

    Example:
        >>> round(expected_accept_len(3), 3)
        2.533
    """
    return sum(accept_rate**i for i in range(num_steps + 1))
