"""Run a controller round by round and keep what happened, for curves and maps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.errors import ConfigError
from env.compiled import kernel
from env.oracle import HOLDS, oracle_tier
from env.simulator import Cell, Simulator
from training.baselines.static import BatchTable
from training.baselines.stepwise import Stepwise
from training.controllers import BatchThreshold, Controller, LearnedPolicy, Oracle

Choose = Callable[[NDArray[np.int64]], None]
"""Fills the tiers of the next round of all servers."""


@kernel
def _choose_oracle(state, costs, ids, work, lost, actions):
    for e in range(actions.shape[0]):
        if not state.server[e].done:
            actions[e] = oracle_tier(state, costs, e, ids, work, lost)


def chooser(controller: Controller, simulator: Simulator) -> Choose:
    """Return a function that chooses as the controller does, one round at a time.

    Raises:
        ConfigError: If the controller cannot be run by rounds.
    """
    if isinstance(controller, Stepwise):
        memory = controller.start(simulator)
        return lambda actions: controller.choose(simulator, memory, actions)
    if isinstance(controller, LearnedPolicy):
        seen = np.zeros((simulator.num_servers, simulator.observation_size), np.float32)

        def decide(actions: NDArray[np.int64]) -> None:
            simulator.observe(seen)
            active = np.flatnonzero(~simulator.done)
            actions[active] = controller.policy.logits(seen[active]).argmax(axis=-1)

        return decide
    if isinstance(controller, Oracle):
        size = simulator.state.running.shape[1]
        space: Any = (np.empty(size, np.int64), np.empty((3, size)), np.empty(len(HOLDS)))
        return lambda actions: _choose_oracle(simulator.state, simulator.costs, *space, actions)
    width = simulator.state.running.shape[1]
    if isinstance(controller, BatchThreshold):
        table = np.where(np.arange(width) <= controller.threshold, controller.tier, 0)
    elif isinstance(controller, BatchTable):
        table = controller.tier_by_size(width)
    else:
        raise ConfigError(
            f"controller {controller.name!r} cannot be run round by round: derive it from "
            "training.baselines.stepwise.Stepwise"
        )

    def look_up(actions: NDArray[np.int64]) -> None:
        actions[:] = table[simulator.state.server.num_running]

    return look_up


@dataclass(frozen=True)
class Recording:
    """What happened, ``(rounds, num_servers)`` each; rounds after a server's end are NaN or -1.

    Attributes:
        start_s: When the round was launched.
        step_s: Its calibrated time.
        lost_s: Seconds that it lost, for each request in the system, against the best tier with a
            warm draft, given the true accept rates (``env/ideal.py``).
        accept_rate: Mean true accept rate of the batch.
        tier: What ran.
        running: Its rows.
        waiting: Queue at its launch.
        num_steps: ``(num_tiers,)`` draft steps of the tiers.
    """

    start_s: NDArray[np.float64]
    step_s: NDArray[np.float64]
    lost_s: NDArray[np.float64]
    accept_rate: NDArray[np.float64]
    tier: NDArray[np.int64]
    running: NDArray[np.int64]
    waiting: NDArray[np.int64]
    num_steps: NDArray[np.int64]


def record(
    controller: Controller, cells: Sequence[Cell], seeds: Sequence[int], rounds: int | None = None
) -> Recording:
    """Run each cell under each seed (cell-major) for a number of rounds, or to its end."""
    simulator = Simulator([cell for cell in controller.prepare(cells) for _ in seeds])
    simulator.reset([seed for _ in cells for seed in seeds])
    choose = chooser(controller, simulator)
    actions = np.zeros(simulator.num_servers, np.int64)
    costs, server = simulator.costs, simulator.state.server
    row = simulator.state.config.cost_row
    columns: dict[str, list[NDArray[Any]]] = {
        name: [] for name in Recording.__dataclass_fields__ if name != "num_steps"
    }
    while not simulator.done.all() and (rounds is None or len(columns["tier"]) < rounds):
        over = simulator.done.copy()
        choose(actions)
        running = np.array(server.num_running)
        in_system = np.maximum(np.array(server.num_in_system), 1)
        step_s = costs.base_s[row, actions, running]
        step_s = step_s + costs.context_s[row, actions] * server.context_tokens
        columns["start_s"].append(np.where(over, np.nan, server.now_s))
        columns["waiting"].append(np.where(over, -1, server.num_waiting))
        simulator.step(actions)
        warm = simulator.state.rates[:, 0]
        rows = np.arange(warm.shape[1]) < running[:, None]
        columns["step_s"].append(np.where(over, np.nan, step_s))
        columns["lost_s"].append(np.where(over, np.nan, simulator.lost_s / in_system))
        rate = np.where(rows, warm, 0.0).sum(axis=1) / np.maximum(running, 1)
        columns["accept_rate"].append(np.where(over, np.nan, rate))
        columns["tier"].append(np.where(over, -1, actions))
        columns["running"].append(np.where(over, -1, running))
    stacked = {name: np.array(values) for name, values in columns.items()}
    return Recording(num_steps=costs.num_steps.copy(), **stacked)
