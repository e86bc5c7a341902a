"""The policy and critic networks in PyTorch, as a Stable-Baselines3 policy.

The actor computes what ``controller/policy.py`` computes in NumPy, under the same parameter names;
a test holds the two together. The critic is for training only.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor, nn

from controller.features import (
    GAIN_SCALE,
    GLOBAL_FEATURES,
    NUM_GLOBAL,
    NUM_PER_TIER,
    TIER_FEATURES,
    observation_size,
)
from controller.policy import parameter_shapes
from training.starting_rule import (
    DEFAULT_PRIOR,
    NUM_UNITS,
    PRIOR_FEATURES,
    StartingRule,
    plant,
)

CRITIC_GLOBAL = ("batch_size", "occupancy", "queue_depth", "context_per_request", "kv_use")
CRITIC_TIER = ("cost",)


def critic_columns(num_tiers: int, size: int) -> list[int]:
    """Return the entries of an observation that the critic sees.

    These are the load, the costs and all that is privileged, but nothing that tells which tier ran
    last or what was estimated. The merit of one round is about a thousandth of a state's value; a
    critic that sees the last tier errs by more than that from tier to tier, and the policy then
    follows its errors.

    Args:
        num_tiers: Number of tiers.
        size: Length of an observation with its privileged part.
    """
    columns = [i for i, f in enumerate(GLOBAL_FEATURES) if f.name in CRITIC_GLOBAL]
    for k in range(num_tiers):
        start = NUM_GLOBAL + k * NUM_PER_TIER
        columns += [start + i for i, f in enumerate(TIER_FEATURES) if f.name in CRITIC_TIER]
    return columns + list(range(observation_size(num_tiers), size))


class TierScorer(nn.Module):
    """Score every tier by one network that is shared over tiers.

    Args:
        hidden: Width of the first hidden layer.
        second: Width of the second hidden layer.
        prior: Starting weight of the cost model's gain (log ratio of tokens/s) in a logit; the
            starting rule's logits are in proportion. With 0 there is neither.
    """

    def __init__(self, hidden: int, second: int, prior: float) -> None:
        super().__init__()
        self.shapes = parameter_shapes(NUM_GLOBAL, NUM_PER_TIER, hidden, second)
        self.weights = nn.ParameterDict()
        for name, shape in self.shapes.items():
            value = torch.zeros(shape)
            if len(shape) == 2:
                fan_in = NUM_GLOBAL + NUM_PER_TIER if shape[0] == hidden else hidden
                nn.init.uniform_(value, -((3.0 / fan_in) ** 0.5), (3.0 / fan_in) ** 0.5)
            self.weights[name.replace(".", "_")] = nn.Parameter(value)
        with torch.no_grad():
            self["logit.weight"].uniform_(-0.01, 0.01)
            for index, feature in enumerate(TIER_FEATURES):
                if feature.name in PRIOR_FEATURES:
                    self["skip.weight"][index] = prior / len(PRIOR_FEATURES) / GAIN_SCALE
            if prior > 0.0 and min(hidden, second) >= NUM_UNITS:
                parameters = {name: self[name] for name in self.shapes}
                plant(parameters, StartingRule(), prior / DEFAULT_PRIOR)

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = self.weights[name.replace(".", "_")]
        return value

    def forward(self, observation: Tensor) -> Tensor:
        """Return ``(batch, num_tiers)`` logits for ``(batch, observation_size)``."""
        batch = observation.shape[0]
        common = observation[:, :NUM_GLOBAL]
        tiers = observation[:, NUM_GLOBAL:].reshape(batch, -1, NUM_PER_TIER)
        shared = common @ self["global.weight"].T + self["hidden.bias"]
        hidden = torch.relu(shared[:, None, :] + tiers @ self["tier.weight"].T)
        second = torch.relu(hidden @ self["second.weight"].T + self["second.bias"])
        return second @ self["logit.weight"] + tiers @ self["skip.weight"]

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return the parameters under their checkpoint names."""
        return {name: self[name].detach().numpy().copy() for name in self.shapes}

    def load_arrays(self, arrays: dict[str, NDArray[np.float32]]) -> None:
        """Set the parameters from their checkpoint names."""
        with torch.no_grad():
            for name in self.shapes:
                self[name].copy_(torch.from_numpy(np.array(arrays[name])))


class GovernorPolicy(ActorCriticPolicy):
    """Actor and critic for Stable-Baselines3's PPO.

    The actor sees the observation; the critic what :func:`critic_columns` gives it.

    Args:
        observation_space: Box of a governor env.
        action_space: ``Discrete(num_tiers)``.
        lr_schedule: Learning rate by remaining progress.
        hidden: See :class:`TierScorer`.
        second: See :class:`TierScorer`.
        prior: See :class:`TierScorer`.
        critic_width: Width of both hidden layers of the critic.
        **kwargs: Passed on by Stable-Baselines3.
    """

    def __init__(
        self,
        observation_space: spaces.Box,
        action_space: spaces.Discrete,
        lr_schedule: Callable[[float], float],
        hidden: int = 64,
        second: int = 64,
        prior: float = DEFAULT_PRIOR,
        critic_width: int = 128,
        **kwargs: Any,
    ) -> None:
        self._sizes = (hidden, second, prior, critic_width)
        super().__init__(observation_space, action_space, lr_schedule, **kwargs)

    def _build(self, lr_schedule: Callable[[float], float]) -> None:
        hidden, second, prior, width = self._sizes
        num_tiers = int(self.action_space.n)  # type: ignore[attr-defined]
        self._visible = observation_size(num_tiers)
        columns = critic_columns(num_tiers, self.observation_space.shape[0])  # type: ignore[index]
        self._columns = torch.tensor(columns)
        size = len(columns)
        self.actor = TierScorer(hidden, second, prior)
        self.critic = nn.Sequential(
            nn.Linear(size, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 1),
        )
        self.optimizer = self.optimizer_class(
            self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs
        )

    def get_distribution(self, obs: Any) -> Any:
        """Return the distribution over tiers."""
        return self.action_dist.proba_distribution(
            action_logits=self.actor(obs[:, : self._visible])
        )

    def predict_values(self, obs: Any) -> Tensor:
        """Return ``(batch, 1)`` values."""
        values: Tensor = self.critic(obs[:, self._columns])
        return values

    def forward(self, obs: Tensor, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return actions, values and log probabilities."""
        distribution = self.get_distribution(obs)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, self.predict_values(obs), distribution.log_prob(actions)

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return values, log probabilities and entropies of given actions."""
        distribution = self.get_distribution(obs)
        return self.predict_values(obs), distribution.log_prob(actions), distribution.entropy()

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        actions: Tensor = self.get_distribution(observation).get_actions(
            deterministic=deterministic
        )
        return actions
