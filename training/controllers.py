"""Everything that can run a simulated server to its end: baselines, the policy, references."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from controller.decision import REPEAT_BATCH, REPEAT_ROUNDS
from controller.memory import JUST_JOINED
from controller.policy import NumpyPolicy
from controller.tiers import NATIVE, OFF_KINDS
from env.acceptance_process import DraftRecovery
from env.deployment import Deployment, stack_costs
from env.oracle import run_bound, run_oracle
from env.simulator import Cell, Simulator


class Controller(Protocol):
    """Runs every server of a freshly reset simulator to the end of its episode."""

    @property
    def name(self) -> str:
        """Name in tables."""

    def prepare(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells that the controller runs on; a reference may lift a limit."""

    def run(self, simulator: Simulator) -> None:
        """Run all servers until they are done."""


@dataclass(frozen=True)
class BatchThreshold:
    """Speculate at one depth up to a batch size, and be off above it.

    Attributes:
        tier: Index of the tier to speculate with; 0 for never.
        threshold: Largest batch size that speculates.
        name: Name in tables.
    """

    tier: int
    threshold: int
    name: str

    def prepare(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells as they are."""
        return list(cells)

    def run(self, simulator: Simulator) -> None:
        """Run all servers until they are done."""
        width = simulator.state.running.shape[1]
        table = np.where(np.arange(width) <= self.threshold, self.tier, 0)
        simulator.run_tables(np.tile(table, (simulator.num_servers, 1)))


@dataclass(frozen=True)
class NativeServer:
    """A server that was started without speculation: native rounds, no draft to prefill."""

    name: str = "native always"

    def prepare(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells without speculation."""
        return with_deployments(cells, lambda deployment: replace(deployment, tiers=NATIVE))

    def run(self, simulator: Simulator) -> None:
        """Run all servers until they are done."""
        simulator.run_tables(np.zeros(simulator.state.running.shape, np.int64))


@dataclass(frozen=True)
class LearnedPolicy:
    """The policy of a checkpoint, deterministic, as the server runs it.

    With up to ``REPEAT_BATCH`` requests a decision may stand for some rounds there, and so here.

    Attributes:
        policy: The network.
        name: Name in tables.
        repeat_rounds: How many rounds, this one included.
    """

    policy: NumpyPolicy
    name: str = "policy"
    repeat_rounds: int = REPEAT_ROUNDS

    def prepare(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells as they are."""
        return list(cells)

    def run(self, simulator: Simulator) -> None:
        """Run all servers until they are done."""
        observations = np.zeros((simulator.num_servers, simulator.observation_size), np.float32)
        actions = np.zeros(simulator.num_servers, np.int64)
        left = np.zeros(simulator.num_servers, np.int64)
        rounds_same = np.zeros(simulator.num_servers, np.int64)
        decided_size = np.zeros(simulator.num_servers, np.int64)
        while True:
            if simulator.done.all():
                return
            simulator.observe(observations)
            size = simulator.state.server["num_running"]
            same = (size == decided_size) & (simulator.state.memory[:, JUST_JOINED] == 0.0)
            repeats = (left > 0) & same
            left[repeats] -= 1
            rounds_same += 1
            decides = np.flatnonzero(~simulator.done & ~repeats)
            if len(decides):
                chosen = self.policy.logits(observations[decides]).argmax(axis=-1)
                rounds_same[decides[chosen != actions[decides]]] = 0
                actions[decides] = chosen
                decided_size[decides] = size[decides]
                stands = (size[decides] <= REPEAT_BATCH) & (
                    rounds_same[decides] >= self.repeat_rounds
                )
                left[decides] = np.where(stands, self.repeat_rounds - 1, 0)
            simulator.step(actions)


@dataclass(frozen=True)
class Oracle:
    """The clairvoyant look-ahead of ``env/oracle.py``."""

    name: str = "oracle"

    def prepare(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells as they are."""
        return list(cells)

    def run(self, simulator: Simulator) -> None:
        """Run all servers until they are done."""
        run_oracle(simulator.state, simulator.costs)


@dataclass(frozen=True)
class Bound:
    """The best tier of every round with a draft that is always warm and off at its cheapest."""

    name: str = "bound"

    def prepare(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells with a draft that never goes stale."""
        warm = DraftRecovery(cold_start_share=1.0, worst_loss=0.0)
        return with_deployments(cells, lambda deployment: replace(deployment, recovery=warm))

    def run(self, simulator: Simulator) -> None:
        """Run all servers until they are done."""
        costs = simulator.costs
        deployments = list({id(c.deployment): c.deployment for c in simulator.cells}.values())
        if simulator.tiers[0].is_off:
            for row, deployment in enumerate(deployments):
                for kind in OFF_KINDS:
                    if kind not in deployment.calibration.tier_names:
                        continue
                    other = stack_costs([replace(deployment, tiers=kind)])
                    size = other.base_s.shape[2]
                    base_s = costs.base_s[row, 0, :size]
                    context_s = min(costs.context_s[row, 0], other.context_s[0, 0])
                    np.minimum(base_s, other.base_s[0, 0], out=base_s)
                    costs.context_s[row, 0] = context_s
        run_bound(simulator.state, costs)


def with_deployments(
    cells: Sequence[Cell], change: Callable[[Deployment], Deployment]
) -> list[Cell]:
    """Return the cells with changed deployments, one for each that they share."""
    changed = {id(cell.deployment): change(cell.deployment) for cell in cells}
    return [replace(cell, deployment=changed[id(cell.deployment)]) for cell in cells]


def fixed_controllers(tier_names: Sequence[str]) -> list[BatchThreshold]:
    """Return one controller a tier, which never leaves it."""
    return [
        BatchThreshold(k, 1_000_000, f"always {name}" if not name.isdecimal() else f"fixed {name}")
        for k, name in enumerate(tier_names)
    ]


def threshold_grid(tier_names: Sequence[str], max_running: int) -> list[BatchThreshold]:
    """Return every pair of a depth and a threshold that an operator could set.

    Thresholds are 0 and the powers of two and their midpoints up to ``max_running``.
    """
    thresholds = {max_running}
    size = 1
    while size < max_running:
        thresholds |= {size, min(size + size // 2, max_running)}
        size *= 2
    grid = [BatchThreshold(0, 0, "threshold 0")]
    for k, name in enumerate(tier_names):
        if name.isdecimal():
            grid += [
                BatchThreshold(k, t, f"threshold {t}, depth {name}") for t in sorted(thresholds)
            ]
    return grid
