"""Fit the round time of every tier: ``step_s = base(padded batch) + slope * context_tokens``.

Steps, all deterministic:

1. Per tier, Huber regression on relative residuals. A cell (see :mod:`training.samples`) counts
   with ``1 / (spread**2 + MODEL_ERROR**2)``, so quiet cells decide where host jitter makes others
   noisy, and no cell decides alone. The spread is not divided by the number of rounds: jitter only
   adds time, so it shifts a cell rather than averaging out. It is taken about the fit, since the
   context grows within a cell.
2. Slopes are made non-negative and, from ``cold`` over ``warm`` to the deepest draft,
   non-decreasing, weighted by their precision.
3. With the slopes fixed, the bases are fitted again and made non-decreasing in the batch size and,
   among the same ordered tiers, in depth. ``native`` is ordered by batch size alone.

An ordered tier that lacks a batch size which another one has, inside its own range, gets an
interpolated knot there, so that the order holds between knots as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from controller.errors import CalibrationError
from controller.tiers import COLD, NATIVE, WARM
from training.isotonic import pool_adjacent_violators, project_monotone
from training.samples import Samples

MIN_ROWS = 30
MODEL_ERROR = 0.01
"""Relative error that the linear form has even without noise."""
FULL_CELL_ROUNDS = 10
"""Rounds from which a cell has its full weight."""
HUBER = 1.5
MAX_CONTEXT_SHARE = 0.9
"""Most of a round that the context may explain; keeps the base positive."""
SWEEPS = 30
INTERPOLATED_WEIGHT = 1e-3
REMEMBERED_FITS = 64
"""Fits of single tiers that are kept: leaving out a part of one tier leaves the others' alone."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Surface:
    """The fitted round time of one tier.

    Attributes:
        batch_sizes: ``(num_knots,)`` padded batch sizes, ascending.
        base_s: ``(num_knots,)`` seconds at zero context.
        slope_s: Seconds a context token.
    """

    batch_sizes: NDArray[np.int64]
    base_s: Array
    slope_s: float

    def predict(self, batch_size: NDArray[np.int64], context_tokens: Array) -> Array:
        """Return seconds for arrays of one shape."""
        base = np.interp(batch_size, self.batch_sizes, self.base_s)
        return np.asarray(base + self.slope_s * context_tokens, dtype=np.float64)


@dataclass(frozen=True)
class _Knots:
    """One tier while it is fitted; ``weight`` is the precision of each base, 1 / s**2."""

    batch_sizes: NDArray[np.int64]
    base_s: Array
    weight: Array


def check_enough(samples: Mapping[str, Samples], min_rows: int = MIN_ROWS) -> None:
    """Refuse tiers that cannot be fitted.

    Raises:
        CalibrationError: Naming the tier, what it has, and what to record.
    """
    if not samples:
        raise CalibrationError(
            "no usable decode rounds in the traces: record steady decode, some rounds of one tier "
            "and batch size in a row"
        )
    sizes = {tier: len(np.unique(item.batch_size)) for tier, item in samples.items()}
    most = max(sizes.values())
    for tier, item in samples.items():
        if len(item) < min_rows:
            raise CalibrationError(
                f"tier {tier}: expected at least {min_rows} usable rounds, got {len(item)}; record "
                f"{min_rows - len(item)} more rounds of steady decode with tier {tier}, or leave "
                "the tier out"
            )
        if sizes[tier] < 2 <= most:
            raise CalibrationError(
                f"tier {tier}: expected at least 2 batch sizes, got only "
                f"{int(item.batch_size[0])} ({len(item)} rounds) while another tier has {most}; "
                f"record tier {tier} at the same batch sizes, or leave it out"
            )


def fit_surfaces(samples: Mapping[str, Samples]) -> dict[str, Surface]:
    """Fit every tier.

    Args:
        samples: Usable rounds by tier name; see :func:`check_enough`.

    Returns:
        The surfaces by tier name, in the order of :func:`tier_order`.
    """
    names = sorted(samples, key=tier_order)
    first = {name: _regress(samples[name]) for name in names}
    slopes = {name: first[name][0] for name in names}
    ordered = [name for name in names if name != NATIVE]
    if ordered:
        values = np.array([first[name][0] for name in ordered])
        weights = np.array([first[name][1] for name in ordered])
        caps = np.array([_slope_cap(samples[name]) for name in ordered])
        values = pool_adjacent_violators(values, weights)
        values = np.minimum(values, np.minimum.accumulate(caps[::-1])[::-1])
        slopes.update(zip(ordered, np.maximum(values, 0.0).tolist(), strict=True))
    knots = {name: _bases(samples[name], slopes[name]) for name in names}
    knots.update(_order(knots, ordered))
    if NATIVE in knots:
        item = knots[NATIVE]
        base = pool_adjacent_violators(item.base_s, item.weight)
        knots[NATIVE] = _Knots(item.batch_sizes, base, item.weight)
    return {
        name: Surface(
            knots[name].batch_sizes,
            np.array([_round(value) for value in knots[name].base_s]),
            _round(slopes[name]),
        )
        for name in names
    }


def tier_order(name: str) -> int:
    """Sort key of tier names: native, cold, warm, then by depth."""
    kinds = {NATIVE: -2, COLD: -1, WARM: 0}
    return kinds[name] if name in kinds else int(name)


