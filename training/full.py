"""Run the protocol of ``training.protocol`` on every system and collect plain values.

Each system is one task: its baselines are tuned on its tuning part, then all controllers meet its
test cells under paired seeds. Systems run in worker processes, one thread each.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np

from controller.checkpoint import load_checkpoint
from controller.tiers import NATIVE
from env.deployment import Deployment
from env.scenarios import SCENARIOS
from env.simulator import Cell
from env.workload import ClosedLoop, Workload
from training.baselines.registry import BASELINES, load_maker
from training.baselines.static import BatchTable
from training.baselines.stepwise import Stepwise
from training.baselines.task import Task
from training.controllers import (
    BatchThreshold,
    Bound,
    Controller,
    LearnedPolicy,
    NativeServer,
    Oracle,
    fixed_controllers,
)
from training.evaluation import METRICS, evaluate
from training.protocol import (
    SIZES,
    TEST_SEED,
    TRAINED_ON,
    TUNING_SEED,
    Size,
    cell_seeds,
    deployment_of,
    load_system,
    shift_cells,
    test_cells,
    tuning_cells,
)
from training.recording import record
from training.regret import CURVE_ROUNDS, Shift, measure_shifts
from training.suite import open_loop

POLICY, ORACLE, BOUND, NATIVE_SERVER = "policy", "oracle", "bound", "native always"
REFERENCES = (ORACLE, BOUND)
MAP_RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
MAP_WARM_UP = 300
MAP_ROUNDS = 100
LINE_SWING = (0.1, 1.8)
"""Arrival rates of the time line, as shares of the off capacity: a queue builds and drains."""
SHIFT_SEED = 710_001
MAP_SEED = 720_001


@dataclass(frozen=True)
class Tuned:
    """The controllers of one system, tuned.

    Attributes:
        controllers: All that compete, by name; the policy among them.
        scores: Mean log objective of each on the tuning part, the policy's left out.
        trials: Settings that each tried.
    """

    controllers: dict[str, Controller]
    scores: dict[str, float]
    trials: dict[str, int]


def tune_all(task: Task, policy: Controller, added: Sequence[str] = ()) -> Tuned:
    """Tune every baseline on a system.

    Args:
        task: The tuning part.
        policy: The learned policy, which is not tuned.
        added: Makers of the user's own, ``module:function``.
    """
    controllers: dict[str, Controller] = {}
    scores: dict[str, float] = {}
    trials: dict[str, int] = {}
    if NATIVE in task.deployment.calibration.tier_names:
        controllers[NATIVE_SERVER] = NativeServer(NATIVE_SERVER)
    for fixed in fixed_controllers(task.tier_names):
        controllers[fixed.name] = fixed
    makers = {**BASELINES, **{path: load_maker(path) for path in added}}
    for name, controller in controllers.items():
        scores[name], trials[name] = task.score(controller), 1
    for name, make in makers.items():
        before = task.trials
        controllers[name] = make(task)
        trials[name] = task.trials - before
        scores[name] = task.score(controllers[name])
    controllers[POLICY] = policy
    return Tuned(controllers, scores, trials)


def describe(controller: Controller) -> str:
    """Return the setting of a controller as one line."""
    if isinstance(controller, BatchThreshold):
        return controller.name
    if isinstance(controller, LearnedPolicy):
        return "zero-shot"
    return str(controller)


def _numbers(values: Any, digits: int = 5) -> Any:
    """Round to significant digits, so that reports stay small."""
    return [float(f"{value:.{digits}g}") for value in np.asarray(values, float).ravel()]


def run_cells(
    controllers: dict[str, Controller], cells: Sequence[Cell], seeds: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Return one entry a cell, with every controller's objective by seed and mean metrics."""
    entries: list[dict[str, Any]] = [
        {
            "cell": cell.name,
            "closed": cell.workload.is_closed,
            "band": cell.name.partition(":")[0],
            "scenario": cell.name.rpartition(", ")[2],
            "controllers": {},
        }
        for cell in cells
    ]
    for name, controller in controllers.items():
        outcome = evaluate(controller, cells, seeds)
        for index, entry in enumerate(entries):
            entry["controllers"][name] = {
                "objective": _numbers(outcome.objective[index], 8),
                "slo_goodput_by_seed": _numbers(outcome.metrics["slo_goodput_rps"][index]),
                **{
                    metric: _numbers(outcome.metrics[metric][index].mean())[0] for metric in METRICS
                },
                "tier_share": _numbers(outcome.tier_share[index], 4),
            }
    return entries


def _rounds_alike(controller: Controller) -> bool:
    known = (Stepwise, LearnedPolicy, BatchThreshold, BatchTable)
    return isinstance(controller, known)


def run_shifts(
    controllers: dict[str, Controller], deployment: Deployment, num_seeds: int
) -> dict[str, Any]:
    """Return how each controller met phase shifts, by name."""
    measured = []
    for name, controller in controllers.items():
        if _rounds_alike(controller) and not name.startswith(("always", "fixed")):
            named = controller if controller.name == name else _renamed(controller, name)
            measured.append(named)
    seeds = range(SHIFT_SEED, SHIFT_SEED + num_seeds)
    shifts = measure_shifts(measured, Oracle(ORACLE), shift_cells(deployment), seeds)
    return {name: [_plain(shift) for shift in found] for name, found in shifts.items()} | {
        "curves": {name: _curves(found) for name, found in shifts.items()}
    }


