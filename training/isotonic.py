"""Weighted least squares under monotonicity, along one axis or both.

Along one axis this is the pool-adjacent-violators algorithm (Barlow et al., Statistical Inference
under Order Restrictions, 1972). Along both it is Dykstra's cyclic projection (Dykstra and
Robertson, Annals of Statistics 10(3), 1982), which converges to the least-squares answer.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def pool_adjacent_violators(values: Array, weights: Array) -> Array:
    """Return the non-decreasing sequence nearest to ``values``.

    Args:
        values: ``(n,)``.
        weights: ``(n,)``, positive.

    Example:
        >>> pool_adjacent_violators(np.array([1.0, 3.0, 2.0]), np.ones(3)).tolist()
        [1.0, 2.5, 2.5]
    """
    means: list[float] = []
    masses: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        means.append(value)
        masses.append(weight)
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mass = masses[-2] + masses[-1]
            mean = (means[-2] * masses[-2] + means[-1] * masses[-1]) / mass
            means[-2:], masses[-2:], counts[-2:] = [mean], [mass], [counts[-2] + counts[-1]]
    return np.repeat(np.array(means), counts)


def project_monotone(values: Array, weights: Array, max_sweeps: int = 2000) -> Array:
    """Return the array nearest to ``values`` that decreases along neither axis.

    Args:
        values: ``(num_rows, num_columns)``; NaN where there is no value, which stays NaN and orders
            nothing.
        weights: ``(num_rows, num_columns)``, positive where there is a value.
        max_sweeps: Bound on the projections.
    """
    lines = _lines(~np.isnan(values))
    current = values.copy()
    offsets: list[Array] = [np.zeros_like(values), np.zeros_like(values)]
    scale = float(np.nanmax(np.abs(values))) if lines else 0.0
    for _ in range(max_sweeps):
        before = current.copy()
        for axis in (0, 1):
            shifted = current + offsets[axis]
            current = shifted.copy()
            for index in lines[axis]:
                current[index] = pool_adjacent_violators(shifted[index], weights[index])
            offsets[axis] = shifted - current
        if np.nanmax(np.abs(current - before)) <= 1e-13 * scale:
            break
    return _raise_to_monotone(current, lines)


def _raise_to_monotone(values: Array, lines: list[list[Any]]) -> Array:
    """Remove what the finite number of sweeps left of the violations."""
    while True:
        before = values.copy()
        for axis in (0, 1):
            for index in lines[axis]:
                values[index] = np.maximum.accumulate(values[index])
        if np.array_equal(before, values, equal_nan=True):
            return values


def _lines(present: NDArray[np.bool_]) -> list[list[Any]]:
    """Return index tuples of the present entries of every row, and of every column."""
    rows = [(r, np.flatnonzero(present[r])) for r in range(present.shape[0])]
    columns = [(np.flatnonzero(present[:, c]), c) for c in range(present.shape[1])]
    return [
        [index for index in rows if len(index[1])],
        [index for index in columns if len(index[0])],
    ]