def cell_spread(samples: Samples, surface: Surface) -> list[tuple[int, float, int, float]]:
    """Describe the cells of a tier: batch size, mean context, rounds, relative spread."""
    out = []
    residual = samples.step_s / surface.predict(samples.batch_size, samples.context_tokens) - 1.0
    for cell in np.unique(samples.cell):
        at = samples.cell == cell
        out.append(
            (
                int(samples.batch_size[at][0]),
                float(np.mean(samples.context_tokens[at])),
                int(np.sum(at)),
                robust_std(residual[at] - np.median(residual[at])),
            )
        )
    return out


def robust_std(residuals: Array) -> float:
    """Return the standard deviation of a normal sample about 0 from its median magnitude."""
    return float(1.4826 * _median(np.abs(residuals)))


def _median(values: Array) -> float:
    """Return what ``np.median`` does, without its overhead, which dominates on short arrays."""
    ordered = np.sort(values)
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else 0.5 * (ordered[half - 1] + ordered[half]))


@lru_cache(maxsize=REMEMBERED_FITS)
def _regress(samples: Samples) -> tuple[float, float]:
    """Return a tier's slope in seconds a token, not negative, and its precision."""
    sizes, knot = np.unique(samples.batch_size, return_inverse=True)
    scale = max(float(np.max(samples.context_tokens)), 1.0)
    design = np.zeros((len(samples), len(sizes) + 1))
    design[np.arange(len(samples)), knot] = 1.0
    design[:, -1] = samples.context_tokens / scale
    unit = _cell_median(samples)
    solution = np.zeros(len(sizes) + 1)
    weight = np.full(len(samples), 1.0)
    for sweep in range(SWEEPS):
        root = np.sqrt(weight) / unit
        solution = np.linalg.lstsq(design * root[:, None], samples.step_s * root, rcond=None)[0]
        residual = (samples.step_s - design @ solution) / unit
        weight = _weights(samples, residual, huber=sweep > 0)
    root = np.sqrt(weight) / unit
    normal = (design * root[:, None]).T @ (design * root[:, None])
    # What is left of the context column once the knots explain their part.
    inner = np.linalg.pinv(normal[:-1, :-1])
    precision = float(normal[-1, -1] - normal[-1, :-1] @ inner @ normal[:-1, -1]) / scale**2
    slope = float(np.clip(solution[-1] / scale, 0.0, _slope_cap(samples)))
    return slope, max(precision, 1e-12)


@lru_cache(maxsize=REMEMBERED_FITS)
def _bases(samples: Samples, slope_s: float) -> _Knots:
    """Fit the base of every batch size of a tier for a given slope."""
    sizes, knot = np.unique(samples.batch_size, return_inverse=True)
    value = samples.step_s - slope_s * samples.context_tokens
    unit = _cell_median(samples)
    base = np.array([np.median(value[knot == k]) for k in range(len(sizes))])
    weight = np.ones(len(samples))
    for _ in range(SWEEPS):
        weight = _weights(samples, (value - base[knot]) / unit, huber=True) / unit**2
        base = np.bincount(knot, weight * value) / np.bincount(knot, weight)
    fastest = np.array([np.min(unit[knot == k]) for k in range(len(base))])
    base = np.maximum(base, (1.0 - MAX_CONTEXT_SHARE) * fastest)
    return _Knots(sizes, base, np.asarray(np.bincount(knot, weight), dtype=np.float64))


def _order(knots: Mapping[str, _Knots], ordered: list[str]) -> dict[str, _Knots]:
    """Make the bases of the ordered tiers non-decreasing in batch size and depth."""
    if not ordered:
        return {}
    union = np.unique(np.concatenate([knots[name].batch_sizes for name in ordered]))
    values = np.full((len(ordered), len(union)), np.nan)
    weights = np.zeros_like(values)
    for row, name in enumerate(ordered):
        item = knots[name]
        inside = (union >= item.batch_sizes[0]) & (union <= item.batch_sizes[-1])
        values[row, inside] = np.interp(union[inside], item.batch_sizes, item.base_s)
        weights[row, inside] = INTERPOLATED_WEIGHT * float(np.min(item.weight))
        weights[row, np.isin(union, item.batch_sizes)] = item.weight
    fitted = project_monotone(values, weights / np.max(weights))
    result = {}
    for row, name in enumerate(ordered):
        here = ~np.isnan(fitted[row])
        result[name] = _Knots(union[here], fitted[row, here], weights[row, here])
    return result


def _weights(samples: Samples, residual: Array, huber: bool) -> Array:
    """Return the weight of every round from its relative residual; see the module's step 1."""
    weight = np.empty(len(residual))
    for at in samples.cell_rows:
        spread = robust_std(residual[at] - _median(residual[at]))
        weight[at] = 1.0 / (spread**2 + MODEL_ERROR**2) / max(len(at), FULL_CELL_ROUNDS)
        if huber:
            reach = HUBER * max(spread, MODEL_ERROR)
            weight[at] *= np.minimum(1.0, reach / np.maximum(np.abs(residual[at]), 1e-12))
    return weight


def _cell_median(samples: Samples) -> Array:
    unit = np.empty(len(samples))
    for at in samples.cell_rows:
        unit[at] = _median(samples.step_s[at])
    return unit


@lru_cache(maxsize=REMEMBERED_FITS)
def _slope_cap(samples: Samples) -> float:
    unit = _cell_median(samples)
    return float(np.min(MAX_CONTEXT_SHARE * unit / np.maximum(samples.context_tokens, 1.0)))


def _round(value: float) -> float:
    """Keep seven digits: enough for any clock, and the same on every machine."""
    return float(f"{value:.7g}")
