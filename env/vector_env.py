"""Many governed servers as one Stable-Baselines3 vector env: arrays in, arrays out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from controller.errors import ConfigError
from controller.features import observation_bounds
from env.privileged import NUM_PRIVILEGED
from env.scale import reference_batch, reference_step_s
from env.simulator import Cell, Simulator

SEED_STRIDE = 1_000_003
"""Distance of the episode seeds of two neighbouring servers."""


class GovernorVecEnv(VecEnv):
    """Servers that restart by themselves; what one episode is, ``env.gym_env`` says.

    After each step ``discounts`` (``(num_envs,)``) holds the factor for what follows it,
    ``exp(-tokens / horizon)``: time is counted in generated tokens, so that neither long rounds
    nor rounds with many tokens are favoured. The horizon is ``horizon_tokens`` output tokens for
    each request of the cell's typical batch.

    With ``clairvoyant`` rewards (for learning) only the part of a round that a controller can save
    counts: minus the request-seconds that it lost against the best tier with a warm draft, given
    the true accept rates. Tokens are paid for in that reward, at the price of the best tier, so
    the discount counts the tokens that the best tier would have given, whatever tier ran. What
    this leaves out is the same for every controller, but it is most of a round and all of the luck.

    With ``scaled`` rewards (for learning) an off-only server earns about -1 over a horizon,
    whatever its load; unscaled ones are minus the request-seconds that passed.

    Args:
        cells: One for each env; all with one tier list.
        seed: Episode ``i`` of env ``e`` runs under seed ``seed + e * SEED_STRIDE + i``.
        horizon_tokens: Discount horizon, in output tokens a request; None for no discount.
        privileged: Whether observations end with what only a critic may know
            (``env/privileged.py``).
        scaled: Whether rewards are put on one scale.
        clairvoyant: See above.
        slo_weight: Seconds that a request which missed the SLO adds to the cost.
    """

    render_mode = None

    def __init__(
        self,
        cells: Sequence[Cell],
        seed: int = 0,
        horizon_tokens: float | None = 256.0,
        privileged: bool = False,
        scaled: bool = True,
        clairvoyant: bool = False,
        slo_weight: float = 0.0,
    ) -> None:
        if horizon_tokens is not None and not horizon_tokens > 0:
            raise ConfigError(f"horizon_tokens {horizon_tokens}: expected a positive number, None")
        self.simulator = Simulator(cells, slo_weight=slo_weight)
        low, high = observation_bounds(self.simulator.num_tiers)
        self._size = len(low)
        self._privileged = NUM_PRIVILEGED if privileged else 0
        low, high = low + [0.0] * self._privileged, high + [np.inf] * self._privileged
        super().__init__(
            len(cells),
            spaces.Box(np.array(low, np.float32), np.array(high, np.float32), dtype=np.float32),
            spaces.Discrete(self.simulator.num_tiers),
        )
        batch = np.array([reference_batch(cell) for cell in cells])
        step_s = np.array([reference_step_s(cell) for cell in cells])
        self.horizons = np.full(len(cells), np.inf)
        if horizon_tokens is not None:
            self.horizons = horizon_tokens * batch
        self.reward_scale = np.ones(len(cells))
        if scaled:
            self.reward_scale = 1.0 / (batch * step_s * (horizon_tokens or 1.0))
        self.discounts = np.ones(len(cells))
        self._clairvoyant = clairvoyant
        self._closed = np.array([cell.workload.is_closed for cell in cells])
        self._first_seed = seed
        self._episodes = np.zeros(len(cells), np.int64)
        self._observations = np.zeros((len(cells), len(low)), np.float32)
        self._actions = np.zeros(len(cells), np.int64)

    def _restart(self, servers: NDArray[np.int64]) -> None:
        seeds = self._first_seed + servers * SEED_STRIDE + self._episodes[servers]
        self._episodes[servers] += 1
        self.simulator.reset(seeds.tolist(), servers.tolist())

    def reset(self) -> NDArray[np.float32]:
        """Start a new episode everywhere; return ``(num_envs, observation_size)``."""
        if any(seed is not None for seed in self._seeds):
            self._first_seed = int(self._seeds[0] or 0)
            self._episodes[:] = 0
        self._reset_seeds()
        self._reset_options()
        self._restart(np.arange(self.num_envs))
        self._observe()
        return self._observations.copy()

    def _observe(self) -> None:
        self.simulator.observe(self._observations[:, : self._size])
        if self._privileged:
            self.simulator.observe_privileged(self._observations[:, self._size :])

    def step_async(self, actions: NDArray[np.int64]) -> None:
        """Keep the actions, ``(num_envs,)`` tier indices."""
        self._actions = np.asarray(actions, np.int64)

    def step_wait(self) -> Any:
        """Run a round everywhere; return observations, rewards, dones and infos."""
        area, tokens = self.simulator.step(self._actions)
        cost, counted = area, tokens
        if self._clairvoyant:
            cost, counted = self.simulator.lost_s, self.simulator.ideal_tokens
        rewards = (-cost * self.reward_scale).astype(np.float32)
        self.discounts = np.exp(-counted / self.horizons)
        dones = self.simulator.done.copy()
        self._observe()
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if dones.any():
            over = np.flatnonzero(dones)
            for e in over:
                infos[e]["terminal_observation"] = self._observations[e].copy()
                infos[e]["TimeLimit.truncated"] = bool(self._closed[e])
            self._restart(over)
            self._observe()
        return self._observations.copy(), rewards, dones, infos

    def close(self) -> None:
        """Nothing is held open."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of this object, once for each chosen env."""
        value = getattr(self, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of this object."""
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        """Refuse: there is no env object for each server."""
        raise ConfigError(
            f"{method_name!r} cannot be called on single envs: the servers live in shared arrays; "
            "use GovernorVecEnv.simulator"
        )

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Return that no server is wrapped."""
        return [False] * len(list(self._get_indices(indices)))
