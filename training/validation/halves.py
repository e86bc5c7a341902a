"""Throughput tables calibrated on one half of their concurrencies and asked for the other.

Concurrencies are taken alternately; each half predicts the other in turn. The half without the
largest (or smallest) concurrency extrapolates to it: those rows count as all others do. Tables of
fewer than ``MIN_CONCURRENCIES`` are left out, since their halves would be single points.

A throughput table is a batch axis alone, so what is judged is :mod:`training.batch_curve`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from controller.errors import CalibrationError
from training.fit import tier_order
from training.points import Point, fit_points
from training.tables import TableOptions, read_table
from training.validation.bounds import TABLE_MEDIAN, TABLE_WORST, Check
from training.validation.cells import summary

MIN_CONCURRENCIES = 4

OPTIONS: Mapping[str, tuple[TableOptions, ...]] = {
    # As its calibration in the Makefile; the depth and accept length are assumed.
    "kimi_k2.5_8gpu_throughput.csv": (TableOptions(num_steps=3, accept_len=2.88),),
    # Their concurrencies are printed batch sizes, so no limit of running requests applies.
    "sglang_pr22246_qwen3-235b.csv": (TableOptions(speculative_max_running=64),),
    "sglang_pr22246_glm-4.7-fp8.csv": (TableOptions(speculative_max_running=64),),
    # TPOT by batch size with 4 draft tokens, of two attention backends: two systems.
    "sglang_pr16961_deepseek-v3.2_tpot.csv": (
        TableOptions(num_steps=3, where=(("config", "backend flashmla_sparse"),)),
        TableOptions(num_steps=3, where=(("config", "backend fa3"),)),
    ),
}
"""What tables do not say, by file name: one entry for each system in the file."""


@dataclass(frozen=True)
class RowError:
    """One table row against its prediction from the other half.

    Attributes:
        table: File name of the table, and the rows' selection if it holds several systems.
        tier: Tier name.
        concurrency: Requests in flight.
        measured: Output tokens a second as printed.
        predicted: The same from the other half.
        extrapolated: Whether the batch size lies outside the other half's.
    """

    table: str
    tier: str
    concurrency: int
    measured: float
    predicted: float
    extrapolated: bool

    @property
    def error(self) -> float:
        """Relative error of the prediction, with sign."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True)
class TableResult:
    """What became of one table.

    Attributes:
        table: File name, and the rows' selection if it holds several systems.
        left_out: Why it was not judged; None if it was.
        rows: Every row that the other half can predict.
    """

    table: str
    left_out: str | None
    rows: tuple[RowError, ...]


def judge_tables(folder: Path) -> tuple[TableResult, ...]:
    """Judge every table of a folder."""
    results = []
    for path in sorted(folder.glob("*.csv")):
        for options in OPTIONS.get(path.name, (TableOptions(),)):
            name = " ".join([path.name, *(text for _, text in options.where)])
            results.append(_judge(name, path, options))
    return tuple(results)


def _judge(name: str, path: Path, options: TableOptions) -> TableResult:
    try:
        points = read_table(path, options).points
    except CalibrationError as error:
        return TableResult(name, str(error).replace(f"{path.parent}/", ""), ())
    sizes = sorted({point.concurrency for point in points})
    if len(sizes) < MIN_CONCURRENCIES:
        return TableResult(name, f"{len(sizes)} concurrencies with a throughput or TPOT", ())
    return TableResult(name, None, predict_halves(name, points))


def predict_halves(name: str, points: Sequence[Point]) -> tuple[RowError, ...]:
    """Predict every row from the half that it is not in.

    A row is missing from the result if the other half has no row of its tier.
    """
    sizes = sorted({point.concurrency for point in points})
    errors: list[RowError] = []
    for half in (set(sizes[::2]), set(sizes[1::2])):
        known = [point for point in points if point.concurrency in half]
        asked = [point for point in points if point.concurrency not in half]
        costs = {cost.tier: cost for cost in fit_points(known)}
        for point in asked:
            same = [other for other in known if other.tier == point.tier]
            if not same:
                continue
            sizes_here = [other.batch_size for other in same]
            # Only accept length over round time is identified: the asked row's own must not help.
            accept_len = float(np.mean([other.accept_len for other in same]))
            step_s = costs[point.tier].base_at(point.batch_size)
            errors.append(
                RowError(
                    table=name,
                    tier=point.tier,
                    concurrency=point.concurrency,
                    measured=point.implied_throughput,
                    predicted=accept_len * point.batch_size / step_s,
                    extrapolated=not min(sizes_here) <= point.batch_size <= max(sizes_here),
                )
            )
    return tuple(sorted(errors, key=lambda error: (tier_order(error.tier), error.concurrency)))


def check_tables(results: Sequence[TableResult]) -> tuple[Check, Check]:
    """Judge the rows of all tables together."""
    median, _, worst = summary([row.error for result in results for row in result.rows])
    return (
        Check("table throughput from the other half, median error", median, TABLE_MEDIAN),
        Check("table throughput from the other half, worst error", worst, TABLE_WORST),
    )
