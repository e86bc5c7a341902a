"""Where queueing theory has a formula, the simulator meets it.

A server that runs one request at a time is a queue with one server, first come, first served: its
service time is prefill and decode rounds. In the mean, time in system must be Pollaczek and
Khinchine's, E[S] + arrival rate E[S^2] / (2 (1 - load)), whatever the lengths are.
"""

import numpy as np
import pytest

from env.acceptance_process import Acceptance
from env.deployment import Deployment
from env.lengths import Lengths
from env.simulator import Cell, Simulator
from env.workload import ClosedLoop, Poisson, Workload
from env.workloads import named_lengths
from tests.synthetic import even_system

pytestmark = pytest.mark.usefixtures("one_thread")

STEP_S = 0.010
CONSTANT = (Lengths(20, 0.0, 20, 20), Lengths(8, 0.0, 8, 8))
WIDE = (Lengths(30, 1.0, 1, 400), Lengths(6, 0.9, 1, 80))


def run(load, lengths, system, tiers="native", tier=0, seed=2, acceptance=None, **changes):
    """Run one server to the end on one tier."""
    deployment = Deployment(system, tiers, **{"overlap": False, "noise": False, **changes})
    workload = Workload("queue", load, acceptance or Acceptance(), *lengths)
    simulator = Simulator([Cell(deployment, workload)])
    simulator.reset([seed])
    simulator.run_tables(np.full((1, deployment.max_running_requests + 1), tier))
    return simulator


def service_s(requests):
    """Seconds that each request keeps a server busy that has no other."""
    rounds = requests["output_tokens"] - 1  # prefill gives the first token
    return 0.004 + 1e-4 * requests["prompt_tokens"] + STEP_S * rounds


def mean_in_system_s(requests):
    return (requests["finish_s"] - requests["arrival_s"]).mean()


@pytest.mark.parametrize(
    ("lengths", "count"),
    [(CONSTANT, 200_000), (WIDE, 300_000), (named_lengths("azure-2023-code"), 150_000)],
    ids=["M/D/1", "M/G/1", "M/G/1 of a trace"],
)
@pytest.mark.parametrize("load", [0.3, 0.6])
def test_one_request_at_a_time_is_a_queue_of_pollaczek_and_khinchine(lengths, count, load):
    system = even_system(STEP_S, 0.004, 1e-4)
    draw = Workload("x", Poisson(1.0, count), Acceptance(), *lengths).sample(2)
    mean_s = 0.004 + 1e-4 * draw.prompt_tokens.mean() + STEP_S * (draw.output_tokens.mean() - 1)
    rate = load / mean_s
    simulator = run(Poisson(rate, count), lengths, system, max_running_requests=1)
    requests = simulator.requests_of(0)
    assert len(requests) == count
    served = service_s(requests)
    wait_s = rate * (served**2).mean() / (2.0 * (1.0 - rate * served.mean()))
    assert mean_in_system_s(requests) == pytest.approx(served.mean() + wait_s, rel=0.02)
    # The server is busy for the share of the time that it has work.
    assert served.sum() / simulator.state.server[0].now_s == pytest.approx(load, rel=0.02)


def test_a_speculating_queue_is_one_too_with_the_service_time_of_its_luck():
    """Rounds give one or two tokens: E[S] and E[S^2] by recursion over the tokens left."""
    accept, tokens, count = 0.6, 12, 200_000
    first, second = np.zeros(tokens + 1), np.zeros(tokens + 1)
    for left in range(1, tokens + 1):
        after = [(1.0 - accept, left - 1), (accept, max(left - 2, 0))]
        first[left] = 1.0 + sum(p * first[k] for p, k in after)
        second[left] = 1.0 + sum(p * (2.0 * first[k] + second[k]) for p, k in after)
    prefill_s, mean, square = 0.006, first[-1], second[-1]
    served = prefill_s + STEP_S * mean
    served_2 = prefill_s**2 + 2.0 * prefill_s * STEP_S * mean + STEP_S**2 * square
    rate = 0.5 / served
    simulator = run(
        Poisson(rate, count),
        (Lengths(20, 0.0, 20, 20), Lengths(tokens + 1, 0.0, 1, tokens + 1)),
        even_system(STEP_S, 0.004, 1e-4),
        "native,1",
        1,
        acceptance=Acceptance("shared", accept, accept),
        max_running_requests=1,
    )
    expected_s = served + rate * served_2 / (2.0 * (1.0 - rate * served))
    assert mean_in_system_s(simulator.requests_of(0)) == pytest.approx(expected_s, rel=0.02)


