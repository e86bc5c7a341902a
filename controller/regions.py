"""Where a tier's round time was measured, and how far a prediction elsewhere can be trusted."""

from collections.abc import Sequence
from dataclasses import dataclass

from controller.errors import CalibrationError

MEASURED = "measured"
INTERPOLATED = "interpolated"
EXTRAPOLATED = "extrapolated"
CONTEXT_FACTOR = 2.0**0.5
"""Factor by which a context may leave a measured range and still count as in it."""


@dataclass(frozen=True)
class Region:
    """Rounds that were measured at one batch size.

    Attributes:
        batch_size: The (padded) batch size.
        context_low: Fewest context tokens, summed over the batch; None if the source has no
        context. context_high: Most context tokens; None likewise.
        count: Rounds of a trace, or figures of another source.
    """

    batch_size: int
    context_low: int | None
    context_high: int | None
    count: int

    def __post_init__(self) -> None:
        ends = (self.context_low, self.context_high)
        numbers = (self.batch_size, self.count, *(0 if end is None else end for end in ends))
        if any(isinstance(value, bool) or not isinstance(value, int) for value in numbers):
            raise CalibrationError(f"region: expected integers, got {self}; calibrate again")
        low, high = (0 if end is None else end for end in ends)
        if self.batch_size < 1 or self.count < 1 or not 0 <= low <= high <= 2**53:
            raise CalibrationError(
                f"region: expected a batch size and count of at least 1 and an ascending context "
                f"range, got {self}; calibrate again"
            )
        if (self.context_low is None) != (self.context_high is None):
            raise CalibrationError(
                f"region: expected both ends of the context range or none, got {self}"
            )

    def holds(self, batch_size: int, context_tokens: int) -> bool:
        """Return whether a round lies in the region, give or take ``CONTEXT_FACTOR``."""
        if batch_size != self.batch_size:
            return False
        if self.context_low is None or self.context_high is None:
            return True
        low, high = self.context_low / CONTEXT_FACTOR, self.context_high * CONTEXT_FACTOR
        return low <= context_tokens <= high


def trust(
    regions: Sequence[Region], batch_size: int, context_tokens: int, max_context_tokens: int
) -> str:
    """Grade a prediction.

    ``measured`` lies in a region. ``interpolated`` lies between measured batch sizes at no more
    than the largest measured context: the context term is a straight line that its data anchor, and
    below the smallest context it only shrinks. Anything else is ``extrapolated``. Regions without
    contexts are graded by batch size alone: their source says nothing about contexts, nor does
    their fit.

    Args:
        regions: At least one region of the tier.
        batch_size: The (padded) batch size.
        context_tokens: Context tokens summed over the batch.
        max_context_tokens: Largest measured context of the tier; 0 if it has none.
    """
    sizes = [region.batch_size for region in regions]
    too_long = max_context_tokens and context_tokens > max_context_tokens
    if too_long or not min(sizes) <= batch_size <= max(sizes):
        return EXTRAPOLATED
    if any(region.holds(batch_size, context_tokens) for region in regions):
        return MEASURED
    return INTERPOLATED
