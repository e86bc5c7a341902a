"""The least that a context token must cost, from round times that never vary the context alone.

A slope over the context is measured where one batch size ran at two context levels. Server logs
often lack that, but where a smaller batch with a longer context was slower than a larger batch with
a shorter one, only the context can be why: a round's time at zero context does not fall with the
batch size. So with ``step_s = base(batch) + slope * context``

    slope >= (t_i - t_j) / (c_i - c_j)   for batch_i <= batch_j, c_i > c_j, t_i > t_j

and the largest of these bounds is the smallest slope that explains all figures. It is exact where
the bases of two such batch sizes are equal, and too small otherwise.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def least_context_slope(
    batch_size: NDArray[np.int64],
    context_tokens: Array,
    step_s: Array,
    min_ratio: float,
    max_share: float,
) -> float:
    """Return the smallest slope that explains every pair, in seconds a token.

    Args:
        batch_size: ``(n,)``.
        context_tokens: ``(n,)`` summed over the batch.
        step_s: ``(n,)``.
        min_ratio: Contexts of a pair must be this far apart, as a factor: closer ones bound nothing
            but the scatter of their figures.
        max_share: Most of a round that the context may explain.

    Example:
        >>> batch, context = np.array([8, 16]), np.array([50_000.0, 10_000.0])
        >>> step_s = np.array([0.006, 0.005])
        >>> round(least_context_slope(batch, context, step_s, 2.0, 0.9) * 1e9, 6)
        25.0
    """
    pairs = (
        (batch_size[:, None] <= batch_size[None, :])
        & (context_tokens[:, None] >= min_ratio * np.maximum(context_tokens[None, :], 1.0))
        & (step_s[:, None] > step_s[None, :])
    )
    if not pairs.any():
        return 0.0
    i, j = np.nonzero(pairs)
    slope = np.max((step_s[i] - step_s[j]) / (context_tokens[i] - context_tokens[j]))
    cap = np.min(max_share * step_s / np.maximum(context_tokens, 1.0))
    return float(min(slope, cap))
