"""The decode rounds of step traces that a fit may use, by tier.

A row's ``step_s`` is the time since the previous result, so it is the cost of the row's own round
only in steady decode. Left out are rows without a time, rows that follow a prefill or a change of
tier or batch size, the ``SETTLE_ROUNDS`` after such a change (under the overlap schedule the next
round was already launched), and stalls such as kernel compilation: more than ``STALL_FACTOR`` times
the median of their cell.

A cell is the rounds of one tier at one batch size and one context level; levels are apart by a gap
of at least a factor of ``LEVEL_GAP``.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from controller.tiers import NATIVE
from controller.trace import TraceHeader, TraceRow

SETTLE_ROUNDS = 2
STALL_FACTOR = 3.0
LEVEL_GAP = 2.0
BLOCK_ROUNDS = 4
HELD_OUT_EVERY = 5


@dataclass(frozen=True, eq=False)
class Samples:
    """Rounds of one tier; all arrays are ``(num_rows,)``. Compares and hashes by identity.

    Attributes:
        batch_size: Padded batch size.
        context_tokens: Context tokens summed over the batch.
        step_s: Seconds of the round.
        cell: Index of the cell.
        held_out: Whether a fit that is to be judged leaves the row out: every fifth block of four
            rounds of a batch size.
    """

    batch_size: NDArray[np.int64]
    context_tokens: NDArray[np.float64]
    step_s: NDArray[np.float64]
    cell: NDArray[np.int64]
    held_out: NDArray[np.bool_]

    @cached_property
    def cell_rows(self) -> tuple[NDArray[np.int64], ...]:
        """Indices of the rounds of each cell, in the order of ``np.unique(cell)``."""
        return tuple(np.flatnonzero(self.cell == cell) for cell in np.unique(self.cell))

    def __len__(self) -> int:
        """Return the number of rounds."""
        return len(self.step_s)

    def where(self, mask: NDArray[np.bool_]) -> "Samples":
        """Return the rounds that ``mask`` selects."""
        return Samples(
            self.batch_size[mask],
            self.context_tokens[mask],
            self.step_s[mask],
            self.cell[mask],
            self.held_out[mask],
        )


def tier_name(row: TraceRow, header: TraceHeader) -> str:
    """Return the tier of a decode row."""
    if row.num_steps is None:
        return NATIVE
    return str(row.num_steps) if row.num_steps else str(header.zero_step)


def usable_rounds(rows: Iterable[TraceRow], dropped: Counter[str]) -> Iterable[TraceRow]:
    """Yield the rows of steady decode, counting the others by reason in ``dropped``."""
    previous: tuple[str, int | None, int] | None = None
    steady = 0
    for row in rows:
        key = (row.phase, row.num_steps, row.batch_size)
        steady = steady + 1 if key == previous else 0
        previous = key
        if row.phase != "decode":
            dropped["prefill"] += 1
        elif row.step_s is None:
            dropped["no time"] += 1
        elif steady < SETTLE_ROUNDS:
            dropped["after a change"] += 1
        else:
            yield row


def collect(
    traces: Sequence[tuple[TraceHeader, Sequence[TraceRow]]], padded: Callable[[int], int]
) -> tuple[dict[str, Samples], Counter[str]]:
    """Gather the usable rounds of several traces by tier.

    Args:
        traces: Header and rows of each trace.
        padded: Maps a batch size to the one that the engine runs.

    Returns:
        The samples by tier name, and how many rows were left out by reason.
    """
    dropped: Counter[str] = Counter()
    found: dict[str, list[tuple[int, float, float]]] = {}
    for header, rows in traces:
        for row in usable_rounds(rows, dropped):
            if row.step_s is not None:
                found.setdefault(tier_name(row, header), []).append(
                    (padded(row.batch_size), float(row.context_tokens), row.step_s)
                )
    samples = {}
    for tier, values in found.items():
        batch, context, step = (np.array(column) for column in zip(*values, strict=True))
        whole = Samples(
            batch.astype(np.int64), context, step, context_cells(batch, context), _held_out(batch)
        )
        keep = ~_stalls(whole)
        dropped["stall"] += int(np.sum(~keep))
        samples[tier] = whole.where(keep)
    return samples, dropped


def context_cells(batch: NDArray[np.int64], context: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the cell of every row; see the module."""
    cell = np.zeros(len(batch), dtype=np.int64)
    count = 0
    for size in np.unique(batch):
        at = np.flatnonzero(batch == size)
        order = at[np.argsort(context[at], kind="stable")]
        level = np.maximum(context[order], 1.0)
        steps = np.concatenate([[0], np.cumsum(level[1:] >= LEVEL_GAP * level[:-1])])
        cell[order] = count + steps
        count += int(steps[-1]) + 1
    return cell


def _held_out(batch: NDArray[np.int64]) -> NDArray[np.bool_]:
    mask = np.zeros(len(batch), dtype=bool)
    for size in np.unique(batch):
        at = np.flatnonzero(batch == size)
        block = np.arange(len(at)) // BLOCK_ROUNDS
        mask[at] = block % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return mask


def _stalls(samples: Samples) -> NDArray[np.bool_]:
    mask = np.zeros(len(samples), dtype=bool)
    for cell in np.unique(samples.cell):
        at = samples.cell == cell
        mask[at] = samples.step_s[at] > STALL_FACTOR * np.median(samples.step_s[at])
    return mask
