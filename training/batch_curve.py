"""Round time between and beyond a few measured batch sizes: a power mean of latency and throughput.

A round is bound by latency (weights, launches) in small batches and by throughput in large ones.
Both bounds meet softly, as ``step_s = (a**K + (s * batch)**K)**(1/K)``: with ``K = 1`` the two
simply add, with large ``K`` the larger one counts (a roofline). Mixture-of-experts models read more
experts with every token of a small batch, so their rounds grow faster there than a sum of both
bounds does, which asks for ``K < 1``. ``step_s**K`` is linear in ``batch**K``, so between two
measured batch sizes the curve is a chord in these coordinates, and beyond the ends the end chords
go on. Chords pass through every measurement and cross no other curve that they do not cross at the
measured sizes, so curves ordered by depth stay ordered between common sizes.

``K = 0.6`` was chosen with published tables of four models at hand, each predicted in halves
(``python -m training.validate``); 0.55 to 0.7 do about as well there, 0.5 and 1 worse.

A calibration is piecewise linear, so the curve becomes knots at powers of two and half-way between
them, from batch size 1 to twice the largest measured one.
"""

import numpy as np
from numpy.typing import NDArray

EXPONENT = 0.6
REACH = 2
"""How far beyond the largest measured batch size knots are added, as a factor."""

Array = NDArray[np.float64]


def curve(batch_sizes: Array, step_s: Array, at: Array) -> Array:
    """Evaluate the curve through measured points.

    Args:
        batch_sizes: ``(n,)`` ascending.
        step_s: ``(n,)`` seconds, positive and non-decreasing.
        at: ``(m,)`` batch sizes of at least 1.

    Returns:
        ``(m,)`` seconds, non-decreasing in ``at``; a single point gives a constant.

    Example:
        >>> curve(np.array([1.0, 8.0]), np.array([1.0, 8.0]), np.array([4.0])).round(9).tolist()
        [4.0]
    """
    if len(batch_sizes) == 1:
        return np.full(len(at), step_s[0])
    x, y, where = batch_sizes**EXPONENT, step_s**EXPONENT, at**EXPONENT
    left = np.clip(np.searchsorted(x, where, side="right") - 1, 0, len(x) - 2)
    slope = (y[left + 1] - y[left]) / (x[left + 1] - x[left])
    # No smaller batch is slower a request: where noisy points are steeper than that, it bounds.
    least = y[0] * np.minimum(where / x[0], 1.0)
    value = np.maximum(y[left] + slope * (where - x[left]), least) ** (1.0 / EXPONENT)
    exact = np.isin(at, batch_sizes)
    value[exact] = step_s[np.searchsorted(batch_sizes, at[exact])]
    return np.asarray(value)


def knots(batch_sizes: Array) -> NDArray[np.int64]:
    """Return the measured batch sizes and those at which the curve is tabulated, ascending."""
    largest = REACH * int(batch_sizes[-1])
    powers = 2 ** np.arange(largest.bit_length())
    grid = np.concatenate([powers, 3 * powers // 2])
    grid = grid[(grid >= 1) & (grid <= largest)]
    return np.unique(np.concatenate([grid, batch_sizes.astype(np.int64)]))
