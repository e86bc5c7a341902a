"""The servers and loads that the policy trains on."""

from collections import Counter

import numpy as np
import pytest

from controller.calibration import Calibration
from env.deployment import Deployment, stack_costs
from env.scale import capacity_rps
from env.simulator import Simulator
from env.workload import ClosedLoop
from training.family import draw_acceptance, draw_open_load, perturbed, training_cells
from training.protocol import OPEN_RATES, SIZES, clients, tuning_cells
from training.protocol import test_cells as protocol_cells
from training.suite import native_of, off_step_s

H200 = Calibration.load("checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")
SERVER = Deployment(H200, noise=False)


def test_the_first_cells_have_the_measured_server_and_the_others_drawn_ones():
    cells = training_cells(SERVER, 50, 0.6, np.random.default_rng(0))
    assert [cell.deployment is SERVER for cell in cells] == [True] * 20 + [False] * 30
    drawn = [cell.deployment for cell in cells[20:]]
    prefill = [d.calibration.prefill_speculative.base_s for d in drawn]
    assert len(set(prefill)) > 15 and 2 < prefill.count(0.0) < 12
    assert len({d.recovery for d in drawn}) == 30
    assert {d.overlap for d in drawn} == {True, False}
    assert min(d.max_running_requests for d in drawn) < 64
    assert max(d.max_running_requests for d in drawn) == SERVER.max_running_requests
    stack_costs(drawn)  # They have one tier list, so that they can be simulated side by side.


def test_cells_vary_in_all_that_a_load_has():
    cells = training_cells(SERVER, 300, 0.5, np.random.default_rng(1))
    closed = [cell.workload.load.concurrency for cell in cells if cell.workload.is_closed]
    assert 0.6 < len(closed) / len(cells) < 0.8
    assert min(closed) == 1
    assert max(closed) > 384
    means = [cell.workload.outputs.mean() for cell in cells]
    assert min(means) < 80
    assert max(means) > 1400
    kinds = Counter(type(cell.workload.load).__name__ for cell in cells)
    assert min(kinds[name] for name in ("Poisson", "GammaBurst", "OpenLoop")) > 10


def clients_share(cell):
    return cell.workload.load.concurrency / cell.deployment.max_running_requests


def open_share(cell):
    workload = cell.workload
    capacity = capacity_rps(native_of(cell.deployment), workload.prompts, workload.outputs)
    return workload.load.mean_rate / capacity


def period_rounds(cell):
    """Return the period of acceptance that moves with time, in rounds without speculation."""
    load, limit = cell.workload.load, cell.deployment.max_running_requests
    running = load.concurrency if isinstance(load, ClosedLoop) else max(limit // 2, 1)
    lengths = cell.workload.prompts, cell.workload.outputs
    return cell.workload.acceptance.period / off_step_s(cell.deployment, running, *lengths)


def inside(value, others, margin=10):
    """Whether at least ``margin`` of the others are smaller and as many are larger."""
    others = np.asarray(others)
    return min((others < value).sum(), (others > value).sum()) >= margin


def test_the_protocols_loads_lie_well_inside_what_is_drawn():
    cells = training_cells(SERVER, 400, 0.8, np.random.default_rng(8))
    drawn = [clients_share(cell) for cell in cells if cell.workload.is_closed]
    assert all(inside(share / 256, drawn, margin=3) for _, share in clients(SERVER)[1:])
    third = len(drawn) / 3
    for low, high in ((0.0, 1 / 16), (1 / 16, 1 / 2), (1 / 2, 9.0)):
        assert 0.7 * third < np.sum((np.array(drawn) > low) & (np.array(drawn) <= high))
    rates = [open_share(cell) for cell in cells if not cell.workload.is_closed]
    assert all(inside(rate, rates, margin=15) for rate in OPEN_RATES)


@pytest.mark.parametrize("kind", ["shared", "collapse"])
def test_periods_are_in_rounds_and_surround_the_protocols(kind):
    cells = training_cells(SERVER, 600, 0.8, np.random.default_rng(9))
    drawn = [
        period_rounds(cell)
        for cell in cells
        if cell.workload.acceptance.kind == kind
        and cell.workload.acceptance.low < cell.workload.acceptance.high
    ]
    assert 90 < min(drawn) < 200 and 2500 < max(drawn) < 4100
    for part in (tuning_cells(SERVER, SIZES["full"]), protocol_cells(SERVER, SIZES["full"])):
        for cell in part:
            acceptance = cell.workload.acceptance
            if cell.workload.is_closed and acceptance.kind == kind and acceptance.period != 5.0:
                assert inside(period_rounds(cell), drawn, margin=15)


@pytest.mark.parametrize("seed", range(12))
def test_an_open_load_has_the_rate_that_it_was_asked_for(seed):
    load = draw_open_load(3.0, np.random.default_rng(seed))
    assert load.mean_rate == pytest.approx(3.0)
    times = np.concatenate([load.arrivals(np.random.default_rng(i))[-1:] for i in range(200)])
    assert load.num_requests / times.mean() == pytest.approx(3.0, rel=0.15)


def test_same_seed_same_cells():
    drawn = [training_cells(SERVER, 20, 0.5, np.random.default_rng(seed)) for seed in (3, 3, 4)]
    names = [[(c.workload, c.deployment.recovery) for c in cells] for cells in drawn]
    assert names[0] == names[1]
    assert names[0] != names[2]


def test_acceptance_is_of_every_kind():
    rng = np.random.default_rng(2)
    drawn = [draw_acceptance(0.01, rng) for _ in range(300)]
    kinds = Counter(acceptance.kind for acceptance in drawn)
    assert set(kinds) == {"shared", "per-request", "mixture", "phases", "collapse"}
    assert min(kinds.values()) > 25
    assert any(acceptance.low == acceptance.high for acceptance in drawn)
    later = [acceptance.shape[-1] for acceptance in drawn]
    assert 0.3 < np.mean(np.array(later) < 1.0) < 0.7, "later drafts are as good or worse"


def test_a_short_episode_runs_on_every_cell():
    cells = training_cells(SERVER, 24, 1.0, np.random.default_rng(5))
    simulator = Simulator(cells)
    simulator.reset(list(range(24)))
    for _ in range(50):
        simulator.step(np.zeros(24, np.int64))
    assert np.isfinite(simulator.state.server["now_s"]).all()


def test_perturbed_costs_rise_with_the_batch_and_leave_off_alone():
    rng = np.random.default_rng(6)
    for _ in range(20):
        drawn = perturbed(H200, rng)
        assert drawn.cost("cold") == H200.cost("cold")
        for cost in drawn.costs:
            assert (np.diff(cost.base_s) >= 0).all()
        for b in (1, 64, 256):
            assert drawn.cost("3").base_at(b) > drawn.cost("native").base_at(b)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_none_are_drawn(share):
    cells = training_cells(SERVER, 5, share, np.random.default_rng(7))
    assert all((cell.deployment is SERVER) == (share == 0.0) for cell in cells)
