"""The oracle and the bound: no baseline beats them, and looking ahead leaves no trace."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from controller.calibration import Calibration
from env.acceptance_process import Acceptance, DraftRecovery
from env.deployment import Deployment
from env.oracle import HOLDS, look_ahead, oracle_tier
from env.scale import capacity_rps
from env.simulator import Cell, Simulator
from env.workload import ClosedLoop, Lengths, OpenLoop, Workload
from training.controllers import BatchThreshold, Bound, Oracle, fixed_controllers
from training.evaluation import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDER = Path(__file__).parents[1] / "checkpoints/calibrations"
SERVER = Deployment(Calibration.load(FOLDER / "h200-llama3-8b-eagle3-fa3.json"))
NAMES = [tier.name for tier in SERVER.resolved_tiers()]
SHORT = {"prompts": Lengths(100, 0.5, 16, 400), "outputs": Lengths(120, 0.5, 8, 400)}
SEEDS = range(200, 204)
NOISE = 0.005


def closed(clients, acceptance, server=SERVER, rounds=800, **lengths):
    load = ClosedLoop(clients, clients * rounds)
    return Cell(server, Workload("closed", load, acceptance, **lengths))


def open_loop(low, high, acceptance, server=SERVER):
    """Return a load between two shares of what the server can serve off."""
    capacity = capacity_rps(server, **SHORT)
    load = OpenLoop(low * capacity, high * capacity, 20.0, 300)
    return Cell(server, Workload("open", load, acceptance, **SHORT))


SLOW = Acceptance("shared", 0.3, 0.9, period=5.0)
FAST = Acceptance("shared", 0.1, 0.9, period=0.6)
PER_REQUEST = Acceptance("per-request", 0.3, 0.9, period=256.0)
FEW = replace(SERVER, max_running_requests=24)
CELLS = {
    "closed 1": closed(1, SLOW),
    "closed 8": closed(8, PER_REQUEST),
    "closed 64": closed(64, PER_REQUEST),
    "closed 64, fast drift": closed(64, FAST),
    "closed 64, long prompts": closed(64, SLOW, prompts=Lengths(3000, 0.2, 16, 6000)),
    "closed 64 in a batch of 24": closed(64, SLOW, FEW),
    "closed 256": closed(256, SLOW),
    "open, swinging": open_loop(0.1, 0.9, SLOW),
    "open, swinging, per request": open_loop(0.1, 0.9, PER_REQUEST),
    "open, overloaded": open_loop(1.2, 1.2, SLOW),
}
# With 256 clients and 120 output tokens somebody finishes in every round, so that every round is
# followed by a prefill, whose fixed 13.6 ms are as long as the round itself: deep drafts share them
# among more tokens.
PREFILL_BOUND = {"closed 256, short outputs": closed(256, Acceptance("shared", 0.6, 0.6), **SHORT)}
CELLS |= PREFILL_BOUND
CELL_NAMES = list(CELLS)
CLOSED = [name for name in CELLS if name.startswith("closed")]
BASELINES = [
    *fixed_controllers(NAMES),
    *(
        BatchThreshold(k, threshold, f"depth {NAMES[k]} up to {threshold}")
        for k in range(1, len(NAMES))
        for threshold in (4, 12, 24, 32, 48, 64, 96, 128, 192)
    ),
]


@cache
def objective(controller, name):
    return np.log(evaluate(controller, [CELLS[name]], SEEDS).objective[0]).mean()


@pytest.mark.parametrize("name", CELL_NAMES)
@pytest.mark.parametrize("reference", [Oracle(), Bound()], ids=["oracle", "bound"])
def test_no_fixed_tier_and_no_threshold_beats_a_reference(reference, name):
    best = max(BASELINES, key=lambda each: objective(each, name))
    assert objective(reference, name) > objective(best, name) - NOISE, best.name


@pytest.mark.parametrize("name", CLOSED)
def test_the_oracle_does_not_beat_the_bound_of_a_closed_loop(name):
    assert objective(Bound(), name) > objective(Oracle(), name) - NOISE


def test_knowing_the_drift_is_worth_something():
    gains = [
        objective(Oracle(), name) - max(objective(each, name) for each in BASELINES)
        for name in CELLS
    ]
    assert max(gains) > 0.03


def flat(calibration):
    """Return a calibration of ``NAMES`` whose round times depend on neither batch nor context."""
    costs = tuple(
        replace(
            cost,
            batch_sizes=(1,),
            base_s=(cost.base_s[len(cost.base_s) // 2],),
            relative_noise=(0.0,),
            context_s_per_token=0.0,
        )
        for cost in calibration.costs
        if cost.tier in NAMES
    )
    return replace(calibration, costs=costs)


@pytest.mark.parametrize("rate", [0.05, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("overlap", [False, True])
def test_with_nothing_to_adapt_to_the_oracle_holds_the_best_tier(rate, overlap):
    server = replace(
        SERVER,
        calibration=flat(SERVER.calibration),
        recovery=DraftRecovery(cold_start_share=1.0, worst_loss=0.0),
        overlap=overlap,
    )
    cell = closed(16, Acceptance("shared", rate, rate), server, rounds=200, **SHORT)
    fixed = [evaluate(each, [cell], SEEDS) for each in fixed_controllers(NAMES)]
    best = int(np.argmax([outcome.objective.mean() for outcome in fixed]))
    for reference in (Oracle(), Bound()):
        outcome = evaluate(reference, [cell], SEEDS)
        assert outcome.tier_share[0, best] == 1.0
        assert outcome.objective.tolist() == fixed[best].objective.tolist()


def test_the_bound_may_not_pay_for_a_stale_draft():
    cold = replace(SERVER, recovery=DraftRecovery(0.0, 1.0, 1.0, 1e6))
    cell = closed(8, SLOW, cold)
    prepared = Bound().prepare([cell, cell])
    assert prepared[0].deployment.recovery == DraftRecovery(1.0, 0.0, 32.0, 8.0)
    assert prepared[0].deployment is prepared[1].deployment, "one row of costs a deployment"
    assert cell.deployment is cold


def test_the_oracle_stays_off_when_drafts_are_dear_and_comes_back_when_they_pay():
    never = closed(32, Acceptance("shared", 0.0, 0.0), rounds=100)
    always = closed(4, Acceptance("shared", 1.0, 1.0), rounds=100)
    assert evaluate(Oracle(), [never], SEEDS).tier_share[0, 0] == 1.0
    assert evaluate(Oracle(), [always], SEEDS).tier_share[0, -1] == 1.0


@pytest.mark.parametrize("name", ["closed 64 in a batch of 24", "open, overloaded"])
def test_looking_ahead_changes_no_byte_of_the_state(name):
    simulator = Simulator([CELLS[name]])
    simulator.reset([1])
    size = simulator.state.running.shape[1]
    ids, work, lost = np.empty(size, np.int64), np.empty((3, size)), np.empty(len(HOLDS))
    rng = np.random.default_rng(0)
    for _ in range(200):
        before = [array.tobytes() for array in (*simulator.state, *simulator.costs)]
        for tier in range(len(NAMES)):
            look_ahead(simulator.state, simulator.costs, 0, tier, ids, work, lost)
            assert np.isfinite(lost).all()
        chosen = oracle_tier(simulator.state, simulator.costs, 0, ids, work, lost)
        assert 0 <= chosen < len(NAMES)
        assert before == [array.tobytes() for array in (*simulator.state, *simulator.costs)]
        simulator.step(rng.integers(0, len(NAMES), 1))
