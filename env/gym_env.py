"""One governed server as a Gymnasium env."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from controller.errors import ConfigError
from controller.features import GLOBAL_FEATURES, TIER_FEATURES, observation_bounds
from env.scale import reference_batch
from env.simulator import Cell, Simulator


def _table() -> str:
    lines = ["| Index | Name | Unit | Range | Meaning |", "| --- | --- | --- | --- | --- |"]
    for index, f in enumerate(GLOBAL_FEATURES):
        lines.append(
            f"| {index} | {f.name} | {f.unit} | {f.low:g} to {f.high:g} | {f.description} |"
        )
    for index, f in enumerate(TIER_FEATURES):
        at = f"{len(GLOBAL_FEATURES) + index} + {len(TIER_FEATURES)} k"
        lines.append(f"| {at} | {f.name} | {f.unit} | {f.low:g} to {f.high:g} | {f.description} |")
    return "\n".join(lines)


class GovernorEnv(gym.Env[NDArray[np.float32], np.int64]):
    """Choose the tier of every decode round of one simulated server.

    ## Action
    ``Discrete(K)``: the index of a tier in ``tiers`` (off first, then ascending draft steps).

    ## Observation
    ``Box`` of float32, clipped to the ranges below; ``k`` is the index of a tier.

    {observations}

    ## Reward
    Minus the integral of the requests in the system (running and queued) over the time from this
    decision to the next, in request-seconds. By Little's law the sum over an episode is minus the
    total time that requests spend in the system (less what passes before the first decision, which
    no controller can change). With ``slo_weight`` each request that finishes
    outside its SLO costs that many seconds more.

    ## Episode
    A closed loop is truncated after its number of output tokens; an open loop terminates when
    every request of its list is served. ``info["discount"]`` is the factor for what follows,
    ``exp(-tokens / horizon)``: the discount is per generated token.

    ## Reset
    ``reset(seed=...)`` fixes requests, acceptance and noise; without a seed each episode draws one
    from the env's generator.

    Args:
        cell: The server and its workload.
        horizon_tokens: Discount horizon in output tokens a request of the typical batch.
        slo_weight: See above.
        slo_ttft_s: Time to first token of the SLO.
        slo_tpot_s: Time per output token of the SLO.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  (Gymnasium reads it from the class)

    def __init__(
        self,
        cell: Cell,
        horizon_tokens: float = 256.0,
        slo_weight: float = 0.0,
        slo_ttft_s: float = 2.0,
        slo_tpot_s: float = 0.05,
    ) -> None:
        if not horizon_tokens > 0:
            raise ConfigError(f"horizon_tokens {horizon_tokens}: expected a positive number")
        self.cell = cell
        self.simulator = Simulator([cell], slo_weight, slo_ttft_s, slo_tpot_s)
        self.tiers = self.simulator.tiers
        self.horizon = horizon_tokens * reference_batch(cell)
        low, high = observation_bounds(len(self.tiers))
        self.observation_space = spaces.Box(
            np.array(low, np.float32), np.array(high, np.float32), dtype=np.float32
        )
        self.action_space = spaces.Discrete(len(self.tiers))
        self._observation = np.zeros((1, self.simulator.observation_size), np.float32)

    def _observe(self) -> NDArray[np.float32]:
        self.simulator.observe(self._observation)
        return self._observation[0].copy()

    def _info(self, tokens: int) -> dict[str, Any]:
        server = self.simulator.state.server[0]
        return {
            "tokens": tokens,
            "discount": float(np.exp(-tokens / self.horizon)),
            "now_s": float(server.now_s),
            "num_running": int(server.num_running),
            "num_waiting": int(server.num_waiting),
        }

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode; see the class."""
        super().reset(seed=seed)
        episode = seed if seed is not None else int(self.np_random.integers(2**31))
        self.simulator.reset([episode])
        return self._observe(), self._info(0)

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Run one decode round; see the class."""
        area, tokens = self.simulator.step(np.array([action], np.int64))
        over = bool(self.simulator.done[0])
        closed = self.cell.workload.is_closed
        return (
            self._observe(),
            -float(area[0]),
            over and not closed,
            over and closed,
            self._info(int(tokens[0])),
        )


if GovernorEnv.__doc__:
    GovernorEnv.__doc__ = GovernorEnv.__doc__.replace(
        "{observations}", _table().replace("\n", "\n    ")
    )
