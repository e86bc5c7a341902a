"""The cost-model greedy rule: most expected tokens for the calibrated cost of a round.

Expected tokens come from the running estimate of acceptance that the policy sees too. That is the
goodput rule of TurboSpec (arXiv:2406.14066), and what eagle-harness does with measured round times.
The plain rule (``env/greedy.py``) switches for any advantage and, once off, never looks again: its
estimate stands still. Here it can also keep its tier until another is better by a margin, and probe
for some rounds after a long stretch without speculation.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from controller.features import (
    GAIN_SCALE,
    NUM_GLOBAL,
    NUM_PER_TIER,
    SCRATCH_SIZE,
    TIER_FEATURES,
)
from controller.memory import CURRENT_TIER, ROUNDS_SINCE_SPECULATION, ROUNDS_SINCE_SWITCH
from env.compiled import kernel
from env.server_loop import observe_server, step_server
from env.simulator import Simulator
from training.baselines.stepwise import Compiled
from training.baselines.task import Task
from training.controllers import Controller

SCALES = ("fast", "medium", "slow")
MARGINS = (0.0, 0.01, 0.03)
PROBE_EVERY = (None, 64, 256, 1024)


class Memory(NamedTuple):
    """The settings of the rule; what it remembers is in the servers' own memory.

    Attributes:
        first_gain: ``(1,)`` index in an observation of the first tier's gain at the time scale.
        margin: ``(1,)`` least advantage for a switch, in the unit of the gains.
        probe: ``(2,)`` rounds without speculation before a probe (0: never), rounds of a probe.
        observation_size: ``(1,)``.
    """

    first_gain: NDArray[np.int64]
    margin: NDArray[np.float64]
    probe: NDArray[np.int64]
    observation_size: NDArray[np.int64]


@kernel
def greedy_choice(gains, num_steps, memory, margin, probe_every, probe_rounds):
    """Return the tier of the rule.

    Args:
        gains: ``(num_tiers,)`` ln(tokens/s) behind the best tier's, times a constant: 0 at best.
        num_steps: ``(num_tiers,)`` draft steps.
        memory: Memory of the server, see ``controller.memory``.
        margin: Least advantage for a switch, in the unit of the gains.
        probe_every: Rounds without speculation before a probe; 0 for never.
        probe_rounds: Rounds that a stretch of speculation lasts at least, if there are probes.
    """
    num_tiers = gains.shape[0]
    best = 0
    for k in range(1, num_tiers):
        if gains[k] > gains[best]:
            best = k
    current = np.int64(memory[CURRENT_TIER])
    if margin > 0.0 and gains[best] - gains[current] <= margin:
        best = current
    if probe_every == 0 or num_steps[best] > 0:
        return best
    if num_steps[current] > 0:
        return current if memory[ROUNDS_SINCE_SWITCH] + 1 < probe_rounds else best
    if memory[ROUNDS_SINCE_SPECULATION] >= probe_every:
        for k in range(num_tiers):
            if num_steps[k] > 0 and (num_steps[best] == 0 or gains[k] > gains[best]):
                best = k
    return best


@kernel
def greedy_tier(state, costs, e, memory, observation, gains, step_s, scratch):
    """Observe a server and return the tier of the rule."""
    observe_server(state, costs, e, observation, step_s, scratch)
    for k in range(gains.shape[0]):
        gains[k] = observation[memory.first_gain[0] + k * NUM_PER_TIER]
    return greedy_choice(
        gains,
        costs.num_steps,
        state.memory[e],
        memory.margin[0],
        memory.probe[0],
        memory.probe[1],
    )


@kernel
def choose_greedy(state, costs, memory, actions):
    """Choose once on every server that is not done."""
    num_tiers = costs.num_steps.shape[0]
    observation = np.empty(memory.observation_size[0], np.float32)
    gains, step_s = np.empty(num_tiers), np.empty(num_tiers)
    scratch = np.empty(SCRATCH_SIZE)
    for e in range(actions.shape[0]):
        if not state.server[e].done:
            actions[e] = greedy_tier(state, costs, e, memory, observation, gains, step_s, scratch)


@kernel
def run_greedy(state, costs, memory):
    """Run every server to its end."""
    num_tiers = costs.num_steps.shape[0]
    observation = np.empty(memory.observation_size[0], np.float32)
    gains, step_s = np.empty(num_tiers), np.empty(num_tiers)
    scratch = np.empty(SCRATCH_SIZE)
    for e in range(state.server.shape[0]):
        while not state.server[e].done:
            tier = greedy_tier(state, costs, e, memory, observation, gains, step_s, scratch)
            step_server(state, costs, e, tier)


@dataclass(frozen=True)
class Greedy(Compiled):
    """The rule and its settings.

    Attributes:
        scale: Time scale of the accept-rate estimate: ``"fast"``, ``"medium"`` or ``"slow"``.
        margin: Advantage that a switch must exceed, ln(tokens/s).
        probe_every: Rounds without speculation after which it probes; None for never.
        probe_rounds: With probes, rounds that a stretch of speculation lasts at least. The first
            one drafts on a stale state and tells nothing.
        name: Name in tables.
    """

    scale: str = "medium"
    margin: float = 0.0
    probe_every: int | None = None
    probe_rounds: int = 4
    name: str = "greedy"
    choose_kernel = choose_greedy
    run_kernel = run_greedy

    def start(self, simulator: Simulator) -> Any:
        """Return the settings as arrays."""
        at = [feature.name for feature in TIER_FEATURES].index(f"gain_{self.scale}")
        return Memory(
            np.array([NUM_GLOBAL + at]),
            np.array([GAIN_SCALE * self.margin]),
            np.array([self.probe_every or 0, self.probe_rounds]),
            np.array([simulator.observation_size]),
        )


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
