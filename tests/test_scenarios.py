"""Acceptance scenarios: what they claim about rates by position, request and time."""

from dataclasses import replace

import numpy as np
import pytest

from controller.errors import ConfigError
from controller.features import MAX_NUM_STEPS
from controller.tiers import DEFAULT_TIERS
from env.acceptance_process import NUM_POSITIONS, Acceptance, accept_rate, rates_from_accept_lens
from env.deployment import Deployment
from env.scenarios import GOLDEN_ACCEPT_LENS, SCENARIOS, shape_of
from env.simulator import Cell, Simulator
from env.workload import ClosedLoop, Lengths, Workload
from tests.synthetic import even_system

pytestmark = pytest.mark.usefixtures("one_thread")

ALL_DEPTHS = "native,1,2,3,4,5,6,7"
KIMI = GOLDEN_ACCEPT_LENS["kimi-k2.5-eagle3"]


def simulator(acceptance, tiers=ALL_DEPTHS, clients=200, outputs=None, seed=5, rounds=200):
    deployment = Deployment(
        even_system(), tiers, max_running_requests=256, kv_capacity_tokens=10**7, overlap=False
    )
    outputs = outputs or Lengths(60_000, 0.0, 1, 60_000)
    load = ClosedLoop(clients, clients * rounds * 9)
    made = Simulator(
        [Cell(deployment, Workload("x", load, acceptance, Lengths(9, 0, 9, 9), outputs))]
    )
    made.reset([seed])
    return made


def rates(acceptance, requests=(0,), tokens=(0.0,), times=(0.0,), seed=5):
    config = simulator(acceptance, seed=seed, rounds=1).state.config[0]
    return np.array([accept_rate(config, r, p, t) for r in requests for p in tokens for t in times])


# Rates by draft position


@pytest.mark.parametrize("preset", GOLDEN_ACCEPT_LENS)
def test_a_golden_scenario_has_exactly_the_accept_lengths(preset):
    acceptance = SCENARIOS.make("golden", preset=preset)
    golden = GOLDEN_ACCEPT_LENS[preset]
    lens = [acceptance.accept_len(depth) for depth in range(1, len(golden) + 1)]
    assert lens == pytest.approx(golden, abs=1e-12)


@pytest.mark.parametrize("depth", range(1, MAX_NUM_STEPS + 1))
def test_the_simulator_reaches_the_golden_accept_lengths(depth):
    made = simulator(SCENARIOS.make("golden"), clients=256)
    server = made.state.server[0]
    expected, tokens, rounds = server.expected_tokens, server.output_tokens, 400
    for _ in range(rounds):
        made.step(np.array([depth]))
    rows = 256 * rounds
    assert server.num_running == 256
    assert (server.expected_tokens - expected) / rows == pytest.approx(KIMI[depth - 1], abs=1e-9)
    # An accept length of at most 8 has a standard deviation of at most 3.5, and rows are many.
    assert (server.output_tokens - tokens) / rows == pytest.approx(KIMI[depth - 1], abs=0.035)


def test_moments_of_a_round_are_the_chances_by_position():
    made = simulator(SCENARIOS.make("golden"), clients=64)
    made.step(np.array([3]))
    gains = np.diff([1.0, *KIMI])[:MAX_NUM_STEPS]
    assert made.state.moments[0] / 64 == pytest.approx([1.0, *gains])


def test_rates_follow_from_accept_lengths():
    assert rates_from_accept_lens((1.5, 1.75)) == pytest.approx((0.5, 0.5))
    assert rates_from_accept_lens(KIMI)[:4] == pytest.approx((0.83, 60 / 83, 0.75, 0.8))
    assert rates_from_accept_lens((2.0, 3.0)) == (1.0, 1.0)
    assert shape_of("kimi-k2.5-eagle3")[0] == 1.0
    assert shape_of((1, 0.5)) == (1.0, 0.5)
    assert Acceptance(shape=(1.0, 0.5)).position_factors() == (1.0,) + (0.5,) * 7


def test_a_shape_goes_with_every_scenario():
    for name in SCENARIOS.names():
        if name != "golden":
            acceptance = SCENARIOS.make(name, shape="kimi-k2.5-eagle3")
            assert acceptance.shape == shape_of("kimi-k2.5-eagle3")
        assert SCENARIOS.describe(name).endswith(".")


# Levels by request and time


def test_stationary_and_golden_rates_do_not_move():
    for name, level in (("stationary", 0.7), ("golden", 0.83)):
        seen = rates(SCENARIOS.make(name), range(9), (0.0, 500.0), (0.0, 77.0))
        assert seen == pytest.approx(np.full(len(seen), level))


def test_a_mixture_has_two_kinds_of_requests_that_keep_their_rate():
    acceptance = SCENARIOS.make("mixture", low=0.4, high=0.9, share=0.3)
    seen = rates(acceptance, range(4000))
    assert set(seen) == {0.4, 0.9}
    assert (seen == 0.9).mean() == pytest.approx(0.3, abs=0.03)
    later = rates(acceptance, range(4000), (300.0,), (50.0,))
    assert (later == seen).all()
    assert (rates(acceptance, range(4000), seed=6) != seen).any()
    for share, only in ((0.0, 0.4), (1.0, 0.9)):
        assert set(rates(replace(acceptance, share=share), range(200))) == {only}


