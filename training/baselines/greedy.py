"""The cost-model greedy rule: most expected tokens for the calibrated cost of a round.

Expected tokens come from the running estimate of acceptance that the policy sees too. That is the
goodput rule of TurboSpec (arXiv:2406.14066), and what eagle-harness does with measured round times.
The plain rule (``env/greedy.py``) switches for any advantage and, once off, never looks again: its
estimate stands still. Here it can also keep its tier until another is better by a margin, and probe
for some rounds after a long stretch without speculation.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.features import GAIN_SCALE, NUM_GLOBAL, NUM_PER_TIER, TIER_FEATURES
from controller.memory import CURRENT_TIER, ROUNDS_SINCE_SPECULATION, ROUNDS_SINCE_SWITCH
from env.simulator import Simulator
from training.baselines.stepwise import Stepwise
from training.baselines.task import Task
from training.controllers import Controller

SCALES = ("fast", "medium", "slow")
MARGINS = (0.0, 0.01, 0.03)
PROBE_EVERY = (None, 64, 256, 1024)


@dataclass(frozen=True)
class Greedy(Stepwise):
    """The rule and its settings.

    Attributes:
        scale: Time scale of the accept-rate estimate: ``"fast"``, ``"medium"`` or ``"slow"``.
        margin: Least advantage for which it switches, ln(tokens/s).
        probe_every: Rounds without speculation after which it probes; None for never.
        probe_rounds: Rounds of a probe. The first one drafts on a stale state and tells nothing.
        name: Name in tables.
    """

    scale: str = "medium"
    margin: float = 0.0
    probe_every: int | None = None
    probe_rounds: int = 4
    name: str = "greedy"

    def start(self, simulator: Simulator) -> Any:
        """Return the array for observations."""
        return np.zeros((simulator.num_servers, simulator.observation_size), np.float32)

    def choose(self, simulator: Simulator, memory: Any, actions: NDArray[np.int64]) -> None:
        """Fill the tiers of the next round."""
        simulator.observe(memory)
        at = [feature.name for feature in TIER_FEATURES].index(f"gain_{self.scale}")
        gain = memory[:, NUM_GLOBAL + at :: NUM_PER_TIER]
        own = simulator.state.memory
        current = own[:, CURRENT_TIER].astype(np.int64)
        best = gain.argmax(axis=1)
        if self.margin > 0.0:
            ahead = -gain[np.arange(len(current)), current]
            best = np.where(ahead > GAIN_SCALE * self.margin, best, current)
        if self.probe_every is not None and simulator.num_tiers > 1:
            steps = simulator.costs.num_steps
            first = int(np.argmax(steps > 0))
            candidate = first + gain[:, first:].argmax(axis=1)
            due = own[:, ROUNDS_SINCE_SPECULATION] >= self.probe_every
            probing = (steps[current] > 0) & (
                own[:, ROUNDS_SINCE_SWITCH] + 1 < self.probe_rounds
            )
            due &= steps[current] == 0
            best = np.where(due, candidate, best)
            # A probe that has begun is carried through.
            best = np.where(probing & (steps[best] == 0), current, best)
        actions[:] = best


def make_greedy(task: Task) -> Controller:
    """The plain rule; nothing to tune."""
    return Greedy()


def make_tuned_greedy(task: Task) -> Controller:
    """The rule with margin, probes and time scale tuned."""
    name = "tuned greedy"
    grid = [
        Greedy(scale, margin, every, rounds, name)
        for scale in SCALES
        for margin in MARGINS
        for every in PROBE_EVERY
        for rounds in ((4,) if every is None else (3, 8))
    ]
    return task.best(grid)



