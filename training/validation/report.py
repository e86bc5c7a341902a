"""The result of a validation: its checks, its JSON, and its tables for people."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from controller.calibration import Calibration
from training.validation.bounds import QUIET_DEVIATION, Check
from training.validation.cells import CellError, check_cells, summary
from training.validation.closed_loop import CellThroughput
from training.validation.halves import TableResult, check_tables
from training.validation.logs import LogResult, check_logs
from training.validation.other_run import OtherCell, check_other_runs
from training.validation.traces import trace_stem

SCHEMA = "specgovernor.validation"
SCHEMA_VERSION = 1
DIGITS = 5
"""Significant digits kept in the JSON."""


@dataclass(frozen=True)
class Validation:
    """Everything that was measured.

    Attributes:
        calibration: The one whose traces were used.
        cells: Step time of every cell, predicted from the others.
        other_runs: Step time of every cell of runs that the calibration has never seen.
        tables: Throughput tables, predicted in halves.
        logs: Server logs against the trace of their run.
        closed_loop: Simulated against measured decode throughput.
    """

    calibration: Calibration
    cells: tuple[CellError, ...]
    other_runs: tuple[OtherCell, ...]
    tables: tuple[TableResult, ...]
    logs: tuple[LogResult, ...]
    closed_loop: tuple[CellThroughput, ...]

    @property
    def checks(self) -> tuple[Check, ...]:
        """Every figure that has a bound."""
        return (
            *check_cells(self.cells),
            *check_other_runs(self.other_runs),
            *check_tables(self.tables),
            *check_logs(self.logs),
        )

    @property
    def passed(self) -> bool:
        """Whether every bound holds."""
        return all(check.passed for check in self.checks)

    @property
    def quiet_keys(self) -> set[tuple[str, int, int]]:
        """Tier, batch size and lowest context of the quiet cells."""
        return {(c.tier, c.batch_size, c.lowest_context) for c in self.cells if c.quiet}

    def groups(self) -> dict[str, Sequence[float]]:
        """Return the errors that are summed up, by what they are."""
        quiet = [cell for cell in self.cells if cell.quiet]
        result: dict[str, Sequence[float]] = {
            "step time, quiet cells": [c.error for c in quiet],
            "step time, quiet cells, inner batch sizes": [c.error for c in quiet if not c.edge],
            "step time, quiet cells, smallest and largest batch size": [
                c.error for c in quiet if c.edge
            ],
            "step time, quiet cells, whole batch size held out": [
                c.error_without_batch_size for c in quiet
            ],
        }
        result["step time, all cells, noisy ones included"] = [c.error for c in self.cells]
        result["step time of other runs, quiet cells"] = [
            c.error for c in self.other_runs if c.quiet
        ]
        for table in self.tables:
            result[f"throughput, {table.table}"] = [row.error for row in table.rows]
        result["throughput, all tables"] = [r.error for table in self.tables for r in table.rows]
        result["log throughput, identifiable cells"] = [
            c.error for log in self.logs for c in log.cells if c.error is not None
        ]
        result["simulated throughput, quiet cells"] = [
            c.error for c in self.closed_loop if self.is_quiet(c)
        ]
        return result

    def is_quiet(self, cell: CellThroughput) -> bool:
        """Tell whether a simulated cell's measurement can be trusted."""
        return (cell.tier, cell.batch_size, cell.context_tokens[0]) in self.quiet_keys

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        value = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "calibration": {"name": self.calibration.name, "sha256": self.calibration.sha256},
            "checks": [{**asdict(check), "passed": check.passed} for check in self.checks],
            "summaries": {
                name: dict(
                    zip(("median", "p95", "worst"), summary(errors), strict=True),
                    count=len(errors),
                )
                for name, errors in self.groups().items()
                if errors
            },
            "step_time_cells": [{**asdict(c), "quiet": c.quiet} for c in self.cells],
            "other_runs": [{**asdict(c), "quiet": c.quiet} for c in self.other_runs],
            "tables": [asdict(table) for table in self.tables],
            "logs": [asdict(log) for log in self.logs],
            "simulated_throughput": [
                {**asdict(c), "quiet": self.is_quiet(c)} for c in self.closed_loop
            ],
        }
        return dict(_rounded(value))


