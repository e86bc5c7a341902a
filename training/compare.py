"""Compare a checkpoint with what an operator has today: ``python -m training.compare``.

Every controller meets the same requests, acceptance and noise (paired seeds). The threshold is
tuned as an operator would set it: one threshold and one depth for all workloads together, every
pair tried on tuning seeds, the best kept. The oracle and the bound know what no controller can
(``env/oracle.py``); they are references, not rivals.

``--suite full`` runs the protocol of ``training/protocol.py`` instead: every baseline of
``training/baselines`` on every system, with a report as JSON, Markdown and HTML.
"""

import training.process  # noqa: F401, I001  (first: it sets up threads before they start)

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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
from training.full import run_protocol
from training.protocol import SIZES
from training.statistics import half_width
from training.suite import default_cells
from training.suite_report import html_report, markdown, target_table
from training.targets import Target, judge

DEFAULT_CHECKPOINT = Path("checkpoints/trained")
TUNING_SEEDS = tuple(range(800_001, 800_005))
FIRST_TEST_SEED = 700_001
THRESHOLD = "tuned threshold"
POLICY = "policy"
ORACLE = "oracle"
BOUND = "bound"


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


def run_suite(options: argparse.Namespace) -> int:
    """Run the full or the smoke suite; write JSON, Markdown and HTML beside each other."""
    fixed = ("calibration", "tiers", "max_running_requests", "seeds")
    if any(getattr(options, name) is not None for name in fixed):
        raise ConfigError(
            f"--suite {options.suite} fixes calibrations, tiers, largest batch and seeds; leave "
            "--calibration, --tiers, --max-running-requests and --seeds out"
        )
    if options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}: expected at least 1")
    beside = options.checkpoint.resolve()
    output = options.output or beside.with_name(f"{beside.name}.{options.suite}.json")
    check_output(
        output, [], lambda value: isinstance(value, dict) and {"suite", "systems"} <= set(value)
    )
    load_checkpoint(options.checkpoint)
    console = Console(stderr=True)
    report = run_protocol(
        options.checkpoint,
        options.suite,
        options.controller,
        options.jobs,
        lambda name: console.print(f"{name}: done", highlight=False),
    )
    write_atomically(output, json.dumps(report, allow_nan=False, separators=(",", ":")) + "\n")
    write_atomically(output.with_suffix(".md"), markdown(report))
    write_atomically(output.with_suffix(".html"), html_report(report))
    print_targets(judge(report), Console(width=max(Console().width, 170)))
    print(f"written to {output}, {output.with_suffix('.md')} and {output.with_suffix('.html')}")
    return 0


def print_targets(targets: Sequence[Target], console: Console) -> None:
    """Print every target with its value."""
    header, rows = target_table(targets)
    table = Table(title="Targets")
    for name in header:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = OneLineParser(prog="python -m training.compare", description=__doc__)
    parser.add_argument("checkpoint", nargs="?", type=Path, default=DEFAULT_CHECKPOINT)
    parser.add_argument(
        "--suite",
        choices=("default", *SIZES),
        default="default",
        help="default: README's table; full: every baseline on every system, about 20 minutes; "
        "smoke: a small part of it, about a minute",
    )
    parser.add_argument(
        "--controller",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="compare with a controller of your own too (suites full and smoke); the function "
        "takes a training.baselines.task.Task",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes of suites full and smoke")
    parser.add_argument("--calibration", type=Path, help="compare on another system")
    parser.add_argument("--tiers", help="tier list, such as off,3; default: the checkpoint's")
    parser.add_argument("--max-running-requests", type=int, help="largest batch; default: 256")
    parser.add_argument("--seeds", type=int, help="episodes of each cell; default: 8")
    parser.add_argument("--all", action="store_true", help="show every controller in every cell")
    parser.add_argument("-o", "--output", type=Path, help="JSON file; default: beside CHECKPOINT")
    options = parser.parse_args(arguments)
    try:
        if options.suite != "default":
            return run_suite(options)
        if options.controller:
            raise ConfigError("--controller: expected --suite full or smoke with it")
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
            256 if options.max_running_requests is None else options.max_running_requests,
            8 if options.seeds is None else options.seeds,
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