# Closed queues


@pytest.mark.parametrize(("clients", "think_s"), [(1, 0.0), (1, 0.5), (3, 0.2), (3, 5.0), (9, 0.0)])
def test_clients_of_one_server_share_it_or_wait_for_their_own_thoughts(clients, think_s):
    """With equal services the throughput is min(N / (Z + S), 1 / S), exactly."""
    service = 0.004 + 20 * 1e-4 + 7 * STEP_S
    simulator = run(
        ClosedLoop(clients, 40_000, think_s),
        CONSTANT,
        even_system(STEP_S, 0.004, 1e-4),
        max_running_requests=1,
    )
    requests = simulator.requests_of(0)
    throughput = len(requests) / simulator.state.server[0].now_s
    assert throughput == pytest.approx(min(clients / (think_s + service), 1.0 / service), rel=0.02)
    # Response time law: N = throughput (R + Z).
    cycle_s = mean_in_system_s(requests) + think_s
    assert throughput * cycle_s == pytest.approx(clients, rel=0.02)


@pytest.mark.parametrize("clients", [4, 32])
def test_clients_of_a_server_with_room_for_all_do_not_feel_each_other(clients):
    """Rounds cost the same at any batch size, so the server is a delay: N / (Z + S)."""
    lengths = (Lengths(9, 0.0, 9, 9), Lengths(200, 0.5, 1, 900))
    simulator = run(
        ClosedLoop(clients, 400_000, 1.0), lengths, even_system(0.001), max_running_requests=64
    )
    requests = simulator.requests_of(0)
    alone_s = 0.001 * (requests["output_tokens"] - 1).mean()
    throughput = len(requests) / simulator.state.server[0].now_s
    assert throughput == pytest.approx(clients / (1.0 + alone_s), rel=0.02)


def test_a_full_batch_gives_its_size_in_tokens_a_round():
    simulator = run(ClosedLoop(40, 400_000), WIDE, even_system(STEP_S), max_running_requests=16)
    server = simulator.state.server[0]
    # A request of k tokens takes k - 1 rounds, as its prefill gives one token and takes no time.
    requests = simulator.requests_of(0)
    tokens = requests["output_tokens"].sum() / (requests["output_tokens"] - 1).sum()
    assert server.output_tokens / server.now_s == pytest.approx(16 / STEP_S * tokens, rel=0.02)


# Little's law


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("running", "tier"), [(1, 0), (4, 2), (32, 3)])
def test_littles_law_on_a_stationary_open_run(overlap, running, tier):
    system = even_system(STEP_S, 0.004, 1e-5, row_s=0.001)
    mean_s = STEP_S * 20 + 0.005
    simulator = run(
        Poisson(0.5 * min(running, 4) / mean_s, 20_000),
        (Lengths(30, 0.5, 1, 200), Lengths(20, 0.5, 1, 90)),
        system,
        "native,1,2,3",
        tier,
        acceptance=Acceptance("per-request", 0.2, 0.9, 16.0),
        max_running_requests=running,
        overlap=overlap,
    )
    server, requests = simulator.state.server[0], simulator.requests_of(0)
    # Sum the requests in the system over the gaps between all arrivals and departures.
    times = np.concatenate([requests["arrival_s"], requests["finish_s"]])
    change = np.repeat([1, -1], len(requests))
    order = np.argsort(times, kind="stable")
    inside = np.cumsum(change[order])
    number = (inside[:-1] * np.diff(times[order])).sum() / times.max()
    rate = len(requests) / times.max()
    assert number == pytest.approx(rate * mean_in_system_s(requests), rel=0.01)
    assert server.area / server.now_s == pytest.approx(number, rel=0.01)
    assert number > 0.3