def test_a_phase_shift_goes_by_order_of_arrival():
    seen = rates(SCENARIOS.make("phase-shift", chat=0.5, code=0.85, requests=100), range(400))
    assert seen.reshape(4, 100).tolist() == [[0.5] * 100, [0.85] * 100] * 2


def test_a_collapse_comes_for_all_at_once_and_ends():
    acceptance = SCENARIOS.make("collapse", high=0.8, low=0.05, period_s=10.0)
    seen = rates(acceptance, (0, 7), (3.0,), np.arange(0.5, 40.0)).reshape(2, 4, 10)
    assert (seen[:, [0, 2]] == 0.8).all()
    assert (seen[:, [1, 3]] == 0.05).all()


def test_drift_is_shared_and_drift_per_request_is_not():
    assert len(set(rates(SCENARIOS.make("drift"), range(20), times=(12.0,)))) == 1
    assert len(set(rates(SCENARIOS.make("drift-per-request"), range(20), (12.0,)))) == 20


def test_the_collapse_is_felt_by_the_server():
    made = simulator(SCENARIOS.make("collapse", high=0.9, low=0.0, period_s=5.0), rounds=2000)
    server, gains = made.state.server[0], {True: [], False: []}
    while server.now_s < 19.0:
        good, before = (server.now_s // 5.0) % 2 == 0, server.num_correct
        made.step(np.array([3]))
        gains[good].append((server.num_correct - before) / (3 * 200))
    assert np.mean(gains[True]) == pytest.approx((0.9 + 0.81 + 0.729) / 3, abs=0.01)
    assert np.mean(gains[False]) == 0.0


@pytest.mark.parametrize("name", SCENARIOS.names())
def test_all_controllers_meet_the_same_luck(name):
    """Which drafts are right depends on seed, request and position, where time does not count."""
    acceptance = SCENARIOS.make(name)
    if name in ("drift", "collapse"):
        acceptance = replace(acceptance, period=1e9)  # the level depends on time: let it stand
    accepted = []
    for order in ([7, 3, 1], [2, 7]):
        made = simulator(acceptance, clients=40)
        found = {}
        for i in range(60):
            before = made.state.request[0].generated[:40].copy()
            depth = order[i % len(order)]
            made.step(np.array([depth]))
            correct = made.state.request[0].generated[:40] - before - 1
            for r in range(40):
                for ahead in range(min(correct[r] + 1, depth)):
                    found.setdefault((r, before[r] + ahead), []).append(ahead < correct[r])
        accepted.append(found)
    flat = len(set(acceptance.shape)) == 1
    both = accepted[0].keys() & accepted[1].keys()
    assert len(both) > 500
    same = np.mean([accepted[0][key] == accepted[1][key] for key in both])
    # With a shape the bar at a position depends on where the draft began; the draw does not.
    assert same == 1.0 if flat and name != "drift-per-request" else same > 0.8


# What is refused

BAD = {
    "unknown scenario": (lambda: SCENARIOS.make("chaos"), "expected one of stationary, golden"),
    "unknown preset": (lambda: SCENARIOS.make("golden", preset="gpt"), "kimi-k2.5-eagle3"),
    "unknown shape": (lambda: SCENARIOS.make("drift", shape="steep"), "expected one of flat"),
    "share above 1": (lambda: SCENARIOS.make("mixture", share=1.5), "share 1.5: expected 0 to 1"),
    "low above high": (lambda: SCENARIOS.make("mixture", low=0.95), "low <= high"),
    "no requests": (lambda: SCENARIOS.make("phase-shift", requests=0), "period 0.0: expected"),
    "rate above 1 by shape": (lambda: Acceptance(high=0.9, shape=(1.0, 1.2)), "lower high"),
    "negative shape": (lambda: Acceptance(shape=(1.0, -0.1)), "between 0 and 1"),
    "no shape": (lambda: Acceptance(shape=()), "expected 1 to 8"),
    "shape too long": (lambda: Acceptance(shape=(1.0,) * 9), "expected 1 to 8"),
    "length below 1": (lambda: rates_from_accept_lens((0.9,)), "expected more than 1"),
    "length grows too fast": (lambda: rates_from_accept_lens((1.5, 2.1)), "at most 2"),
    "length falls": (lambda: rates_from_accept_lens((1.8, 1.7)), "expected more than 1.8"),
    "no lengths": (lambda: rates_from_accept_lens(()), "depths 1 to 8"),
    "too deep": (lambda: Acceptance().accept_len(9), "expected 0 to 8"),
}


@pytest.mark.parametrize(("make", "reason"), BAD.values(), ids=BAD.keys())
def test_bad_scenarios_say_what_was_expected(make, reason):
    with pytest.raises(ConfigError) as caught:
        make()
    assert reason in str(caught.value)


def test_the_default_tiers_are_within_the_positions():
    deepest = max(int(name) for name in DEFAULT_TIERS.split(",") if name.isdecimal())
    assert deepest <= MAX_NUM_STEPS < NUM_POSITIONS