def _renamed(controller: Any, name: str) -> Controller:
    renamed: Controller = replace(controller, name=name)
    return renamed


def _plain(shift: Shift) -> dict[str, Any]:
    return {
        "cell": shift.cell,
        "rises": shift.rises,
        "speculating": shift.speculating,
        "rounds": shift.rounds,
        "excess": round(shift.excess, 3),
    }


def _curves(shifts: Sequence[Shift]) -> dict[str, list[float]]:
    """Return the mean cumulated loss of the middle load, by direction."""
    curves = {}
    for rises in (False, True):
        chosen = [
            shift.curve
            for shift in shifts
            if shift.cell == 1 and shift.rises == rises and len(shift.curve) == CURVE_ROUNDS
        ]
        if chosen:
            curves["rise" if rises else "fall"] = _numbers(np.mean(chosen, axis=0), 4)
    return curves


def map_sizes(limit: int) -> list[int]:
    """Return the powers of two up to the largest batch."""
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]


def policy_map(controller: Controller, deployment: Deployment, warm_up: int) -> list[list[float]]:
    """Return ``(batch sizes, rates)`` mean depths in a closed loop with constant acceptance."""
    sizes = map_sizes(deployment.max_running_requests)
    cells = [
        Cell(
            deployment,
            Workload(
                "map",
                ClosedLoop(size, size * (warm_up + MAP_ROUNDS) * 16),
                SCENARIOS.make("stationary", rate=rate),
            ),
        )
        for size in sizes
        for rate in MAP_RATES
    ]
    run = record(controller, cells, [MAP_SEED], warm_up + MAP_ROUNDS)
    depth = run.num_steps[run.tier[warm_up:]].mean(axis=0)
    return [_numbers(row, 4) for row in depth.reshape(len(sizes), len(MAP_RATES))]


def time_line(controller: Controller, deployment: Deployment, requests: int) -> dict[str, Any]:
    """Return load, acceptance, depth and queue over time in a swinging open loop."""
    load = open_loop(deployment, *LINE_SWING, requests)
    acceptance = SCENARIOS.make("drift", low=0.2, high=0.9, period_s=10.0)
    run = record(controller, [Cell(deployment, Workload("line", load, acceptance))], [MAP_SEED])
    every = max(len(run.start_s) // 1500, 1)
    return {
        "time_s": _numbers(run.start_s[::every, 0]),
        "running": run.running[::every, 0].tolist(),
        "waiting": run.waiting[::every, 0].tolist(),
        "accept_rate": _numbers(run.accept_rate[::every, 0], 4),
        "num_steps": run.num_steps[run.tier[::every, 0]].tolist(),
    }


def run_system(name: str, checkpoint: Path, size: Size, added: Sequence[str]) -> dict[str, Any]:
    """Run the protocol on one system and return plain values."""
    numba.set_num_threads(1)
    deployment = deployment_of(load_system(name))
    policy = LearnedPolicy(load_checkpoint(checkpoint).policy, POLICY)
    tuning, test = tuning_cells(deployment, size), test_cells(deployment, size)
    task = Task(tuning, cell_seeds(TUNING_SEED, len(tuning), 1))
    tuned = tune_all(task, policy, added)
    everyone = {**tuned.controllers, ORACLE: Oracle(ORACLE), BOUND: Bound(BOUND)}
    seeds = cell_seeds(TEST_SEED, len(test), size.seeds)
    result = {
        "system": name,
        "calibration_sha256": deployment.calibration.sha256,
        "held_out": name != TRAINED_ON,
        "tiers": [tier.name for tier in deployment.resolved_tiers()],
        "max_running_requests": deployment.max_running_requests,
        "tuned": {
            each: {
                "setting": describe(tuned.controllers[each]),
                "score": tuned.scores[each],
                "trials": tuned.trials[each],
            }
            for each in tuned.scores
        },
        "cells": run_cells(everyone, test, seeds),
        "shifts": run_shifts(tuned.controllers, deployment, size.shift_seeds),
        "map": {
            "sizes": map_sizes(deployment.max_running_requests),
            "rates": list(MAP_RATES),
            POLICY: policy_map(policy, deployment, MAP_WARM_UP),
            ORACLE: policy_map(Oracle(), deployment, 10),
        },
    }
    if name == TRAINED_ON:
        result["time_line"] = time_line(policy, deployment, 2 * size.requests)
    return result


def run_protocol(
    checkpoint: Path,
    suite: str,
    added: Sequence[str] = (),
    jobs: int = 2,
    watch: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Run a suite and return it as plain values.

    Args:
        checkpoint: Directory of the policy.
        suite: ``"full"`` or ``"smoke"``.
        added: Makers of further controllers, ``module:function``.
        jobs: Processes.
        watch: Told of each system that is done.
    """
    size = SIZES[suite]
    for path in added:
        load_maker(path)
    run = partial(run_system, checkpoint=checkpoint, size=size, added=tuple(added))
    systems: dict[str, dict[str, Any]] = {}
    if jobs == 1:
        for name in size.calibrations:
            systems[name] = run(name)
            watch(name)
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            running = {pool.submit(run, name): name for name in size.calibrations}
            for done in as_completed(running):
                systems[running[done]] = done.result()
                watch(running[done])
    return {
        "suite": suite,
        "checkpoint": load_checkpoint(checkpoint).sha256,
        "num_seeds": size.seeds,
        "systems": [systems[name] for name in size.calibrations],
    }
