"""What a step trace itself says of decode throughput: tokens over time in steady decode."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.trace import TraceHeader, TraceRow
from training.fit import tier_order
from training.samples import Samples, tier_name, usable_rounds

AcceptLens = Mapping[tuple[str, int], tuple[NDArray[np.float64], NDArray[np.float64]]]
"""Context tokens and accept length of every round, by tier and batch size."""


@dataclass(frozen=True)
class MeasuredCell:
    """A (tier, batch size, context level) cell of a trace.

    Attributes:
        tier: Tier name.
        batch_size: Running requests.
        context_tokens: Lowest and highest context over the batch.
        rounds: Usable rounds.
        accept_len: Mean accept length, bonus included.
        throughput: Output tokens a second.
    """

    tier: str
    batch_size: int
    context_tokens: tuple[int, int]
    rounds: int
    accept_len: float
    throughput: float


def measure_cells(
    traces: Sequence[tuple[TraceHeader, Sequence[TraceRow]]], samples: Mapping[str, Samples]
) -> tuple[MeasuredCell, ...]:
    """Return every cell whose accept length is known.

    Args:
        traces: Header and rows of the traces.
        samples: Their usable rounds by tier name.
    """
    accept = _accept_lens(traces)
    cells = []
    for tier in sorted(samples, key=tier_order):
        item = samples[tier]
        for at in item.cell_rows:
            size = int(item.batch_size[at][0])
            context = item.context_tokens[at]
            low, high = float(np.min(context)), float(np.max(context))
            where, lens = accept.get((tier, size), (np.zeros(0), np.zeros(0)))
            inside = (where >= low) & (where <= high)
            if inside.any():
                accept_len = float(np.mean(lens[inside]))
                throughput = size * accept_len / float(np.mean(item.step_s[at]))
                span = (int(low), int(high))
                cells.append(MeasuredCell(tier, size, span, len(at), accept_len, throughput))
    return tuple(cells)


def _accept_lens(traces: Sequence[tuple[TraceHeader, Sequence[TraceRow]]]) -> AcceptLens:
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for header, rows in traces:
        for row in usable_rounds(rows, Counter()):
            if not row.num_steps:
                correct: float | None = 0.0
            else:
                correct = row.mean_correct_drafts
            if correct is not None:
                found.setdefault((tier_name(row, header), row.batch_size), []).append(
                    (float(row.context_tokens), 1.0 + correct)
                )
    return {
        key: (np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs]))
        for key, pairs in found.items()
    }
