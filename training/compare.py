"""Compare a checkpoint with what an operator has today: ``python -m training.compare``.

Every controller meets the same requests, acceptance and noise (paired seeds). The threshold is
tuned as an operator would set it: one threshold and one depth for all workloads together, every
pair tried on tuning seeds, the best kept. The oracle and the bound know what no controller can
(``env/oracle.py``); they are references, not rivals.
"""

import training.process  # noqa: F401, I001  (first: it sets up threads before they start)

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from controller.calibration import Calibration
from controller.checkpoint import Checkpoint, load_checkpoint
from controller.errors import ConfigError, SpecGovernorError
from controller.jsonfile import canonical_text, write_atomically
from controller.tiers import NATIVE
from env.deployment import Deployment
from env.simulator import Cell
from training.cli import OneLineParser, check_output, print_error
from training.controllers import (
    BatchThreshold,
    Bound,
    Controller,
    LearnedPolicy,
    NativeServer,
    Oracle,
    fixed_controllers,
    threshold_grid,
)
from training.evaluation import METRICS, Outcome, evaluate, tune_threshold
from training.suite import default_cells

DEFAULT_CHECKPOINT = Path("checkpoints/trained")
TUNING_SEEDS = tuple(range(800_001, 800_005))
FIRST_TEST_SEED = 700_001
THRESHOLD = "tuned threshold"
POLICY = "policy"
ORACLE = "oracle"
BOUND = "bound"
# Two-sided 95% quantiles of Student's t by degrees of freedom; beyond, the normal's will do.
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
T_95 |= {11: 2.20, 12: 2.18, 13: 2.16, 14: 2.14, 15: 2.13, 19: 2.09, 23: 2.07, 31: 2.04}


def half_width(samples: NDArray[np.float64]) -> float:
    """Return half the 95% interval of the mean of independent samples (Student's t)."""
    count = len(samples)
    if count < 2:
        return math.nan
    freedom = max((f for f in T_95 if f <= count - 1), default=1)
    return T_95[freedom] * float(samples.std(ddof=1)) / math.sqrt(count)


def run_all(
    checkpoint: Checkpoint, cells: Sequence[Cell], seeds: Sequence[int], progress: bool
) -> tuple[dict[str, Outcome], BatchThreshold]:
    """Run every controller on every cell under every seed.

    Returns:
        Outcomes by controller name, and the tuned threshold.
    """
    deployment = cells[0].deployment
    names = [tier.name for tier in deployment.resolved_tiers()]
    grid = threshold_grid(names, deployment.max_running_requests)
    show = partial(track, console=Console(stderr=True), disable=not progress)
    threshold = tune_threshold(
        grid, cells, TUNING_SEEDS, partial(show, description="tuning the threshold")
    )
    has_native = NATIVE in deployment.calibration.tier_names
    controllers: list[Controller] = [
        *([NativeServer()] if has_native else []),
        *fixed_controllers(names),
        replace(threshold, name=THRESHOLD),
        LearnedPolicy(checkpoint.policy, POLICY),
        Oracle(ORACLE),
        Bound(BOUND),
    ]
    outcomes = {}
    for each in show(controllers, description="running controllers"):
        outcomes[each.name] = evaluate(each, cells, seeds)
    return outcomes, threshold