def print_validation(result: Validation, console: Console) -> None:
    """Print every part, noisy cells by themselves, and the checks last."""
    quiet = [cell for cell in result.cells if cell.quiet]
    noisy = [cell for cell in result.cells if not cell.quiet]
    _print(
        console,
        "Step time of quiet cells, each predicted without its own rounds (* edge batch size)",
        ("tier", "batch", "context", "rounds", "ms", "spread", "predicted", "error", "no batch"),
        (
            (
                c.tier,
                f"{c.batch_size}{'*' if c.edge else ''}",
                c.context_tokens,
                c.rounds,
                f"{1e3 * c.measured_s:.2f}",
                f"{c.deviation:.1%}",
                f"{1e3 * c.predicted_s:.2f}",
                f"{c.error:+.1%}",
                f"{c.error_without_batch_size:+.1%}",
            )
            for c in quiet
        ),
    )
    _print(
        console,
        f"Noisy cells (spread above {QUIET_DEVIATION:.0%}), not judged",
        ("tier", "batch", "context", "rounds", "ms", "spread", "predicted"),
        (
            (
                c.tier,
                c.batch_size,
                c.context_tokens,
                c.rounds,
                f"{1e3 * c.measured_s:.2f}",
                f"{c.deviation:.1%}",
                f"{1e3 * c.predicted_s:.2f}",
            )
            for c in noisy
        ),
    )
    _print(
        console,
        "Step time of other runs, predicted by the calibration (noisy cells marked ~)",
        ("trace", "tier", "batch", "context", "rounds", "ms", "spread", "predicted", "error"),
        (
            (
                trace_stem(c.trace),
                c.tier,
                f"{'' if c.quiet else '~'}{c.batch_size}",
                c.context_tokens,
                c.rounds,
                f"{1e3 * c.measured_s:.2f}",
                f"{c.deviation:.1%}",
                f"{1e3 * c.predicted_s:.2f}",
                f"{c.error:+.1%}",
            )
            for c in result.other_runs
        ),
    )
    _print(
        console,
        "Table throughput, tokens/s, each row predicted from the other half (* extrapolated)",
        ("table", "tier", "concurrency", "table says", "predicted", "error"),
        (
            (
                r.table,
                r.tier,
                f"{r.concurrency}{'*' if r.extrapolated else ''}",
                f"{r.measured:.1f}",
                f"{r.predicted:.1f}",
                f"{r.error:+.1%}",
            )
            for table in result.tables
            for r in table.rows
        ),
    )
    for item in result.tables:
        if item.left_out is not None:
            console.print(
                f"Table {item.table} left out: {item.left_out}.", highlight=False, markup=False
            )
    for log in result.logs:
        _print_log(console, log)
    _print(
        console,
        "Decode throughput, tokens/s, of the simulator against the trace (noisy cells marked ~)",
        ("tier", "batch", "context", "rounds", "accept length", "trace", "simulated", "error"),
        (
            (
                c.tier,
                f"{'' if result.is_quiet(c) else '~'}{c.batch_size}",
                f"{c.context_tokens[0]}-{c.context_tokens[1]}",
                c.rounds,
                f"{c.accept_len:.2f}",
                f"{c.throughput:.1f}",
                f"{c.simulated:.1f}",
                f"{c.error:+.1%}",
            )
            for c in result.closed_loop
        ),
    )
    _print(
        console,
        "Errors summed up",
        ("what", "count", "median", "p95", "worst"),
        (
            (name, len(errors), *(f"{value:.1%}" for value in summary(errors)))
            for name, errors in result.groups().items()
            if errors
        ),
    )
    _print(
        console,
        "Bounds",
        ("figure", "value", "bound", ""),
        (
            (c.name, f"{c.value:.1%}", f"{c.limit:.0%}", "holds" if c.passed else "MISSED")
            for c in result.checks
        ),
    )


def _print_log(console: Console, result: LogResult) -> None:
    title = f"Log {result.log} against trace {result.trace}"
    if result.refused is not None:
        depths = f"depths {', '.join(result.tiers)}" if len(result.tiers) > 1 else "one depth"
        console.print(
            f"{title} ({depths}): refused: {result.refused}", highlight=False, markup=False
        )
        return
    _print(
        console,
        f"{title}: decode throughput, tokens/s",
        ("tier", "batch", "context", "accept length", "trace", "lines", "from log", "error"),
        (
            (
                c.tier,
                c.batch_size,
                f"{c.context_tokens[0]}-{c.context_tokens[1]}",
                f"{c.accept_len:.2f}",
                f"{c.throughput:.1f}",
                c.lines,
                "unidentifiable" if c.from_log is None else f"{c.from_log:.1f}",
                "" if c.error is None else f"{c.error:+.1%}",
            )
            for c in result.cells
        ),
    )


def _print(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    table = RichTable(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def _rounded(value: Any) -> Any:
    """Keep what is the same on every machine; NaN, which JSON lacks, becomes None."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
