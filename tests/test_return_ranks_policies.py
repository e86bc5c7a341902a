"""More return means a better server: the reward and the discount do not favour any depth.

For each pair of fixed tiers whose objective (throughput in a closed loop, mean time in system in an
open one) differs by more than 1% on common seeds, the returns of the vector env must order them
the same way.
"""

from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from controller.calibration import Calibration
from env.acceptance_process import Acceptance
from env.deployment import Deployment
from env.scale import capacity_rps
from env.simulator import Cell
from env.vector_env import GovernorVecEnv
from env.workload import ClosedLoop, Lengths, OpenLoop, Workload
from training.controllers import fixed_controllers
from training.evaluation import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDER = Path(__file__).parents[1] / "checkpoints/calibrations"
SERVER = Deployment(Calibration.load(FOLDER / "h200-llama3-8b-eagle3-fa3.json"))
NUM_TIERS = len(SERVER.resolved_tiers())
PROMPTS, OUTPUTS = Lengths(100, 0.5, 16, 400), Lengths(120, 0.5, 8, 400)
SEEDS = range(100, 108)
HORIZON_TOKENS = 256.0
MARGIN = 0.01


def closed(clients, acceptance):
    load = ClosedLoop(clients, int(4 * HORIZON_TOKENS * clients))
    return Cell(SERVER, Workload("closed", load, acceptance, PROMPTS, OUTPUTS))


def open_loop(low, high, acceptance):
    """Return a load between two shares of what the server can serve off."""
    capacity = capacity_rps(SERVER, PROMPTS, OUTPUTS)
    load = OpenLoop(low * capacity, high * capacity, 10.0, 400)
    return Cell(SERVER, Workload("open", load, acceptance, PROMPTS, OUTPUTS))


SHARED = Acceptance("shared", 0.3, 0.9, period=0.2)
PER_REQUEST = Acceptance("per-request", 0.3, 0.9, period=16.0)
CELLS = {
    "closed 1": closed(1, PER_REQUEST),
    "closed 32": closed(32, PER_REQUEST),
    "closed 32, shared": closed(32, SHARED),
    "closed 256": closed(256, PER_REQUEST),
    "open, swinging": open_loop(0.1, 0.9, SHARED),
    "open, crowded": open_loop(0.9, 0.9, PER_REQUEST),
}


@cache
def objectives(name):
    """Return ``(NUM_TIERS,)`` objectives of the fixed tiers, as the comparison measures them."""
    tiers = [tier.name for tier in SERVER.resolved_tiers()]
    outcomes = [evaluate(each, [CELLS[name]], SEEDS) for each in fixed_controllers(tiers)]
    return np.array([1.0 / (1.0 / outcome.objective[0]).mean() for outcome in outcomes])


@cache
def rollouts(name, horizon_tokens):
    """Run every tier under every seed in the vector env.

    Returns:
        Rewards and discounts, ``(steps, NUM_TIERS * len(SEEDS))``; 0 and 1 after the end.
    """
    env = GovernorVecEnv(
        [CELLS[name]] * (NUM_TIERS * len(SEEDS)), horizon_tokens=horizon_tokens, scaled=False
    )
    env.reset()
    env.simulator.reset(list(SEEDS) * NUM_TIERS)
    tiers = np.repeat(np.arange(NUM_TIERS), len(SEEDS))
    rewards, discounts, ended = [], [], np.zeros(env.num_envs, bool)
    while not ended.all():
        _, reward, done, _ = env.step(tiers)
        rewards.append(np.where(ended, 0.0, reward))
        discounts.append(np.where(ended, 1.0, env.discounts))
        ended |= done
    return np.array(rewards), np.array(discounts)


def returns_from_each_step(rewards, discounts):
    following = np.zeros((len(rewards) + 1, rewards.shape[1]))
    for i in range(len(rewards) - 1, -1, -1):
        following[i] = rewards[i] + discounts[i] * following[i + 1]
    return following[:-1]


def mean_by_tier(values):
    return values.reshape(NUM_TIERS, -1).mean(axis=1)


def check_ranks(objective, returns):
    compared = 0
    for i, j in combinations(range(NUM_TIERS), 2):
        if abs(np.log(objective[i] / objective[j])) > MARGIN:
            compared += 1
            assert (returns[i] > returns[j]) == (objective[i] > objective[j]), (i, j)
    assert compared >= 10, "most pairs of tiers differ"


@pytest.mark.parametrize("name", CELLS)
def test_the_undiscounted_return_ranks_tiers_by_the_objective(name):
    rewards, _ = rollouts(name, HORIZON_TOKENS)
    check_ranks(objectives(name), mean_by_tier(rewards.sum(axis=0)))


@pytest.mark.parametrize("horizon_tokens", [HORIZON_TOKENS, 64.0])
@pytest.mark.parametrize("name", CELLS)
def test_the_return_discounted_by_tokens_ranks_tiers_by_the_objective(name, horizon_tokens):
    """Starts are spread evenly over the tokens of the episodes."""
    rewards, discounts = rollouts(name, horizon_tokens)
    tokens = -np.log(discounts)
    following = returns_from_each_step(rewards, discounts)
    spread = (following * tokens).sum(axis=0) / tokens.sum(axis=0)
    check_ranks(objectives(name), mean_by_tier(spread))


@pytest.mark.parametrize("name", [name for name in CELLS if name.startswith("closed")])
def test_the_discounted_return_of_a_closed_loop_ranks_tiers_from_the_reset_on(name):
    """Not so in an open loop: it starts empty, which favours deep drafts."""
    rewards, discounts = rollouts(name, HORIZON_TOKENS)
    check_ranks(objectives(name), mean_by_tier(returns_from_each_step(rewards, discounts)[0]))


@pytest.mark.parametrize("name", ["closed 32", "closed 256"])
def test_a_discount_by_rounds_would_rank_tiers_wrongly(name):
    """It favours short rounds with few tokens; so the tests above can fail."""
    rewards, discounts = rollouts(name, HORIZON_TOKENS)
    by_rounds = np.full_like(discounts, np.exp(-1.0 / 64.0))
    returns = mean_by_tier(returns_from_each_step(rewards, by_rounds)[0])
    with pytest.raises(AssertionError):
        check_ranks(objectives(name), returns)
    assert returns.argmax() == 0, "off looks best"
