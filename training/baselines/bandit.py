"""A contextual bandit: discounted UCB over the tiers, one bandit for each range of batch sizes.

The idea of Nightjar (arXiv:2512.22420, which holds an arm for a block of rounds because switching
costs) and BanditSpec (arXiv:2505.15141). The reward of a round is its tokens a request over its
calibrated cost, relative to no speculation, so that off always earns exactly 1 and need not be
tried; rounds on a stale draft count, since they are what switching costs. Old rewards fade
(discounted UCB: Garivier and Moulines, ALT 2011).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from env.compiled import kernel
from env.server_loop import step_server
from env.simulator import Simulator
from training.baselines.feedback import HISTOGRAM, ROWS, TIER, Feedback, collect, new_feedback
from training.baselines.stepwise import Compiled
from training.baselines.task import Task
from training.controllers import Controller

NUM_BUCKETS = 14
"""Batch sizes by power of two, up to 8192."""


@kernel
def bucket_of(batch_size):
    """Return the power of two at or below a batch size."""
    bucket = 0
    while batch_size > 1 and bucket < NUM_BUCKETS - 1:
        batch_size >>= 1
        bucket += 1
    return bucket


@kernel
def add_reward(weights, sums, arm, reward, discount):
    """Let all arms of a bandit fade, then add a reward to one.

    Args:
        weights: ``(num_tiers,)`` discounted pulls.
        sums: ``(num_tiers,)`` discounted rewards.
        arm: The tier that ran.
        reward: What it earned.
        discount: Share of the past that is kept.
    """
    for k in range(weights.shape[0]):
        weights[k] *= discount
        sums[k] *= discount
    weights[arm] += 1.0
    sums[arm] += reward


@kernel
def best_arm(weights, sums, num_steps, exploration):
    """Return the arm with the largest upper confidence bound; arms never tried come first."""
    total = 0.0
    for k in range(weights.shape[0]):
        total += weights[k]
    spread = math.log(max(total, 1.0) + 1.0)
    best = 0
    best_bound = -np.inf
    for k in range(weights.shape[0]):
        if num_steps[k] == 0:
            bound = 1.0
        elif weights[k] < 1e-3:
            bound = 1e9
        else:
            bound = sums[k] / weights[k] + exploration * math.sqrt(spread / weights[k])
        if bound > best_bound:
            best = k
            best_bound = bound
    return best


class Memory(NamedTuple):
    """What the bandits of all servers remember, and their settings.

    Attributes:
        settings: ``(2,)`` discount and exploration.
        hold: ``(1,)`` rounds of a block.
        weights: ``(num_servers, NUM_BUCKETS, num_tiers)`` discounted pulls.
        sums: ``(num_servers, NUM_BUCKETS, num_tiers)`` discounted rewards.
        block: ``(num_servers, 3)`` rounds left, bucket and tier of the block at hand.
        feedback: Results.
    """

    settings: NDArray[np.float64]
    hold: NDArray[np.int64]
    weights: NDArray[np.float64]
    sums: NDArray[np.float64]
    block: NDArray[np.int64]
    feedback: Feedback


@kernel
def bandit_tier(state, costs, e, memory):
    """Give the new rewards of a server to their bandits, then choose, at the end of a block."""
    server = state.server[e]
    row = state.config[e].cost_row
    known = memory.feedback.known[e]
    for i in range(collect(state, e, memory.feedback.held[e], known)):
        rows = known[i, ROWS]
        if rows == 0:
            continue
        arm = known[i, TIER]
        correct = 0.0
        for count in range(costs.num_steps[arm] + 1):
            correct += count * known[i, HISTOGRAM + count]
        context = server.context_tokens
        own_s = costs.base_s[row, arm, rows] + costs.context_s[row, arm] * context
        off_s = costs.base_s[row, 0, rows] + costs.context_s[row, 0] * context
        reward = (1.0 + correct / rows) * off_s / own_s
        bucket = bucket_of(rows)
        add_reward(
            memory.weights[e, bucket], memory.sums[e, bucket], arm, reward, memory.settings[0]
        )
    bucket = bucket_of(max(server.num_running, 1))
    block = memory.block[e]
    if block[0] > 0 and block[1] == bucket:
        block[0] -= 1
        return block[2]
    block[0] = memory.hold[0] - 1
    block[1] = bucket
    block[2] = best_arm(
        memory.weights[e, bucket], memory.sums[e, bucket], costs.num_steps, memory.settings[1]
    )
    return block[2]


@kernel
def choose_bandit(state, costs, memory, actions):
    """Choose once on every server that is not done."""
    for e in range(actions.shape[0]):
        if not state.server[e].done:
            actions[e] = bandit_tier(state, costs, e, memory)


@kernel
def run_bandit(state, costs, memory):
    """Run every server to its end."""
    for e in range(memory.block.shape[0]):
        while not state.server[e].done:
            step_server(state, costs, e, bandit_tier(state, costs, e, memory))


@dataclass(frozen=True)
class Bandit(Compiled):
    """The bandit and its settings.

    Attributes:
        exploration: Weight of the confidence bound.
        discount: Share of the past that a round keeps.
        hold: Rounds for which an arm is kept.
        name: Name in tables.
    """

    exploration: float = 0.1
    discount: float = 0.99
    hold: int = 8
    name: str = "bandit"
    choose_kernel = choose_bandit
    run_kernel = run_bandit

    def start(self, simulator: Simulator) -> Any:
        """Return bandits that have seen nothing."""
        shape = (simulator.num_servers, NUM_BUCKETS, simulator.num_tiers)
        return Memory(
            np.array([self.discount, self.exploration]),
            np.array([self.hold]),
            np.zeros(shape),
            np.zeros(shape),
            np.zeros((simulator.num_servers, 3), np.int64),
            new_feedback(simulator.num_servers),
        )


def make_bandit(task: Task) -> Controller:
    """Exploration, fading and block length tuned together."""
    return task.best(
        Bandit(exploration, discount, hold)
        for exploration in (0.01, 0.03, 0.1, 0.3)
        for discount in (0.95, 0.99, 0.998, 1.0)
        for hold in (1, 4, 16, 64)
    )
