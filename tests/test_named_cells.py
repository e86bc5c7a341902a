"""Comparison cells made from names of loads and acceptance scenarios."""

import numba
import numpy as np
import pytest

from controller.errors import ConfigError
from env.deployment import Deployment
from env.scale import capacity_rps, reference_batch
from env.simulator import Simulator
from env.workload import OUTPUTS, PROMPTS
from tests.synthetic import even_system
from training.suite import NAMED_LOAD, named_cells

SERVER = Deployment(even_system(row_s=0.0001), "native,1,3", max_running_requests=64)


@pytest.fixture(autouse=True)
def one_thread():
    """Run kernels of few servers on one thread: waking a second takes longer than the work."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


def test_named_cells_run_to_their_end():
    loads = ("closed:concurrency=3,tokens=2000", "gamma-burst:num_requests=20", "ramp:rate=3.0")
    loads += ("azure-2023:split=code,window=20,rate=5.0",)
    scenarios = ("golden", "phase-shift:requests=7", "collapse:period_s=2.0")
    cells = named_cells(SERVER, loads, scenarios, shifted="azure-2023-code")
    assert len(cells) == 12
    assert cells[0].name == f"{loads[0]}, golden"
    shifted = [cell.workload.shifted is not None for cell in cells]
    assert shifted == [False, True, False] * 3 + [False] * 3
    simulator = Simulator(cells)
    simulator.reset(list(range(12)))
    simulator.run_tables(np.full((12, 65), 2))
    assert simulator.done.all()
    for e, cell in enumerate(cells):
        if not cell.workload.is_closed:
            assert simulator.state.server[e].num_finished == cell.workload.load.num_requests


def test_a_load_without_a_rate_runs_at_a_share_of_the_capacity():
    capacity = capacity_rps(SERVER, PROMPTS, OUTPUTS)
    (given,) = named_cells(SERVER, ["poisson:rate=2"], ["drift"])
    (taken,) = named_cells(SERVER, ["poisson"], ["drift"])
    (replayed,) = named_cells(SERVER, ["mooncake"], ["drift"])
    assert given.workload.load.rate == 2
    assert taken.workload.load.rate == pytest.approx(NAMED_LOAD * capacity)
    assert replayed.workload.load.time_scale == 1.0
    assert 1 <= reference_batch(taken) <= 64


def test_unknown_names_are_refused():
    for loads, scenarios in (
        (["poison"], ["drift"]),
        (["poisson"], ["drifting"]),
        (["poisson"], []),
        ([], ["drift"]),
    ):
        with pytest.raises(ConfigError, match=r"expected"):
            named_cells(SERVER, loads, scenarios)
