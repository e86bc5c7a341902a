"""Throughput tables calibrated on one half of their concurrencies and asked for the other.

Concurrencies are taken alternately; each half predicts the other in turn. The half without the
largest (or smallest) concurrency extrapolates to it: those rows count as all others do. Tables of
fewer than ``MIN_CONCURRENCIES`` are left out, since their halves would be single points.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from training.tables import Table, TableRow, fit_table
from training.validation.bounds import TABLE_MEDIAN, TABLE_WORST, Check
from training.validation.cells import summary

MIN_CONCURRENCIES = 4


@dataclass(frozen=True)
class RowError:
    """One table row against its prediction from the other half.

    Attributes:
        table: File name of the table.
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


def predict_halves(table: Table) -> tuple[RowError, ...]:
    """Predict every row of a table from the half that it is not in.

    Returns:
        One entry a row; none if the table has too few concurrencies. A row is missing if the other
        half has no row of its tier.
    """
    sizes = sorted({row.concurrency for row in table.rows})
    if len(sizes) < MIN_CONCURRENCIES:
        return ()
    errors: list[RowError] = []
    for half in (set(sizes[::2]), set(sizes[1::2])):
        known = tuple(row for row in table.rows if row.concurrency in half)
        asked = [row for row in table.rows if row.concurrency not in half]
        errors += _predict(table, known, asked)
    return tuple(sorted(errors, key=lambda e: (e.tier, e.concurrency)))


def check_tables(errors: Sequence[RowError]) -> tuple[Check, Check]:
    """Judge the rows of all tables together."""
    median, _, worst = summary([row.error for row in errors])
    return (
        Check("table throughput from the other half, median error", median, TABLE_MEDIAN),
        Check("table throughput from the other half, worst error", worst, TABLE_WORST),
    )


def _predict(
    table: Table, known: tuple[TableRow, ...], asked: Sequence[TableRow]
) -> list[RowError]:
    errors = []
    costs = {cost.tier: cost for cost in fit_table(replace(table, rows=known))}
    for row in asked:
        same = [other for other in known if other.tier == row.tier]
        if not same:
            continue
        sizes = [other.batch_size for other in same]
        # Only accept length over round time is identified, so the asked row's own must not help.
        accept_len = float(np.mean([other.accept_len for other in same]))
        predicted = accept_len * row.batch_size / costs[row.tier].base_at(row.batch_size)
        outside = not min(sizes) <= row.batch_size <= max(sizes)
        errors.append(
            RowError(table.path.name, row.tier, row.concurrency, row.throughput, predicted, outside)
        )
    return errors
