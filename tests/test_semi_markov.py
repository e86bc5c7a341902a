"""The per-step discount: advantages by hand, and agreement with the library where both apply."""

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from training.semi_markov import SemiMarkovRolloutBuffer, advantages_of


def column(*values):
    return np.array(values, np.float32)[:, None]


def test_advantages_by_hand():
    # Two steps: discounts 0.5 and 0.8, lambda 0.5, the value after the last step is 10.
    advantages = advantages_of(
        rewards=column(1.0, 2.0),
        values=column(3.0, 4.0),
        discounts=column(0.5, 0.8),
        continues=column(1.0, 1.0),
        last_values=np.array([10.0], np.float32),
        gae_lambda=0.5,
    )
    last = 2.0 + 0.8 * 10.0 - 4.0
    first = (1.0 + 0.5 * 4.0 - 3.0) + 0.5 * 0.5 * last
    np.testing.assert_allclose(advantages[:, 0], [first, last], rtol=1e-6)


def test_nothing_flows_across_the_end_of_an_episode():
    arguments = dict(
        rewards=column(1.0, 2.0),
        values=column(3.0, 4.0),
        discounts=column(0.5, 0.8),
        continues=column(0.0, 1.0),
        gae_lambda=0.9,
    )
    low = advantages_of(last_values=np.array([0.0], np.float32), **arguments)
    high = advantages_of(last_values=np.array([99.0], np.float32), **arguments)
    assert low[0, 0] == high[0, 0] == 1.0 - 3.0
    assert low[1, 0] != high[1, 0]


def test_constant_discount_agrees_with_the_library():
    rng = np.random.default_rng(0)
    steps, envs, gamma, gae_lambda = 12, 3, 0.93, 0.9
    box, tiers = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    library = RolloutBuffer(
        steps, box, tiers, device="cpu", gae_lambda=gae_lambda, gamma=gamma, n_envs=envs
    )
    dones = rng.random((steps, envs)) < 0.2
    starts = np.vstack([np.ones(envs), dones[:-1]])
    rewards = rng.normal(size=(steps, envs)).astype(np.float32)
    values = rng.normal(size=(steps, envs)).astype(np.float32)
    for t in range(steps):
        library.add(
            np.zeros((envs, 2)),
            np.zeros((envs, 1)),
            rewards[t],
            starts[t],
            torch.tensor(values[t]),
            torch.zeros(envs),
        )
    last = torch.tensor(rng.normal(size=envs).astype(np.float32))
    library.compute_returns_and_advantage(last, dones[-1])
    ours = advantages_of(
        rewards,
        values,
        np.full((steps, envs), gamma, np.float32),
        (~dones).astype(np.float32),
        last.numpy(),
        gae_lambda,
    )
    np.testing.assert_allclose(ours, library.advantages, rtol=1e-4, atol=1e-5)


def test_buffer_keeps_returns_unscaled_and_puts_advantages_on_one_scale():
    box, tiers = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    buffer = SemiMarkovRolloutBuffer(64, box, tiers, device="cpu", gae_lambda=0.9, n_envs=2)
    buffer.reset()
    rng = np.random.default_rng(1)
    for _ in range(64):
        buffer.add(
            np.zeros((2, 2)),
            np.zeros((2, 1)),
            rng.normal(size=2) * np.array([1.0, 1000.0]),
            np.zeros(2),
            torch.zeros(2),
            torch.zeros(2),
        )
        buffer.note_outcome(np.full(2, 0.5), np.zeros(2, bool))
    buffer.compute_returns_and_advantage(torch.zeros(2), np.zeros(2, bool))
    spread = buffer.advantages.std(axis=0)
    np.testing.assert_allclose(spread, [1.0, 1.0], rtol=1e-3)
    assert buffer.returns.std(axis=0)[1] > 100.0
