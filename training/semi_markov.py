"""PPO for rounds of unequal size: a discount of its own for every step.

Stable-Baselines3 discounts every step by one constant. Here a step is a decode round, which may
give one token or two thousand; the env says after each how much what follows it counts
(``GovernorVecEnv.discounts``). Only the rollout buffer and the loop that fills it differ from the
library; the update is its own.
"""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from env.vector_env import GovernorVecEnv


def advantages_of(
    rewards: NDArray[np.float32],
    values: NDArray[np.float32],
    discounts: NDArray[np.float32],
    continues: NDArray[np.float32],
    last_values: NDArray[np.float32],
    gae_lambda: float,
) -> NDArray[np.float32]:
    """Return generalised advantages (Schulman et al., arXiv:1506.02438) under varying discounts.

    ``A_t = r_t + d_t c_t V_{t+1} - V_t + d_t c_t lambda A_{t+1}``, where ``d_t`` is the discount
    after step ``t`` and ``c_t`` is 0 if the episode ended with it.

    Args:
        rewards: ``(steps, envs)``; where a truncated episode ended, its bootstrap is included.
        values: ``(steps, envs)``.
        discounts: ``(steps, envs)``.
        continues: ``(steps, envs)``.
        last_values: ``(envs,)`` values after the last step.
        gae_lambda: Decay of the trace for each round.
    """
    advantages = np.zeros_like(rewards)
    following = np.zeros_like(last_values)
    next_values = last_values
    for step in range(len(rewards) - 1, -1, -1):
        factor = discounts[step] * continues[step]
        delta = rewards[step] + factor * next_values - values[step]
        following = delta + factor * gae_lambda * following
        advantages[step] = following
        next_values = values[step]
    return advantages


class SemiMarkovRolloutBuffer(RolloutBuffer):
    """A rollout buffer that keeps the discount and the end of every step.

    The critic's targets look further ahead (``value_lambda``) than the policy's advantages
    (``gae_lambda``). What a round is worth shows at once; in what follows it, the errors of the
    running accept estimate, which made the policy choose, go on, and a long trace would blame the
    choice for them.
    """

    value_lambda = 0.95
    spread: NDArray[np.float32] | None = None

    def reset(self) -> None:
        """Empty the buffer."""
        super().reset()
        self.discounts = np.ones((self.buffer_size, self.n_envs), np.float32)
        self.continues = np.ones((self.buffer_size, self.n_envs), np.float32)

    def note_outcome(self, discounts: NDArray[np.float64], dones: NDArray[np.bool_]) -> None:
        """Keep what followed the step that was just added."""
        self.discounts[self.pos - 1] = discounts
        self.continues[self.pos - 1] = ~dones

    def compute_returns_and_advantage(
        self, last_values: torch.Tensor, dones: NDArray[np.bool_]
    ) -> None:
        """Fill ``advantages`` and ``returns``."""
        last = last_values.detach().cpu().numpy().flatten()
        trace = (self.rewards, self.values, self.discounts, self.continues, last)
        self.returns = advantages_of(*trace, self.value_lambda) + self.values
        self.advantages = advantages_of(*trace, self.gae_lambda)
        # Luck is far larger in a batch of one than in one of 256. On one scale for each server,
        # no kind of load drowns out the others; it changes how cells are weighted, not what is
        # best in any of them.
        spread = self.advantages.std(axis=0)
        if self.spread is None:
            self.spread = spread
        self.spread = 0.9 * self.spread + 0.1 * spread
        self.advantages /= np.maximum(self.spread, 1e-8)


class SemiMarkovPPO(PPO):
    """Stable-Baselines3's PPO with the env's own discounts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, rollout_buffer_class=SemiMarkovRolloutBuffer, **kwargs)

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: RolloutBuffer,
        n_rollout_steps: int,
    ) -> bool:
        """Fill the buffer; see the base class."""
        if not isinstance(env, GovernorVecEnv):
            raise TypeError(f"expected a GovernorVecEnv, got {type(env).__name__}")
        if not isinstance(rollout_buffer, SemiMarkovRolloutBuffer):
            raise TypeError("expected a SemiMarkovRolloutBuffer")
        if not isinstance(self.action_space, spaces.Discrete):
            raise TypeError("expected discrete actions")
        self.policy.set_training_mode(False)
        rollout_buffer.reset()
        callback.on_rollout_start()
        for _ in range(n_rollout_steps):
            with torch.no_grad():
                actions, values, log_probs = self.policy(torch.as_tensor(self._last_obs))
            chosen = actions.numpy()
            observations, rewards, dones, infos = env.step(chosen)
            self.num_timesteps += env.num_envs
            callback.update_locals(locals())
            if not callback.on_step():
                return False
            truncated = [e for e in np.flatnonzero(dones) if infos[e]["TimeLimit.truncated"]]
            if truncated:
                ends = np.stack([infos[e]["terminal_observation"] for e in truncated])
                with torch.no_grad():
                    end_values = self.policy.predict_values(torch.as_tensor(ends)).numpy()[:, 0]
                rewards[truncated] += env.discounts[truncated] * end_values
            rollout_buffer.add(
                self._last_obs,  # type: ignore[arg-type]
                chosen.reshape(-1, 1),
                rewards,
                self._last_episode_starts,  # type: ignore[arg-type]
                values,
                log_probs,
            )
            rollout_buffer.note_outcome(env.discounts, dones)
            self._last_obs = observations  # type: ignore[assignment]
            self._last_episode_starts = dones
        with torch.no_grad():
            last_values = self.policy.predict_values(torch.as_tensor(self._last_obs))
        rollout_buffer.compute_returns_and_advantage(last_values, dones)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True
