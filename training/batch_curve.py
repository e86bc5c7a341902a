"""Round time between and beyond a few measured batch sizes, as throughput tables give them.

Between two of them the curve is

    batch / step_s = peak * exp(-latency / step_s)

with ``peak`` and ``latency`` from the two points: the logarithm of what a round yields is linear in
the reciprocal of its time. For long rounds that is ``step_s = latency + batch / peak``, the sum of
a latency bound and a throughput bound. In small batches that sum is too flat: rounds grow from the
first added request on, since mixture-of-experts models read more experts with every token of a
batch, and here they do. ``d log(step_s) / d log(batch) = step_s / (step_s + latency)``, which rises
from 0 to 1 with the load and has no constant to be chosen. Below the smallest measured batch size
the first curve goes on down to a quarter of it, and is constant from there: where the latency bound
sets in cannot be seen from above. Above the largest the chord of the last two points goes on: a
straight line is the careful guess where throughput may be about to stop growing.

Where a larger batch yields less in all (noise, or a limit of running requests that the source does
not name) no such curve exists, and the two points are joined by a power law.

The form was chosen among power means of both bounds and Box-Cox transforms of both axes with
published tables of five systems at hand, each predicted in halves: ``python -m training.validate``.
The H200 traces of a dense model, read as a table and not used for that choice, agree: 20 rows
between measured sizes have a median error of 2.6% and none above 9%. Down from there the curve was
up to 93% too fast, at 8 to 64 times smaller batches, which is why it ends at a quarter.

A calibration is piecewise linear, so the curve becomes knots at powers of two and half-way between
them, from a quarter of the smallest measured batch size to the largest, and one at twice that.
"""

import numpy as np
from numpy.typing import NDArray

REACH_DOWN = 4
REACH_UP = 2
"""How far beyond the measured batch sizes the first and the last knot lie, as factors."""
BISECTIONS = 60
FLAT = 1e-9
"""Relative difference up to which two round times are the same."""

Array = NDArray[np.float64]


def curve(batch_sizes: Array, step_s: Array, at: Array) -> Array:
    """Evaluate the curve through measured points.

    Args:
        batch_sizes: ``(n,)`` ascending.
        step_s: ``(n,)`` seconds, positive and non-decreasing.
        at: ``(m,)`` positive batch sizes.

    Returns:
        ``(m,)`` seconds, non-decreasing in ``at``; a single point gives a constant.

    Example:
        >>> curve(np.array([4.0, 8.0]), np.array([1.0, 1.5]), np.array([2.0, 4.0, 16.0])).round(3)
        array([0.711, 1.   , 2.5  ])
    """
    if len(batch_sizes) == 1:
        return np.full(len(at), step_s[0])
    at = np.maximum(at, batch_sizes[0] / REACH_DOWN)
    left = np.clip(np.searchsorted(batch_sizes, at, side="right") - 1, 0, len(batch_sizes) - 2)
    b1, b2 = batch_sizes[left], batch_sizes[left + 1]
    t1, t2 = step_s[left], step_s[left + 1]
    gain = np.log((b2 / t2) / (b1 / t1))
    rising = (gain > 0.0) & (t2 > t1 * (1.0 + FLAT))
    latency = np.where(rising, gain, 0.0) / np.where(rising, 1.0 / t1 - 1.0 / t2, 1.0)
    exponent = np.log(t2 / t1) / np.log(b2 / b1)
    power = t1 * (at / b1) ** np.where(at < b1, np.minimum(exponent, 1.0), exponent)
    value = np.where(rising, _solve(b1, t1, latency, t2, at), power)
    beyond = at > batch_sizes[-1]
    chord = (step_s[-1] - step_s[-2]) / (batch_sizes[-1] - batch_sizes[-2])
    value[beyond] = step_s[-1] + chord * (at[beyond] - batch_sizes[-1])
    exact = np.isin(at, batch_sizes)
    value[exact] = step_s[np.searchsorted(batch_sizes, at[exact])]
    return np.asarray(value)


def _solve(b1: Array, t1: Array, latency: Array, t2: Array, at: Array) -> Array:
    """Find the time at which a curve through ``(b1, t1)`` with this latency reaches ``at``.

    ``log(batch)`` rises with ``log(step_s)``, and no faster than it, so the time lies between
    proportional growth and none.
    """
    low = np.log(t1) + np.minimum(np.log(at / b1), 0.0)
    high = np.log(np.maximum(t1, t2))
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        batch = middle + latency * (1.0 / t1 - np.exp(-middle)) + np.log(b1 / t1)
        short = batch < np.log(at)
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return np.asarray(np.exp(0.5 * (low + high)))


def knots(batch_sizes: Array) -> NDArray[np.int64]:
    """Return the measured batch sizes and those at which the curve is tabulated, ascending."""
    measured = batch_sizes.astype(np.int64)
    if len(measured) == 1:
        return measured
    smallest, largest = max(int(measured[0]) // REACH_DOWN, 1), int(measured[-1])
    powers = 2 ** np.arange(largest.bit_length())
    grid = np.concatenate([powers, 3 * powers // 2])
    return np.unique(
        np.concatenate(
            [
                [smallest],
                grid[(grid > smallest) & (grid <= largest)],
                measured,
                [REACH_UP * largest],
            ]
        )
    )
