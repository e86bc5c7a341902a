"""From sources to a calibration: fit what was measured, and judge the fit."""

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from controller.acceptance_profile import AcceptanceProfile
from controller.calibration import Calibration, PrefillCost, TierCost
from controller.errors import CalibrationError
from controller.tiers import NATIVE
from training.acceptance_sources import acceptance_of
from training.fit import (
    MIN_ROWS,
    Surface,
    cell_spread,
    check_enough,
    fit_surfaces,
    robust_std,
    tier_order,
)
from training.points import Point, assumed_accept_len, fit_points, has_context_levels, regions_of
from training.prefill import Burst, PrefillFit, bursts_by_kind, fit_prefill
from training.samples import Samples, collect
from training.sources import Sources, describe

QUIET_SPREAD = 0.05
"""Relative spread up to which a cell counts as quiet."""
FEW_FIGURES = 5
"""Figures of a tier below which the report says how few they are."""
KINDS = ("log", "benchmark", "table")
"""Which points decide a tier that no trace covers: the first of these kinds that has any."""


@dataclass(frozen=True)
class TierReport:
    """What the fit of one tier's traces looks like.

    Attributes:
        cost: The fitted cost, held-out errors included.
        context_range: Fewest and most context tokens of a round.
        quiet_median_error: Median relative error on held-out rounds of cells that spread by at most
            ``QUIET_SPREAD``; None if there were none.
        cells: ``(batch size, mean context tokens, rounds, relative spread)`` of every cell.
    """

    cost: TierCost
    context_range: tuple[int, int]
    quiet_median_error: float | None
    cells: tuple[tuple[int, float, int, float], ...]


