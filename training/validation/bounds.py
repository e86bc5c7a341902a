"""Every bound that ``python -m training.validate`` checks, and the outcome of a check.

A figure over its bound makes the command exit with code 1.
"""

from dataclasses import dataclass

QUIET_DEVIATION = 0.05
"""A cell is quiet if the median of ``|step / median step - 1|`` over its rounds is at most this."""

CELL_MEDIAN = 0.03
"""Median relative error over quiet cells, each predicted without its own rounds."""
CELL_P95 = 0.10
"""95th percentile of the same."""

OTHER_MEDIAN = 0.05
"""Median relative error over quiet cells of runs that the calibration has never seen."""
OTHER_P95 = 0.10
"""95th percentile of the same."""

TABLE_MEDIAN = 0.07
"""Median relative throughput error over all table rows predicted from the other half."""
TABLE_WORST = 0.20
"""Largest of the same."""

LOG_WORST = 0.10
"""Largest relative difference of throughput between a server log and the run's own trace."""


@dataclass(frozen=True)
class Check:
    """A measured figure against its bound.

    Attributes:
        name: What was measured.
        value: The figure, a ratio.
        limit: The bound; the figure may equal it.
    """

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the bound holds; NaN does not."""
        return self.value <= self.limit
