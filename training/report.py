"""Tables about a fitted calibration, for people: what was measured, predicted, and is trusted."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from controller.acceptance_profile import AcceptanceProfile
from controller.calibration import Calibration
from controller.tiers import COLD, NATIVE
from training.fitting import QUIET_SPREAD, Fitted, TierReport
from training.points import Point
from training.prefill import PrefillFit

MAX_ROWS = 60
NARROW: Mapping[str, Any] = {"box": SIMPLE_HEAD, "padding": 0}
"""How a table of many columns fits a terminal of 80."""
CONTEXTS_PER_REQUEST = (512, 2048, 8192)
GRADES = {"measured": "M", "interpolated": "i", "extrapolated": "x"}


def print_report(fitted: Fitted, console: Console) -> None:
    """Print the held-out errors, noisy cells, prefill, figures, acceptance and trust."""
    if fitted.tiers:
        console.print(_tiers(fitted))
        left_out = ", ".join(f"{count} {why}" for why, count in fitted.dropped.items() if count)
        console.print(f"Rows left out: {left_out or 'none'}.", highlight=False)
        noisy = _noisy(fitted.tiers)
        if noisy.row_count:
            console.print(noisy)
    for kind, fit in fitted.prefill.items():
        console.print(_prefill(kind, fit), highlight=False)
    by_file: dict[str, list[Point]] = {}
    for point in fitted.points:
        by_file.setdefault(point.where.rsplit(":", 1)[0], []).append(point)
    for file, points in by_file.items():
        console.print(_points(fitted.calibration, file.rsplit("/", 1)[-1], points))
    if fitted.calibration.acceptance:
        console.print(_acceptance(fitted.calibration.acceptance))
    console.print(_trust(fitted.calibration))
    for cost in fitted.calibration.costs:
        sizes = cost.measured_batch_sizes
        context = (
            f"above {cost.max_context_tokens} context tokens"
            if cost.max_context_tokens
            else "says nothing of contexts"
        )
        console.print(
            f"Tier {cost.tier} extrapolates outside batch sizes {sizes[0]} to {sizes[-1]} and "
            f"{context}.",
            highlight=False,
        )
    for remark in fitted.remarks:
        console.print(f"Note: {escape(remark)}.", highlight=False)


def off_tier(calibration: Calibration) -> str | None:
    """Return the tier of no speculation to compare with: native, else cold; None without both."""
    return next((name for name in (NATIVE, COLD) if name in calibration.tier_names), None)


def break_even(calibration: Calibration, tier: str, batch_size: int, context: int) -> float | None:
    """Return the accept length from which a tier beats no speculation; None without that."""
    off = off_tier(calibration)
    if off is None:
        return None
    return calibration.step_s(tier, batch_size, context) / calibration.step_s(
        off, batch_size, context
    )


def _prefill(kind: str, fit: PrefillFit) -> str:
    cost = f"{1e3 * fit.cost.base_s:.1f} ms + {1e6 * fit.cost.s_per_token:.2f} us a token"
    if fit.taken_from:
        return f"Prefill, {kind}: not measured, the {fit.taken_from} cost is used ({cost})."
    return (
        f"Prefill, {kind}: {cost}, from {fit.num_bursts} bursts ({fit.num_outliers} outliers left "
        f"out), median error {fit.median_error:.1%}."
    )


def _span(sizes: Sequence[int]) -> str:
    """Shorten batch sizes to their range and number: ``1-256 (11)``."""
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]} ({len(sizes)})"


def _tiers(fitted: Fitted) -> RichTable:
    table = RichTable(
        title=f"{escape(fitted.calibration.name)}: step time, held-out rounds", **NARROW
    )
    for name in ("tier", "rounds", "batch sizes", "context tokens", "ns/ token"):
        table.add_column(name.replace(" ", "\n"), justify="right", overflow="fold")
    for name in ("median error", "p95 error", "quiet median", "noise"):
        table.add_column(name.replace(" ", "\n"), justify="right", overflow="fold")
    for report in fitted.tiers:
        cost = report.cost
        table.add_row(
            cost.tier,
            str(cost.num_rows),
            _span(cost.batch_sizes),
            f"{report.context_range[0]}-{report.context_range[1]}",
            f"{1e9 * cost.context_s_per_token:.1f}",
            _percent(cost.median_error),
            _percent(cost.p95_error),
            _percent(report.quiet_median_error),
            f"{100 * min(cost.relative_noise):.1f}-{_percent(max(cost.relative_noise))}",
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


def _points(calibration: Calibration, file: str, points: list[Point]) -> RichTable:
    """Compare the figures of a log, benchmark or table with the calibration, by cell."""
    cells: dict[tuple[str, int, int], list[Point]] = {}
    for point in points:
        level = (point.context_tokens or 0).bit_length()
        cells.setdefault((point.tier, point.batch_size, level), []).append(point)
    shown = list(cells.items())[:MAX_ROWS]
    table = RichTable(
        title=f"{escape(file)}: throughput, tokens/s",
        caption=f"{len(cells) - len(shown)} more rows" if len(cells) > len(shown) else None,
        **NARROW,
    )
    for name in ("tier", "batch size", "context", "figures", "accept length"):
        table.add_column(name, justify="right", overflow="fold")
    for name in ("measured", "predicted", "error"):
        table.add_column(name, justify="right")
    for (tier, batch, _), here in shown:
        context = round(sum(point.context_tokens or 0 for point in here) / len(here))
        accept_len = sum(point.accept_len for point in here) / len(here)
        # Rounds add up, so the mean is over the time of a token.
        measured = batch * len(here) / sum(point.step_s / point.accept_len for point in here)
        predicted = accept_len * batch / calibration.step_s(tier, batch, context)
        table.add_row(
            tier,
            str(batch),
            "-" if here[0].context_tokens is None else str(context),
            str(len(here)),
            f"{accept_len:.2f}{' assumed' if here[0].assumed else ''}",
            f"{measured:.1f}",
            f"{predicted:.1f}",
            f"{predicted / measured - 1.0:+.1%}",
        )
    return table


def _acceptance(profile: AcceptanceProfile) -> RichTable:
    # Simulated accept lengths are set depth by depth: no draft's rates lie behind them.
    rates = ", ".join(f"{rate:.2f}" for rate in profile.accept_rate_by_position)
    if profile.simulated:
        rates = "simulated: not used"
    table = RichTable(
        title=f"Acceptance ({'simulated, ' if profile.simulated else ''}{escape(profile.source)})",
        caption=f"accept rate by position: {rates}",
    )
    for name in ("draft steps", "accept length", "figures", "between requests", "drift"):
        table.add_column(name, justify="right", overflow="fold")
    for depth in profile.depths:
        drift = "-"
        if depth.drift_spread is not None and depth.drift_time_s is not None:
            drift = f"{depth.drift_spread:.2f} over {depth.drift_time_s:.1f} s"
        spread = "-" if depth.request_spread is None else f"{depth.request_spread:.2f}"
        table.add_row(
            str(depth.num_steps), f"{depth.accept_len:.2f}", str(depth.count), spread, drift
        )
    return table


def _trust(calibration: Calibration) -> RichTable:
    sizes = sorted({size for cost in calibration.costs for size in cost.measured_batch_sizes})
    edges = [1 << power for power in range(sizes[-1].bit_length() + 1)]
    contexts = ", ".join(map(str, CONTEXTS_PER_REQUEST))
    table = RichTable(
        title=f"Trust at {contexts} context tokens a request",
        caption="M measured, i interpolated, x extrapolated",
    )
    table.add_column("tier", justify="right")
    for size in edges:
        table.add_column(str(size), justify="center")
    for cost in calibration.costs:
        grades = [
            "".join(
                GRADES[calibration.trust(cost.tier, size, size * context)]
                for context in (CONTEXTS_PER_REQUEST if cost.max_context_tokens else (0,))
            )
            for size in edges
        ]
        table.add_row(cost.tier, *grades)
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
