"""The servers and loads that the policy trains on."""

from collections import Counter

import numpy as np
import pytest

from controller.calibration import Calibration
from env.deployment import Deployment, stack_costs
from env.simulator import Simulator
from training.family import draw_acceptance, perturbed, training_cells

H200 = Calibration.load("checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")
SERVER = Deployment(H200, noise=False)


def test_the_first_cells_have_the_measured_server_and_the_others_drawn_ones():
    cells = training_cells(SERVER, 50, 0.6, np.random.default_rng(0))
    assert [cell.deployment is SERVER for cell in cells] == [True] * 20 + [False] * 30
    drawn = [cell.deployment for cell in cells[20:]]
    assert len({d.calibration.prefill_speculative.base_s for d in drawn}) == 30
    assert len({d.recovery for d in drawn}) == 30
    assert {d.overlap for d in drawn} == {True, False}
    assert min(d.max_running_requests for d in drawn) < 64
    assert max(d.max_running_requests for d in drawn) == SERVER.max_running_requests
    stack_costs(drawn)  # They have one tier list, so that they can be simulated side by side.


def test_cells_vary_in_all_that_a_load_has():
    cells = training_cells(SERVER, 300, 0.5, np.random.default_rng(1))
    closed = [cell.workload.load.concurrency for cell in cells if cell.workload.is_closed]
    assert 0.65 < len(closed) / len(cells) < 0.85
    assert min(closed) == 1
    assert max(closed) > 256
    means = [cell.workload.outputs.mean() for cell in cells]
    assert min(means) < 120
    assert max(means) > 1000


def test_same_seed_same_cells():
    drawn = [training_cells(SERVER, 20, 0.5, np.random.default_rng(seed)) for seed in (3, 3, 4)]
    names = [[(c.workload, c.deployment.recovery) for c in cells] for cells in drawn]
    assert names[0] == names[1]
    assert names[0] != names[2]


def test_acceptance_is_of_every_kind():
    rng = np.random.default_rng(2)
    drawn = [draw_acceptance(rng) for _ in range(300)]
    kinds = Counter(acceptance.kind for acceptance in drawn)
    assert set(kinds) == {"shared", "per-request", "mixture", "phases", "collapse"}
    assert min(kinds.values()) > 25
    assert any(acceptance.low == acceptance.high for acceptance in drawn)


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
