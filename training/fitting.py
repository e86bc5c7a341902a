"""From sources to a calibration: fit step traces and a table, and judge the fit."""

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from controller.calibration import Calibration, PrefillCost, TierCost
from controller.errors import CalibrationError
from controller.tiers import NATIVE
from controller.trace import TraceHeader
from training.fit import (
    MIN_ROWS,
    Surface,
    cell_spread,
    check_enough,
    fit_surfaces,
    robust_std,
    tier_order,
)
from training.prefill import PrefillFit, bursts_by_kind, fit_prefill
from training.samples import Samples, collect
from training.sources import Sources, describe
from training.tables import Table, assumed_accept_len, fit_table

QUIET_SPREAD = 0.05
"""Relative spread up to which a cell counts as quiet."""


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
        table: The table, if there was one.
        remarks: Sentences for the reader.
    """

    calibration: Calibration
    tiers: tuple[TierReport, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    prefill: Mapping[str, PrefillFit] = field(default_factory=dict)
    table: Table | None = None
    remarks: tuple[str, ...] = ()


def calibrate(
    sources: Sources,
    name: str,
    *,
    min_rows: int = MIN_ROWS,
    kv_capacity_tokens: int | None = None,
    chunk_tokens: int | None = None,
    source: Mapping[str, Any] | None = None,
) -> Fitted:
    """Fit a calibration; traces decide the tiers they cover, a table adds the others.

    Raises:
        CalibrationError: If a tier or the prefill cost cannot be fitted.
    """
    costs: dict[str, TierCost] = {}
    reports: tuple[TierReport, ...] = ()
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
        costs = {report.cost.tier: report.cost for report in reports}
        prefill = _prefill(pairs, remarks)
    assumed: dict[str, float] = {}
    if sources.table:
        added = {c.tier: c for c in fit_table(sources.table) if c.tier not in costs}
        assumed = {
            tier: value
            for tier, value in assumed_accept_len(sources.table).items()
            if tier in added
        }
        costs |= added
        remarks += [
            f"tier {tier}: accept length {value:.3f} is assumed; only accept length over round "
            "time is identified"
            for tier, value in assumed.items()
        ]
        if sources.traces:
            remarks.append(
                f"tiers {', '.join(added) or 'none'} come from the table: its throughput includes "
                "prefill, and the prefill cost comes on top of it"
            )
    zero = PrefillCost(0.0, 0.0)
    calibration = Calibration(
        name=name,
        costs=tuple(sorted(costs.values(), key=lambda cost: tier_order(cost.tier))),
        prefill_native=prefill["native"].cost if prefill else zero,
        prefill_speculative=prefill["speculative"].cost if prefill else zero,
        cuda_graph_batch_sizes=graphs,
        kv_capacity_tokens=kv_capacity_tokens,
        chunk_tokens=chunk_tokens,
        assumed_accept_len=assumed,
        source={**describe(sources), **(source or {})},
    )
    return Fitted(calibration, reports, dropped, prefill, sources.table, tuple(remarks))


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


def _prefill(
    pairs: Sequence[tuple[TraceHeader, Sequence[Any]]], remarks: list[str]
) -> dict[str, PrefillFit]:
    bursts = bursts_by_kind(pairs)
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
            fits[kind] = fits[other]
            remarks.append(f"{failures[0]}; the {other} cost is used instead")
    return fits