def summarise(outcomes: dict[str, Outcome], cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return one entry a cell: every controller's metrics, gains, shares and intervals.

    The gain of a controller is its objective over the tuned threshold's, minus 1, averaged over
    seeds. The objective is throughput in closed cells and 1 / mean time in system in open ones. In
    each cell the oracle counts as at least as good as the best controller.
    """
    rivals = [name for name in outcomes if name not in (ORACLE, BOUND)]
    base = outcomes[THRESHOLD].objective
    entries = []
    for index, cell in enumerate(cells):
        best = max(outcomes[name].objective[index].mean() for name in [*rivals, ORACLE])
        ratio_oracle = best / base[index].mean()
        controllers: dict[str, Any] = {}
        for name, outcome in outcomes.items():
            objective = outcome.objective[index]
            ratios = objective / base[index]
            gain = objective.mean() / base[index].mean() - 1.0
            controllers[name] = {
                **{metric: float(outcome.metrics[metric][index].mean()) for metric in METRICS},
                "gain_over_threshold": float(gain),
                "gain_half_width_95": half_width(ratios),
                "share_of_oracle": float(objective.mean() / best),
                "tier_share": [round(float(x), 4) for x in outcome.tier_share[index]],
            }
        entries.append(
            {
                "cell": cell.name,
                "closed": cell.workload.is_closed,
                "oracle_gain": float(ratio_oracle - 1.0),
                "controllers": controllers,
            }
        )
    return entries


def totals(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return each controller's mean gain, worst cell, and share of the oracle's gain."""
    oracle_gain = float(np.mean([entry["oracle_gain"] for entry in entries]))
    result: dict[str, Any] = {"oracle_mean_gain": oracle_gain, "controllers": {}}
    for name in entries[0]["controllers"]:
        gains = [entry["controllers"][name]["gain_over_threshold"] for entry in entries]
        shares = [entry["controllers"][name]["share_of_oracle"] for entry in entries]
        result["controllers"][name] = {
            "mean_gain": float(np.mean(gains)),
            "worst_gain": float(min(gains)),
            "worst_cell": entries[int(np.argmin(gains))]["cell"],
            "mean_share_of_oracle": float(np.mean(shares)),
            "worst_share_of_oracle": float(min(shares)),
            "share_of_oracle_gain": (
                float(np.mean(gains) / oracle_gain) if oracle_gain > 0 else None
            ),
        }
    return result


def print_report(report: dict[str, Any], console: Console, every: bool) -> None:
    """Print the comparison as tables."""
    names = list(report["cells"][0]["controllers"])
    if not every:
        names = [names[0], THRESHOLD, POLICY, ORACLE]
    table = Table(
        title=f"Against the tuned threshold ({report['threshold']}), {report['num_seeds']} seeds"
    )
    for column in (
        "cell",
        "controller",
        "tok/s",
        "time in system mean / p99 s",
        "TTFT p50 / p99 s",
        "TPOT p50 / p99 ms",
        "switches/min",
        "gain over threshold",
        "of oracle",
        "of its gain",
    ):
        table.add_column(column, justify="left" if column in ("cell", "controller") else "right")
    for entry in report["cells"]:
        for row, name in enumerate(names):
            item = entry["controllers"][name]
            gain = item["gain_over_threshold"]
            oracle_gain = entry["oracle_gain"]
            table.add_row(
                entry["cell"] if row == 0 else "",
                name,
                f"{item['throughput_tok_s']:,.0f}",
                f"{item['time_in_system_mean_s']:.2f} / {item['time_in_system_p99_s']:.2f}",
                f"{item['ttft_p50_s']:.3f} / {item['ttft_p99_s']:.3f}",
                f"{1e3 * item['tpot_p50_s']:.2f} / {1e3 * item['tpot_p99_s']:.2f}",
                f"{item['switches_per_min']:.0f}",
                f"{100 * gain:+.1f}% ± {100 * item['gain_half_width_95']:.1f}",
                f"{item['share_of_oracle']:.3f}",
                f"{gain / oracle_gain:.2f}" if oracle_gain > 0.005 else "-",
                end_section=row == len(names) - 1,
            )
    console.print(table)
    short = Table(title="All cells")
    for column in ("controller", "mean gain", "worst gain", "in cell", "of oracle", "of its gain"):
        short.add_column(column, justify="left" if column in ("controller", "in cell") else "right")
    for name, item in report["totals"]["controllers"].items():
        share = item["share_of_oracle_gain"]
        short.add_row(
            name,
            f"{100 * item['mean_gain']:+.2f}%",
            f"{100 * item['worst_gain']:+.2f}%",
            item["worst_cell"],
            f"{item['mean_share_of_oracle']:.4f}",
            "-" if share is None else f"{share:.3f}",
        )
    console.print(short)


def compare(
    checkpoint: Checkpoint,
    calibration: Calibration | None = None,
    tiers: str | None = None,
    max_running_requests: int = 256,
    num_seeds: int = 8,
    cells: Sequence[Cell] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Run the comparison and return it as JSON values.

    Args:
        checkpoint: The policy.
        calibration: System to compare on; None takes the checkpoint's own.
        tiers: Tier list; None takes the checkpoint's.
        max_running_requests: Largest batch.
        num_seeds: Episodes of each cell.
        cells: Workloads; None takes the default ones.
        progress: Whether to show progress bars on stderr.
    """
    if num_seeds < 2:
        raise ConfigError(f"{num_seeds} seeds: an interval needs at least 2; give a larger --seeds")
    deployment = Deployment(
        calibration or checkpoint.calibration,
        tiers=",".join(t.name for t in checkpoint.tiers) if tiers is None else tiers,
        max_running_requests=max_running_requests,
    )
    cells = default_cells(deployment) if cells is None else cells
    seeds = range(FIRST_TEST_SEED, FIRST_TEST_SEED + num_seeds)
    outcomes, threshold = run_all(checkpoint, cells, seeds, progress)
    entries = summarise(outcomes, cells)
    return {
        "checkpoint": checkpoint.sha256,
        "calibration": deployment.calibration.name,
        "calibration_sha256": deployment.calibration.sha256,
        "tiers": [tier.name for tier in deployment.resolved_tiers()],
        "max_running_requests": max_running_requests,
        "num_seeds": num_seeds,
        "threshold": threshold.name,
        "totals": totals(entries),
        "cells": entries,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = OneLineParser(prog="python -m training.compare", description=__doc__)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=DEFAULT_CHECKPOINT)
    parser.add_argument("--calibration", type=Path, help="compare on another system")
    parser.add_argument("--tiers", help="tier list, such as off,3; default: the checkpoint's")
    parser.add_argument("--max-running-requests", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=8, help="episodes of each cell")
    parser.add_argument("--all", action="store_true", help="show every controller in every cell")
    parser.add_argument("-o", "--output", type=Path, help="JSON file; default: beside CHECKPOINT")
    options = parser.parse_args(arguments)
    try:
        if options.output is None and (options.calibration or options.tiers is not None):
            raise ConfigError("--calibration and --tiers: name the report's file with --output")
        beside = options.checkpoint.resolve()
        output = options.output or beside.with_name(f"{beside.name}.compare.json")
        check_output(
            output,
            [options.calibration],
            lambda value: isinstance(value, dict) and {"cells", "totals"} <= set(value),
        )
        calibration = Calibration.load(options.calibration) if options.calibration else None
        report = compare(
            load_checkpoint(options.checkpoint),
            calibration,
            options.tiers,
            options.max_running_requests,
            options.seeds,
            progress=True,
        )
        write_atomically(output, canonical_text(report))
    except (SpecGovernorError, OSError) as error:
        return print_error(error)
    console = Console(width=max(Console().width, 150))
    print_report(report, console, options.all)
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
