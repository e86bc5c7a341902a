"""Fit the time of a prefill batch from bursts: ``base_s + s_per_token * new_tokens``.

Under the overlap schedule the time of one prefill row means nothing alone, so the unit is a burst:
consecutive prefill rows, whose times are summed. Its new tokens are the sum of the rows'
``new_tokens``; where a trace lacks these, and nothing was running before, they are the context of
the first decode row after the burst (for a native round less one token a request, which that round
has added). Where all batches are of about one size only their time is known: it is charged by
token. A burst's time includes the engine's idle time before it, so the fit minimises absolute
relative errors, which a few late bursts do not move. The first bursts of a trace compile kernels
and are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controller.calibration import PrefillCost
from controller.errors import CalibrationError
from controller.trace import TraceHeader, TraceRow

SWEEPS = 200
OUTLIER_ERROR = 0.5
MIN_BURSTS = 3
SIZE_RANGE = 2.0
"""Ratio of largest to smallest batch from which a base cost can be told from one by token."""
WARM_UP_BURSTS = 2


@dataclass(frozen=True)
class Burst:
    """Consecutive prefill batches: their number, their new tokens, and their seconds in all."""

    num_batches: int
    new_tokens: int
    time_s: float


@dataclass(frozen=True)
class PrefillFit:
    """A fitted prefill cost, the bursts used, those left out as outliers, and the median error.

    ``taken_from`` names the kind of server whose cost it is, where the own could not be fitted.
    """

    cost: PrefillCost
    num_bursts: int
    num_outliers: int
    median_error: float
    taken_from: str | None = None


def find_bursts(rows: Sequence[TraceRow], native: bool) -> list[Burst]:
    """Return a trace's bursts with known new tokens and time, without the warm-up."""
    bursts = []
    count = 0
    start: int | None = None
    for index, row in enumerate(rows):
        if row.phase == "prefill":
            start = index if start is None else start
            continue
        if start is not None:
            count += 1
            group = rows[start:index]
            tokens = _new_tokens(group, row, native)
            times = [item.step_s for item in group if item.step_s is not None]
            if tokens and len(times) == len(group) and count > WARM_UP_BURSTS:
                bursts.append(Burst(len(group), tokens, sum(times)))
        start = None
    return bursts


def _new_tokens(group: Sequence[TraceRow], after: TraceRow, native: bool) -> int | None:
    known = [item.new_tokens for item in group if item.new_tokens is not None]
    if len(known) == len(group):
        return sum(known)
    # A request that spans two chunks is counted in both batches, at most once a boundary.
    requests = sum(item.batch_size for item in group)
    if not requests - (len(group) - 1) <= after.batch_size <= requests:
        return None
    return after.context_tokens - (after.batch_size if native else 0)


def fit_prefill(bursts: Sequence[Burst]) -> PrefillFit:
    """Fit one kind of server.

    Raises:
        CalibrationError: If there are too few bursts.
    """
    if len(bursts) < MIN_BURSTS:
        raise CalibrationError(
            f"prefill: expected at least {MIN_BURSTS} bursts with known new tokens, got "
            f"{len(bursts)}; record bursts of prompts of several lengths on an idle server, or "
            "record new_tokens"
        )
    batches = np.array([float(item.num_batches) for item in bursts])
    tokens = np.array([float(item.new_tokens) for item in bursts])
    time = np.array([item.time_s for item in bursts])
    keep = np.ones(len(bursts), dtype=bool)
    base, slope = _least_absolute(batches, tokens, time)
    error = np.abs((base * batches + slope * tokens) / time - 1.0)
    keep = error <= OUTLIER_ERROR
    if np.sum(keep) >= MIN_BURSTS:
        base, slope = _least_absolute(batches[keep], tokens[keep], time[keep])
        error = np.abs((base * batches + slope * tokens) / time - 1.0)[keep]
    cost = PrefillCost(float(f"{base:.4g}"), float(f"{slope:.4g}"))
    return PrefillFit(cost, len(error), len(bursts) - len(error), float(np.median(error)))


def _least_absolute(
    batches: np.ndarray, tokens: np.ndarray, time: np.ndarray
) -> tuple[float, float]:
    """Minimise the sum of absolute relative errors; both coefficients stay non-negative."""
    sizes = tokens / batches
    if np.max(sizes) < SIZE_RANGE * np.min(sizes):
        return 0.0, float(np.median(time / tokens))
    design = np.stack([batches / time, tokens / time], axis=1)
    weight = np.ones(len(time))
    base = slope = 0.0
    for _ in range(SWEEPS):
        gram = (design * weight[:, None]).T @ design
        right = (design * weight[:, None]).sum(axis=0)
        determinant = gram[0, 0] * gram[1, 1] - gram[0, 1] ** 2
        if determinant > 1e-9 * gram[0, 0] * gram[1, 1]:
            base = float((right[0] * gram[1, 1] - right[1] * gram[0, 1]) / determinant)
            slope = float((right[1] * gram[0, 0] - right[0] * gram[0, 1]) / determinant)
        else:
            base, slope = 0.0, float(right[1] / gram[1, 1])
        if base < 0.0:
            base, slope = 0.0, float(right[1] / gram[1, 1])
        if slope < 0.0:
            base, slope = float(right[0] / gram[0, 0]), 0.0
        weight = 1.0 / np.maximum(np.abs(design @ np.array([base, slope]) - 1.0), 1e-4)
    return base, slope


def bursts_by_kind(
    traces: Sequence[tuple[TraceHeader, Sequence[TraceRow]]],
) -> dict[bool, list[Burst]]:
    """Return all bursts, under whether the server speculates."""
    found: dict[bool, list[Burst]] = {False: [], True: []}
    for header, rows in traces:
        found[header.speculative] += find_bursts(rows, native=not header.speculative)
    return found
