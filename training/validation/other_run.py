"""Step time of other runs of the same system, which the calibration has never seen.

Another server on another day, recorded by the plugin, differs from the calibration's in all that a
user's next run will differ in: the machine, its host, the order of the work. Every (tier, batch
size, context level) cell of such a trace is compared with the calibration's prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from controller.calibration import Calibration
from controller.trace import Trace, read_trace
from training.fit import tier_order
from training.samples import collect
from training.sources import SAME_FIELDS
from training.validation.bounds import OTHER_MEDIAN, OTHER_P95, Check
from training.validation.cells import JudgedCell, summary
from training.validation.traces import trace_stem, traces_by_stem

MIN_ROUNDS = 15
"""Fewest usable rounds of a cell that is judged."""


@dataclass(frozen=True)
class OtherCell(JudgedCell):
    """One cell of another run.

    Attributes:
        trace: File name.
        tier: Tier name.
        batch_size: Padded batch size.
        context_tokens: Median context over the batch.
        rounds: Usable rounds.
        measured_s: Median round.
        deviation: Median of ``|step / median step - 1|``.
        predicted_s: The calibration's prediction.
    """

    trace: str
    tier: str
    batch_size: int
    context_tokens: int
    rounds: int
    measured_s: float
    deviation: float
    predicted_s: float


def find_other_runs(folder: Path, known: Sequence[Trace]) -> list[Trace]:
    """Return the traces in a folder that are of the known ones' system, but none of them.

    Raises:
        TraceError: If a trace breaks the schema.
    """
    names = {trace_stem(trace.path.name) for trace in known}
    system = [getattr(known[0].header, field) for field in SAME_FIELDS]
    found = []
    for stem, path in traces_by_stem(folder).items():
        if stem in names:
            continue
        trace = read_trace(path)
        if [getattr(trace.header, field) for field in SAME_FIELDS] == system:
            found.append(trace)
    return found


def judge_other_runs(calibration: Calibration, traces: Sequence[Trace]) -> tuple[OtherCell, ...]:
    """Predict every cell of some traces; tiers that the calibration lacks are left out."""
    costs = {cost.tier: cost for cost in calibration.costs}
    cells = []
    for trace in traces:
        samples, _ = collect([(trace.header, trace.rows)], calibration.padded)
        for tier in sorted(samples.keys() & costs.keys(), key=tier_order):
            item, cost = samples[tier], costs[tier]
            for cell in np.unique(item.cell):
                at = item.cell == cell
                if int(np.sum(at)) < MIN_ROUNDS:
                    continue
                size = int(item.batch_size[at][0])
                step_s, context = item.step_s[at], float(np.median(item.context_tokens[at]))
                median_s = float(np.median(step_s))
                cells.append(
                    OtherCell(
                        trace=trace.path.name,
                        tier=tier,
                        batch_size=size,
                        context_tokens=round(context),
                        rounds=int(np.sum(at)),
                        measured_s=median_s,
                        deviation=float(np.median(np.abs(step_s / median_s - 1.0))),
                        predicted_s=cost.base_at(size) + cost.context_s_per_token * context,
                    )
                )
    return tuple(cells)


def check_other_runs(cells: Sequence[OtherCell]) -> tuple[Check, Check]:
    """Judge the quiet cells; without any the figures are NaN, which misses the bounds."""
    median, p95, _ = summary([cell.error for cell in cells if cell.quiet])
    return (
        Check("step time of other runs, quiet cells, median error", median, OTHER_MEDIAN),
        Check("step time of other runs, quiet cells, p95 error", p95, OTHER_P95),
    )
