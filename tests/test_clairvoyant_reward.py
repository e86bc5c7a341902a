"""The learner's reward leaves out only what no controller can change."""

import numpy as np
import pytest

from env.ideal import best_rate
from env.privileged import NUM_PRIVILEGED
from env.simulator import Simulator
from env.vector_env import GovernorVecEnv
from tests.synthetic import cell

OFF, DEEP = 0, 1


def lost_share(deep_s, rate, tier):
    """Share of the request time that a fixed tier loses, over one episode without staleness."""
    simulator = Simulator([cell(deep_s, rate)])
    simulator.reset([1])
    simulator.run_tables(np.full((1, 64), tier))
    server = simulator.state.server[0]
    return float(server.lost_s / server.area)


def test_the_best_tier_loses_nothing_and_the_other_its_shortfall():
    # Depth 3 at rate 0.8 gives 2.952 tokens in 12 ms; off gives 1 in 10 ms.
    assert lost_share(0.012, 0.8, DEEP) == pytest.approx(0.0, abs=0.01)
    assert lost_share(0.012, 0.8, OFF) == pytest.approx(1 - (1 / 10) / (2.952 / 12), abs=0.03)
    # At rate 0.1 it gives 1.111 tokens in 30 ms: off is best.
    assert lost_share(0.030, 0.1, OFF) == pytest.approx(0.0, abs=1e-9)
    assert lost_share(0.030, 0.1, DEEP) == pytest.approx(1 - (1.111 / 30) / (1 / 10), abs=0.03)


def test_rewards_are_minus_the_lost_request_seconds():
    env = GovernorVecEnv([cell(0.012, 0.5)] * 2, seed=3, clairvoyant=True, scaled=False)
    env.reset()
    total = np.zeros(2)
    for _ in range(50):
        _, rewards, _, _ = env.step(np.array([OFF, DEEP]))
        total += rewards
    assert total == pytest.approx(-env.simulator.state.server.lost_s, rel=1e-4)


def test_the_discount_does_not_depend_on_what_was_chosen():
    env = GovernorVecEnv([cell(0.012, 0.5)] * 2, seed=3, clairvoyant=True, horizon_tokens=50.0)
    env.simulator.reset([9, 9])
    env.step(np.array([OFF, DEEP]))
    assert env.discounts[0] == env.discounts[1] < 1.0


def test_privileged_observations_end_with_the_true_acceptance():
    env = GovernorVecEnv([cell(0.012, 0.7)], privileged=True)
    observation = env.reset()
    assert observation.shape == (1, env.simulator.observation_size + NUM_PRIVILEGED)
    first = observation[0, env.simulator.observation_size :]
    depths = [sum(0.7**j for j in range(k + 1)) for k in (1, 3, 7)]
    np.testing.assert_allclose(first[:3], np.log(depths), rtol=1e-5)
    np.testing.assert_allclose(first[3:6], first[:3], rtol=1e-6)


def test_best_rate_by_hand():
    simulator = Simulator([cell(0.012, 0.8)])
    simulator.reset([1])
    rate = 0.8
    moments = np.array([rate**j for j in range(8)]) * 4  # four requests
    tier, tokens, per_s = best_rate(simulator.costs, simulator.state.config[0], moments, 4, 100)
    assert tier == DEEP
    assert tokens == pytest.approx(4 * 2.952)
    mean = simulator.cells[0].workload.outputs.mean()
    seconds = 0.012 + 0.001 * (1 - np.exp(-tokens / mean))
    assert per_s == pytest.approx(tokens / seconds)
