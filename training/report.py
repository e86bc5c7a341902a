"""Tables about a fitted calibration, for people."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from training.fitting import QUIET_SPREAD, Fitted, TierReport


def print_report(fitted: Fitted, console: Console) -> None:
    """Print the held-out errors, noisy cells, prefill, table rows and extrapolation limits."""
    if fitted.tiers:
        console.print(_tiers(fitted))
        left_out = ", ".join(f"{count} {why}" for why, count in fitted.dropped.items() if count)
        console.print(f"Rows left out: {left_out or 'none'}.", highlight=False)
        noisy = _noisy(fitted.tiers)
        if noisy.row_count:
            console.print(noisy)
    for kind, fit in fitted.prefill.items():
        console.print(
            f"Prefill, {kind}: {1e3 * fit.cost.base_s:.1f} ms + "
            f"{1e6 * fit.cost.s_per_token:.2f} us a token, from {fit.num_bursts} bursts "
            f"({fit.num_outliers} outliers left out), median error {fit.median_error:.1%}.",
            highlight=False,
        )
    if fitted.table:
        console.print(_table_rows(fitted))
    for report in fitted.tiers:
        sizes = report.cost.batch_sizes
        console.print(
            f"Tier {report.cost.tier} extrapolates outside batch sizes {sizes[0]} to {sizes[-1]} "
            f"and above {report.context_range[1]} context tokens.",
            highlight=False,
        )
    for remark in fitted.remarks:
        console.print(f"Note: {escape(remark)}.", highlight=False)


def _tiers(fitted: Fitted) -> RichTable:
    table = RichTable(title=f"{escape(fitted.calibration.name)}: step time, held-out rounds")
    for name in ("tier", "rounds", "batch sizes", "context tokens", "ns/token"):
        table.add_column(name, justify="right", overflow="fold")
    for name in ("median error", "p95 error", "quiet median", "noise"):
        table.add_column(name, justify="right", overflow="fold")
    for report in fitted.tiers:
        cost = report.cost
        table.add_row(
            cost.tier,
            str(cost.num_rows),
            ",".join(map(str, cost.batch_sizes)),
            f"{report.context_range[0]}-{report.context_range[1]}",
            f"{1e9 * cost.context_s_per_token:.1f}",
            _percent(cost.median_error),
            _percent(cost.p95_error),
            _percent(report.quiet_median_error),
            f"{_percent(min(cost.relative_noise))}-{_percent(max(cost.relative_noise))}",
        )
    return table


def _noisy(reports: tuple[TierReport, ...]) -> RichTable:
    table = RichTable(title=f"Noisy cells (relative spread above {QUIET_SPREAD:.0%})")
    for name in ("tier", "batch size", "mean context", "rounds", "spread"):
        table.add_column(name, justify="right", overflow="fold")
    for report in reports:
        for batch, context, rounds, spread in report.cells:
            if spread > QUIET_SPREAD:
                table.add_row(
                    report.cost.tier, str(batch), f"{context:.0f}", str(rounds), _percent(spread)
                )
    return table


def _table_rows(fitted: Fitted) -> RichTable:
    table = RichTable(title="Throughput, tokens/s")
    for name in ("tier", "concurrency", "batch size", "accept length", "table", "predicted"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("error", justify="right")
    for row in fitted.table.rows if fitted.table else ():
        step_s = fitted.calibration.step_s(row.tier, row.batch_size, 0)
        predicted = row.accept_len * row.batch_size / step_s
        table.add_row(
            row.tier,
            str(row.concurrency),
            str(row.batch_size),
            f"{row.accept_len:.2f}{' assumed' if row.assumed else ''}",
            f"{row.throughput:.1f}",
            f"{predicted:.1f}",
            f"{predicted / row.throughput - 1.0:+.1%}",
        )
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