@dataclass(frozen=True)
class Fitted:
    """A calibration and what the report shows about it.

    Attributes:
        calibration: The result.
        tiers: One report a tier that traces cover.
        dropped: Trace rows left out of the fit, by reason.
        prefill: Prefill fits by ``"native"`` and ``"speculative"``.
        points: Round times of logs, benchmarks and tables, used or not.
        samples: Rounds of the traces by tier.
        remarks: Sentences for the reader.
    """

    calibration: Calibration
    tiers: tuple[TierReport, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    prefill: Mapping[str, PrefillFit] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    samples: Mapping[str, Samples] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def calibrate(
    sources: Sources,
    name: str,
    *,
    min_rows: int = MIN_ROWS,
    kv_capacity_tokens: int | None = None,
    chunk_tokens: int | None = None,
    source: Mapping[str, Any] | None = None,
    acceptance: AcceptanceProfile | None = None,
    simulated_acceptance: bool = False,
    costs_only: bool = False,
) -> Fitted:
    """Fit a calibration; traces decide the tiers they cover, other sources add the rest.

    Args:
        sources: What was measured.
        name: Name of the calibration.
        min_rows: Fewest rounds of a tier in the traces.
        kv_capacity_tokens: Tokens of the KV cache; None for the smallest that a log says.
        chunk_tokens: Most new tokens of a prefill batch; None likewise.
        source: Added to the calibration's origin.
        acceptance: Used instead of what the sources say.
        simulated_acceptance: Whether the engine simulated acceptance where its log cannot say so.
        costs_only: Leave out the acceptance and the regions, but for tiers without contexts, whose
            fit adds knots that only the regions tell from measurements.

    Raises:
        CalibrationError: If a tier or the prefill cost cannot be fitted.
    """
    costs: dict[str, TierCost] = {}
    reports: tuple[TierReport, ...] = ()
    samples: Mapping[str, Samples] = {}
    dropped: Counter[str] = Counter()
    prefill: dict[str, PrefillFit] = {}
    remarks: list[str] = []
    graphs = None
    if sources.traces:
        graphs = sources.traces[0].header.cuda_graph_batch_sizes
        pairs = [(trace.header, trace.rows) for trace in sources.traces]
        samples, dropped = collect(pairs, lambda size: _padded(graphs, size))
        check_enough(samples, min_rows)
        reports = _reports(samples)
        for report in reports:
            rounds = samples[report.cost.tier]
            regions = regions_of(rounds.batch_size, rounds.context_tokens)
            costs[report.cost.tier] = replace(report.cost, regions=regions)
        prefill = _prefill(bursts_by_kind(pairs), remarks)
    used = _used_points(sources.points, costs)
    added = {cost.tier: cost for cost in fit_points(used)}
    assumed = assumed_accept_len(used)
    costs |= added
    if not costs:
        raise CalibrationError(
            "expected round times, got none: the sources hold only accept lengths or unusable "
            "lines "
            f"({_unusable(sources) or 'nothing else'}); add a step trace, or a log with steady "
            f"decode"
        )
    _remark_on_points(used, assumed, bool(sources.traces), remarks)
    if not sources.traces and any(log.bursts for log in sources.logs):
        prefill = _prefill_of_logs(sources, remarks)
    zero = PrefillCost(0.0, 0.0)
    if costs_only:
        costs = {
            tier: replace(cost, regions=()) if cost.max_context_tokens else cost
            for tier, cost in costs.items()
        }
    elif acceptance is None:
        acceptance = acceptance_of(sources, simulated_acceptance)
    calibration = Calibration(
        name=name,
        costs=tuple(sorted(costs.values(), key=lambda cost: tier_order(cost.tier))),
        prefill_native=prefill["native"].cost if prefill else zero,
        prefill_speculative=prefill["speculative"].cost if prefill else zero,
        cuda_graph_batch_sizes=graphs,
        kv_capacity_tokens=kv_capacity_tokens or _smallest(log.kv_tokens for log in sources.logs),
        chunk_tokens=chunk_tokens or _smallest(log.chunk_tokens for log in sources.logs),
        assumed_accept_len=assumed,
        source={**describe(sources), **(source or {})},
        acceptance=None if costs_only else acceptance,
    )
    return Fitted(calibration, reports, dropped, prefill, sources.points, samples, tuple(remarks))


def _used_points(points: Sequence[Point], covered: Mapping[str, TierCost]) -> list[Point]:
    """Return the points of the tiers that no trace covers, of one kind a tier."""
    kinds: dict[str, str] = {}
    for kind in KINDS:
        for point in points:
            if point.kind == kind and point.tier not in covered:
                kinds.setdefault(point.tier, kind)
    return [point for point in points if kinds.get(point.tier) == point.kind]


def _remark_on_points(
    used: Sequence[Point], assumed: Mapping[str, float], traces: bool, remarks: list[str]
) -> None:
    remarks += [
        f"tier {tier}: accept length {value:.3f} is assumed; only accept length over round "
        "time is identified"
        for tier, value in assumed.items()
    ]
    capped = [point for point in used if point.batch_size < point.concurrency]
    if any(point.kind == "table" for point in capped):
        most = max(point.batch_size for point in capped)
        remarks.append(
            f"rows of speculation with more than {most} requests are taken to run {most} at once; "
            f"if "
            "that server ran more, give --speculative-max-running-requests"
        )
    for kind in KINDS:
        here = [point for point in used if point.kind == kind]
        tiers = sorted({point.tier for point in here}, key=tier_order)
        if traces and here:
            names = ", ".join(tiers)
            why = (
                ": its throughput includes prefill, and the prefill cost comes on top of it"
                if kind == "table"
                else ""
            )
            remarks.append(f"tiers {names} come from the {kind}{why}")
        for tier in tiers:
            mine = [point for point in here if point.tier == tier]
            if len(mine) < FEW_FIGURES:
                remarks.append(f"tier {tier} rests on {len(mine)} figures of a {kind}")
            contexts = [point for point in mine if point.context_tokens is not None]
            if contexts and not has_context_levels(contexts):
                remarks.append(
                    f"tier {tier}: its {kind} has one context level a batch size, so the cost of "
                    "context is the least that explains it; round times hold at those contexts"
                )


def _unusable(sources: Sources) -> str:
    found: Counter[str] = Counter()
    for log in sources.logs:
        for why, count in log.unusable.items():
            found[f"decode lines {why}"] += count
    for table in sources.tables:
        found.update({f"rows {why}": count for why, count in table.left_out.items()})
    return ", ".join(f"{count} {why}" for why, count in found.items())


def _smallest(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _padded(sizes: Sequence[int] | None, size: int) -> int:
    if sizes is None or size > sizes[-1]:
        return size
    return sizes[bisect.bisect_left(sizes, size)]


def _reports(samples: Mapping[str, Samples]) -> tuple[TierReport, ...]:
    judged = fit_surfaces({tier: item.where(~item.held_out) for tier, item in samples.items()})
    final = fit_surfaces(samples)
    return tuple(_report(tier, samples[tier], final[tier], judged[tier]) for tier in final)


def _report(tier: str, samples: Samples, surface: Surface, judged: Surface) -> TierReport:
    held = samples.where(samples.held_out)
    error = np.abs(judged.predict(held.batch_size, held.context_tokens) / held.step_s - 1.0)
    predicted = surface.predict(samples.batch_size, samples.context_tokens)
    residual = samples.step_s / predicted - 1.0
    measured = np.unique(samples.batch_size)
    groups = [residual[samples.batch_size == size] for size in measured]
    noise = [robust_std(group - np.median(group)) for group in groups]
    cost = TierCost(
        tier=tier,
        batch_sizes=tuple(surface.batch_sizes.tolist()),
        base_s=tuple(surface.base_s.tolist()),
        context_s_per_token=surface.slope_s,
        relative_noise=tuple(
            float(f"{value:.4g}") for value in np.interp(surface.batch_sizes, measured, noise)
        ),
        max_context_tokens=int(np.max(samples.context_tokens)),
        num_rows=len(samples),
        median_error=float(f"{np.median(error):.4g}") if len(error) else None,
        p95_error=float(f"{np.quantile(error, 0.95):.4g}") if len(error) else None,
    )
    cells = tuple(cell_spread(samples, surface))
    quiet_cells = np.unique(samples.cell)[[cell[3] <= QUIET_SPREAD for cell in cells]]
    quiet = error[np.isin(held.cell, quiet_cells)]
    context = (int(np.min(samples.context_tokens)), cost.max_context_tokens)
    quiet_median = float(np.median(quiet)) if len(quiet) else None
    return TierReport(cost, context, quiet_median, cells)


def _prefill_of_logs(sources: Sources, remarks: list[str]) -> dict[str, PrefillFit]:
    bursts: dict[bool, list[Burst]] = {False: [], True: []}
    for log in sources.logs:
        bursts[log.tier != NATIVE] += log.bursts
    try:
        return _prefill(bursts, remarks)
    except CalibrationError as error:
        remarks.append(f"no prefill cost: {error}")
        return {}


def _prefill(bursts: Mapping[bool, Sequence[Burst]], remarks: list[str]) -> dict[str, PrefillFit]:
    kinds = {"native": bursts[False], "speculative": bursts[True]}
    fits, failures = {}, []
    for kind, found in kinds.items():
        try:
            fits[kind] = fit_prefill(found)
        except CalibrationError as error:
            failures.append(f"{kind} {error}")
    if not fits:
        raise CalibrationError("; ".join(failures))
    for kind, other in (("native", "speculative"), ("speculative", NATIVE)):
        if kind not in fits:
            fits[kind] = replace(fits[other], taken_from=other)
            remarks.append(f"{failures[0]}; the {other} cost is used instead")
    return fits
