"""Measured round times from sources other than traces, and the costs that they give.

A :class:`Point` is one figure of a log, a benchmark or a table: a round time at a batch size, with
the context where the source says it. Points of one tier become one :class:`TierCost`:

- With contexts, they are fitted like the rounds of a trace (:mod:`training.fit`) if a batch size
  was measured at contexts ``LEVEL_GAP`` apart. Otherwise the cost of context is not identified but
  bounded from below: a round with more requests takes no less time, so where a smaller batch of
  a longer context was slower, context must cost the difference. That least slope is used.
- Without, they are averaged by batch size and made monotone; between and beyond the batch sizes
  the round time follows :mod:`training.batch_curve`.

A point is an average over many rounds, so it says nothing about the noise of one: that is zero.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from controller.calibration import Region, TierCost
from controller.errors import CalibrationError
from controller.tiers import NATIVE
from training.batch_curve import curve, knots
from training.fit import MAX_CONTEXT_SHARE, fit_surfaces, tier_order
from training.isotonic import pool_adjacent_violators, project_monotone
from training.samples import LEVEL_GAP, Samples, context_cells

MIN_STEP_S = 1e-4
MAX_STEP_S = 10.0
"""Rounds outside these are taken for figures in other units or swapped columns."""
MAX_CONCURRENCY = 1_000_000
"""More requests at once than any server holds; more are taken for a slip or swapped columns."""
UNIT_FACTOR = 8.0
"""Most by which a round may differ from what its neighbours in batch size make plausible."""


@dataclass(frozen=True)
class Point:
    """One measured round time.

    Attributes:
        where: File and line, for messages.
        kind: ``"log"``, ``"benchmark"`` or ``"table"``.
        tier: Tier name.
        concurrency: Requests in flight.
        batch_size: Requests that ran at once.
        context_tokens: Context summed over the batch; None if the source does not say.
        step_s: Seconds a round.
        accept_len: Accept length, bonus included; 1 without speculation.
        assumed: Whether the accept length is assumed.
        throughput: Output tokens a second as given; None if the source gave times only.

    Raises:
        CalibrationError: If the batch size is above ``MAX_CONCURRENCY``.
    """

    where: str
    kind: str
    tier: str
    concurrency: int
    batch_size: int
    context_tokens: int | None
    step_s: float
    accept_len: float
    assumed: bool
    throughput: float | None

    def __post_init__(self) -> None:
        check_concurrency(self.where, self.batch_size)

    @property
    def implied_throughput(self) -> float:
        """Output tokens a second of the decode rounds."""
        return self.accept_len * self.batch_size / self.step_s


def check_units(points: Sequence[Point]) -> None:
    """Refuse figures that only make sense as a mixture of units or as swapped columns.

    A round takes longer with more requests, but not more than in proportion. So between two batch
    sizes of a tier, at similar contexts, the round time may neither fall nor grow by more than
    ``UNIT_FACTOR`` beyond that; seconds among milliseconds do.

    Raises:
        CalibrationError: Naming both figures.
    """
    # A log's figures have one unit, and its stalls are left out by reading it.
    points = [point for point in points if point.kind != "log"]
    for tier in sorted({point.tier for point in points}, key=tier_order):
        ordered = sorted(
            (point for point in points if point.tier == tier), key=lambda point: point.batch_size
        )
        for a, b in pairwise(ordered):
            growth = b.step_s / a.step_s
            most = b.batch_size / a.batch_size
            if a.context_tokens and b.context_tokens:
                most = max(most, b.context_tokens / a.context_tokens)
            if not 1.0 / UNIT_FACTOR <= growth <= UNIT_FACTOR * most:
                raise CalibrationError(
                    f"{b.where}: expected a round time near that of {a.where} ({a.step_s:.4g} s at "
                    f"batch size {a.batch_size}), got {b.step_s:.4g} s at {b.batch_size}; check "
                    "for mixed units (ms against s) or swapped columns"
                )


def check_concurrency(where: str, concurrency: float) -> None:
    """Refuse more requests at once than any server holds.

    Raises:
        CalibrationError: Naming the place.
    """
    if concurrency > MAX_CONCURRENCY:
        raise CalibrationError(
            f"{where}: expected at most {MAX_CONCURRENCY} requests at once, got {concurrency:g}; "
            "correct it, and check that the columns are not swapped"
        )


def check_step(where: str, step_s: float, what: str) -> float:
    """Return a round time if it is plausible.

    Raises:
        CalibrationError: If it is not, saying what it came from.
    """
    if not MIN_STEP_S <= step_s <= MAX_STEP_S:
        raise CalibrationError(
            f"{where}: expected rounds of {MIN_STEP_S} to {MAX_STEP_S:g} seconds, but {what} gives "
            f"{step_s:.4g}; check that the columns are not swapped and the units are right"
        )
    return step_s


def fit_points(points: Sequence[Point]) -> tuple[TierCost, ...]:
    """Return the cost of every tier of the points; at one batch size they are averaged.

    A tier with contexts uses only the points that have one.
    """
    check_units(points)
    with_context = [point for point in points if point.context_tokens is not None]
    known = {point.tier for point in with_context}
    without = [point for point in points if point.tier not in known]
    costs = [*_fit_with_context(with_context), *_fit_without_context(without)]
    return tuple(sorted(costs, key=lambda cost: tier_order(cost.tier)))


def assumed_accept_len(points: Iterable[Point]) -> dict[str, float]:
    """Return the assumed accept length by tier name.

    Raises:
        CalibrationError: If a tier has figures both with and without an accept length.
    """
    points = list(points)
    result = {}
    for name in sorted({point.tier for point in points if point.assumed}, key=tier_order):
        here = [point for point in points if point.tier == name]
        if not all(point.assumed for point in here):
            where = next(point.where for point in here if point.assumed)
            raise CalibrationError(
                f"{where}: expected an accept_len as in the other rows of tier {name}, got none; "
                "fill it in, or empty the whole column"
            )
        result[name] = here[0].accept_len
    return result


def has_context_levels(points: Sequence[Point]) -> bool:
    """Return whether a batch size was measured at contexts far enough apart for a slope."""
    levels: dict[int, list[int]] = {}
    for point in points:
        levels.setdefault(point.batch_size, []).append(max(point.context_tokens or 0, 1))
    return any(max(found) >= LEVEL_GAP * min(found) for found in levels.values())


def _fit_with_context(points: Sequence[Point]) -> Iterable[TierCost]:
    samples, slopes = {}, {}
    for tier in {point.tier for point in points}:
        here = [point for point in points if point.tier == tier]
        batch = np.array([point.batch_size for point in here])
        context = np.array([float(point.context_tokens or 0) for point in here])
        step = np.array([point.step_s for point in here])
        if not has_context_levels(here):
            slopes[tier] = least_slope(batch, context, step)
            step = step - slopes[tier] * context
            context = np.zeros(len(here))
        none = np.zeros(len(here), dtype=bool)
        samples[tier] = Samples(batch, context, step, context_cells(batch, context), none)
    for tier, surface in fit_surfaces(samples).items() if samples else ():
        here = [point for point in points if point.tier == tier]
        yield TierCost(
            tier=tier,
            batch_sizes=tuple(surface.batch_sizes.tolist()),
            base_s=tuple(surface.base_s.tolist()),
            context_s_per_token=slopes.get(tier, surface.slope_s),
            relative_noise=(0.0,) * len(surface.batch_sizes),
            max_context_tokens=max(point.context_tokens or 0 for point in here),
            num_rows=len(here),
            regions=regions_of(
                np.array([point.batch_size for point in here]),
                np.array([float(point.context_tokens or 0) for point in here]),
            ),
        )


def least_slope(batch: np.ndarray, context: np.ndarray, step_s: np.ndarray) -> float:
    """Return the least cost of a context token, in seconds, that lets rounds grow with the batch.

    Only contexts ``LEVEL_GAP`` apart are compared, and no round's context takes more than
    ``MAX_CONTEXT_SHARE`` of it.

    Args:
        batch: ``(num_points,)`` batch sizes.
        context: ``(num_points,)`` context tokens of the batch.
        step_s: ``(num_points,)`` seconds of a round.
    """
    slope = 0.0
    for i in range(len(batch)):
        after = (batch >= batch[i]) & (context[i] >= LEVEL_GAP * np.maximum(context, 1.0))
        if np.any(after):
            gain = (step_s[i] - step_s[after]) / (context[i] - context[after])
            slope = max(slope, float(np.max(gain)))
    most = float(np.min(MAX_CONTEXT_SHARE * step_s / np.maximum(context, 1.0)))
    return float(f"{min(slope, most):.7g}")


def regions_of(batch: np.ndarray, context: np.ndarray) -> tuple[Region, ...]:
    """Return the measured cells of a tier: batch size, context range and number of figures."""
    cell = context_cells(batch, context)
    found = []
    for index in np.unique(cell):
        at = cell == index
        found.append(
            Region(
                int(batch[at][0]),
                int(np.min(context[at])),
                int(np.max(context[at])),
                int(np.sum(at)),
            )
        )
    return tuple(sorted(found, key=lambda region: (region.batch_size, region.context_low or 0)))


def _fit_without_context(points: Sequence[Point]) -> Iterable[TierCost]:
    names = sorted({point.tier for point in points}, key=tier_order)
    sizes = sorted({point.batch_size for point in points})
    values = np.full((len(names), len(sizes)), np.nan)
    for i, name in enumerate(names):
        for j, size in enumerate(sizes):
            steps = [p.step_s for p in points if p.tier == name and p.batch_size == size]
            if steps:
                values[i, j] = np.mean(steps)
    weights = np.nan_to_num(values, nan=1.0) ** -2.0
    ordered = [i for i, name in enumerate(names) if name != NATIVE]
    if ordered:
        values[ordered] = project_monotone(values[ordered], weights[ordered])
    if NATIVE in names:
        native = names.index(NATIVE)
        here = ~np.isnan(values[native])
        values[native, here] = pool_adjacent_violators(values[native, here], weights[native, here])
    for i, name in enumerate(names):
        here = np.flatnonzero(~np.isnan(values[i]))
        mine = [point for point in points if point.tier == name]
        counts: Mapping[int, int] = {
            sizes[j]: sum(point.batch_size == sizes[j] for point in mine) for j in here
        }
        measured = np.array([float(sizes[j]) for j in here])
        at = knots(measured)
        base_s = curve(measured, values[i, here], at.astype(np.float64))
        yield TierCost(
            tier=name,
            batch_sizes=tuple(at.tolist()),
            base_s=tuple(float(f"{value:.7g}") for value in base_s),
            context_s_per_token=0.0,
            relative_noise=(0.0,) * len(at),
            max_context_tokens=0,
            num_rows=len(mine),
            regions=tuple(Region(size, None, None, count) for size, count in counts.items()),
        )
