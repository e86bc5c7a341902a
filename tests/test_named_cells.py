"""Comparison cells made from names of loads and acceptance scenarios."""

import numpy as np
import pytest

from controller.calibration import Calibration, PrefillCost, TierCost
from controller.errors import ConfigError
from env.deployment import Deployment
from env.oracle import run_bound, run_oracle
from env.scale import capacity_rps, reference_batch
from env.scenarios import SCENARIOS
from env.simulator import Cell, Simulator
from env.workload import OUTPUTS, PROMPTS, ClosedLoop, Lengths, Workload
from tests.synthetic import even_system
from training.suite import NAMED_LOAD, named_cells

pytestmark = pytest.mark.usefixtures("one_thread")

SERVER = Deployment(even_system(row_s=0.0001), "native,1,3", max_running_requests=64)


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


SHORT = Lengths(60, 0.3, 20, 200)
UNEVEN = Calibration(
    "uneven",
    tuple(
        TierCost(name, (1, 64), (seconds, seconds), 0.0, (0.0, 0.0), 10**9, 1)
        for name, seconds in (("native", 0.010), ("1", 0.012), ("3", 0.016), ("7", 0.024))
    ),
    PrefillCost(0.0, 0.0),
    PrefillCost(0.0, 0.0),
)


@pytest.mark.parametrize(("scenario", "best"), [("golden", 2), ("stationary:rate=0.95", 3)])
def test_references_know_how_rates_fall_with_the_position(scenario, best):
    """Depth 3 is best for the measured shape, 7 for a flat one, 1 for the first draft alone."""
    acceptance = SCENARIOS.parse(scenario)
    seconds = {1: 0.012, 3: 0.016, 7: 0.024}
    gains = [1 / 0.010, *(acceptance.accept_len(k) / s for k, s in seconds.items())]
    assert int(np.argmax(gains)) == best
    server = Deployment(UNEVEN, "native,1,3,7", max_running_requests=4, noise=False)
    for reference in (run_bound, run_oracle):
        workload = Workload("one", ClosedLoop(2, 2000), acceptance, SHORT, Lengths(900, 0, 9, 900))
        simulator = Simulator([Cell(server, workload)])
        simulator.reset([1])
        reference(simulator.state, simulator.costs)
        rounds = simulator.state.tier_rounds[0]
        # A depth beyond a request's last tokens gains nothing, so its end is shallower.
        assert rounds[best] > 0.95 * rounds.sum()


@pytest.mark.parametrize("scenario", SCENARIOS.names())
def test_the_oracle_is_no_worse_than_a_fixed_depth_with_clients_that_think(scenario):
    load = ClosedLoop(6, 6000, think_s=0.4)
    server = Deployment(UNEVEN, "native,1,3,7", max_running_requests=4, noise=False)
    cell = Cell(server, Workload("think", load, SCENARIOS.make(scenario), SHORT, SHORT))
    throughput = []
    for tier in (None, 0, 1, 2, 3):
        simulator = Simulator([cell] * 4)
        simulator.reset([1, 2, 3, 4])
        if tier is None:
            run_oracle(simulator.state, simulator.costs)
        else:
            simulator.run_tables(np.full((4, 5), tier))
        ended = simulator.state.server
        throughput.append(float((ended.output_tokens / ended.now_s).mean()))
    assert throughput[0] > 0.97 * max(throughput[1:])
