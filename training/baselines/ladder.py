"""SGLang's adaptive ladder: what ``--speculative-adaptive`` does today.

Written after the behaviour of ``AdaptiveSpeculativeParams`` in SGLang 0.5.23
(``sglang/srt/speculative/adaptive_spec_params.py``, Apache-2.0); ``tests/engine`` runs both side by
side where SGLang is installed. Each range of batch sizes has a slot with candidate depths. A slot
averages the correct drafts a request (exponentially, rounds without drafts left out), and every
some rounds steps down while the average is at or under the depth below less a half, else up while
it is above its own depth less a half. From depth 0 the next evaluation always goes one step up.

Depths that the server has no tier for are left out of the slots; a slot left empty takes the
nearest depth. The average counts rows of finished requests too, and a result is known one decision
late under the overlap schedule, as in SGLang. Depth 0 runs as the server's own kind of off, which
is cheaper than SGLang's zero-step tier with its draft extension.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from controller.calibration import Calibration
from controller.errors import ConfigError
from controller.tiers import MAX_NUM_STEPS
from env.compiled import kernel
from env.deployment import Deployment
from env.server_loop import step_server
from env.simulator import Simulator
from training.baselines.feedback import HISTOGRAM, ROWS, Feedback, collect, new_feedback
from training.baselines.stepwise import Compiled
from training.baselines.task import Task
from training.controllers import Controller

# Columns of a slot's settings and of its state.
ALPHA, INTERVAL, WARMUP, DOWN, UP, CEILING = range(6)
AT, AVERAGE, COUNT = range(3)


@dataclass(frozen=True)
class Slot:
    """The settings of one range of batch sizes, from ``batch_size`` to the next slot.

    Attributes:
        batch_size: Smallest batch size.
        steps: Candidate depths, ascending; 0 is off.
        down: Added to the threshold for stepping down.
        up: Added to the threshold for stepping up.
        ceiling: If positive, no depth above this many times the average, except on the way up.
        alpha: Weight of a new round in the average.
        interval: Rounds from one evaluation to the next.
        warmup: Rounds before the first interval.
    """

    batch_size: int
    steps: tuple[int, ...]
    down: float = -0.25
    up: float = 0.0
    ceiling: float = 0.0
    alpha: float = 0.2
    interval: int = 5
    warmup: int = 10

    def __post_init__(self) -> None:
        ascending = list(self.steps) == sorted(set(self.steps))
        if not self.steps or not ascending or not 0 <= min(self.steps) <= MAX_NUM_STEPS:
            raise ConfigError(f"ladder slot {self.steps}: expected ascending depths of at least 0")
        if self.batch_size < 1 or self.interval < 1 or self.warmup < 0:
            raise ConfigError(f"{self}: expected batch size and interval of at least 1")


DEFAULT_LADDER = (
    Slot(1, (1, 3, 5, 7)),
    Slot(8, (0, 1, 3), down=0.0),
    Slot(32, (0, 1), down=0.0),
    Slot(64, (0,), down=0.0),
)
"""The default configuration of SGLang 0.5.20 to 0.5.23."""


@kernel
def moved(settings, steps, num_candidates, at, average):
    """Return the index that a drafting slot moves to: down as far as it must, else up as it may."""
    to = at
    while to > 0:
        below = steps[to - 1]
        threshold = (0.5 if below == 0 else below - 0.5) + settings[DOWN]
        if average > threshold:
            break
        to -= 1
    if to == at:
        while to < num_candidates - 1 and average > steps[to] - 0.5 + settings[UP]:
            to += 1
    if settings[CEILING] > 0:
        ceiling = max(1, math.ceil(average * settings[CEILING]))
        if steps[to] <= steps[at]:
            while to > 0 and steps[to] > ceiling:
                to -= 1
    return to


@kernel
def update_slot(settings, steps, num_candidates, slot, rows, correct):
    """Take in the result of a round; step the slot if an evaluation is due.

    Args:
        settings: ``(6,)``: alpha, interval, warm-up, down, up, ceiling.
        steps: ``(num_candidates,)`` or longer: candidate depths, ascending.
        num_candidates: How many there are.
        slot: ``(3,)``, changed: index of the depth, average of correct drafts, rounds.
        rows: Requests of the round.
        correct: Their correct drafts, summed.
    """
    if rows == 0:
        return
    at = np.int64(slot[AT])
    if steps[at] > 0:
        # One product and one sum each, in this order: bit for bit what Python computes.
        slot[AVERAGE] = (1 - settings[ALPHA]) * slot[AVERAGE] + settings[ALPHA] * (correct / rows)
    slot[COUNT] += 1
    late = slot[COUNT] - settings[WARMUP]
    if late <= 0 or late % settings[INTERVAL] != 0:
        return
    if steps[at] > 0:
        slot[AT] = moved(settings, steps, num_candidates, at, slot[AVERAGE])
        return
    to = min(at + 1, num_candidates - 1)
    if steps[to] > 0 and slot[AVERAGE] < 0:
        slot[AVERAGE] = steps[to] - 1
    slot[AT] = to


class Memory(NamedTuple):
    """What the ladders of all servers remember, and their settings.

    Attributes:
        settings: ``(num_slots, 6)``, see :func:`update_slot`.
        steps: ``(num_slots, most candidates)`` depths.
        num_candidates: ``(num_slots,)``.
        slot_of: ``(num_servers, max_running + 1)`` slot by batch size.
        tier_of: ``(MAX_NUM_STEPS + 1,)`` tier by depth.
        slots: ``(num_servers, num_slots, 3)`` state of the slots.
        feedback: Results.
    """

    settings: NDArray[np.float64]
    steps: NDArray[np.int64]
    num_candidates: NDArray[np.int64]
    slot_of: NDArray[np.int64]
    tier_of: NDArray[np.int64]
    slots: NDArray[np.float64]
    feedback: Feedback


@kernel
def ladder_tier(state, e, memory):
    """Give the new results of a server to their slots, then choose by batch size."""
    known = memory.feedback.known[e]
    slot_of = memory.slot_of[e]
    for i in range(collect(state, e, memory.feedback.held[e], known)):
        rows = known[i, ROWS]
        correct = 0
        for count in range(MAX_NUM_STEPS + 1):
            correct += count * known[i, HISTOGRAM + count]
        s = slot_of[rows]
        update_slot(
            memory.settings[s],
            memory.steps[s],
            memory.num_candidates[s],
            memory.slots[e, s],
            rows,
            correct,
        )
    s = slot_of[max(state.server[e].num_running, 1)]
    return memory.tier_of[memory.steps[s, np.int64(memory.slots[e, s, AT])]]


@kernel
def choose_ladder(state, costs, memory, actions):
    """Choose once on every server that is not done."""
    for e in range(actions.shape[0]):
        if not state.server[e].done:
            actions[e] = ladder_tier(state, e, memory)


@kernel
def run_ladder(state, costs, memory):
    """Run every server to its end."""
    for e in range(memory.slots.shape[0]):
        while not state.server[e].done:
            step_server(state, costs, e, ladder_tier(state, e, memory))


class SlotTable:
    """Slots as arrays, for the kernel.

    Args:
        slots: Ascending by batch size.
        initial_steps: Depth that the server starts with.

    Attributes:
        settings: ``(num_slots, 6)``.
        steps: ``(num_slots, most candidates)``.
        num_candidates: ``(num_slots,)``.
        first: ``(num_slots, 3)`` state at the start.
    """

    def __init__(self, slots: Sequence[Slot], initial_steps: int) -> None:
        self.sizes = np.array([slot.batch_size for slot in slots])
        if (np.diff(self.sizes) <= 0).any():
            raise ConfigError(f"ladder slots {self.sizes.tolist()}: expected ascending sizes")
        self.settings = np.array(
            [[s.alpha, s.interval, s.warmup, s.down, s.up, s.ceiling] for s in slots], float
        )
        self.num_candidates = np.array([len(slot.steps) for slot in slots])
        self.steps = np.zeros((len(slots), self.num_candidates.max()), np.int64)
        self.first = np.zeros((len(slots), 3))
        for i, slot in enumerate(slots):
            self.steps[i, : len(slot.steps)] = slot.steps
            at = len(slot.steps) // 2
            if initial_steps in slot.steps:
                at = slot.steps.index(initial_steps)
            self.first[i, AT] = at
            self.first[i, AVERAGE] = slot.steps[at] - 1

    def slot_of(self, batch_size: int, calibration: Calibration | None = None) -> int:
        """Return the index of the slot of a batch, padded to a captured size if there are any."""
        padded = batch_size if calibration is None else calibration.padded(batch_size)
        return max(int(np.searchsorted(self.sizes, padded, side="right")) - 1, 0)


def fitted_slots(slots: Sequence[Slot], num_steps: Sequence[int]) -> tuple[Slot, ...]:
    """Return the slots with those depths only that the server has tiers for."""
    fitted = []
    for slot in slots:
        kept = tuple(depth for depth in slot.steps if depth in num_steps)
        if not kept:
            kept = (min(num_steps, key=lambda depth: (abs(depth - slot.steps[0]), depth)),)
        fitted.append(replace(slot, steps=kept))
    return tuple(fitted)


@dataclass(frozen=True)
class Ladder(Compiled):
    """The ladder with a configuration.

    Attributes:
        slots: Its slots.
        name: Name in tables.
    """

    slots: tuple[Slot, ...] = DEFAULT_LADDER
    name: str = "sglang ladder"
    choose_kernel = choose_ladder
    run_kernel = run_ladder

    def start(self, simulator: Simulator) -> Any:
        """Return slots in their first state on all servers."""
        num_steps = simulator.costs.num_steps.tolist()
        initial = int(simulator.costs.num_steps[simulator.cells[0].deployment.initial_tier])
        table = SlotTable(fitted_slots(self.slots, num_steps), initial)
        width = simulator.state.running.shape[1]
        rows: dict[int, NDArray[np.int64]] = {}
        for cell in simulator.cells:
            if id(cell.deployment) not in rows:
                rows[id(cell.deployment)] = _route(table, cell.deployment, width)
        tier_of = np.zeros(MAX_NUM_STEPS + 1, np.int64)
        for tier, depth in enumerate(num_steps):
            tier_of[depth] = tier
        return Memory(
            table.settings,
            table.steps,
            table.num_candidates,
            np.stack([rows[id(cell.deployment)] for cell in simulator.cells]),
            tier_of,
            np.tile(table.first, (simulator.num_servers, 1, 1)),
            new_feedback(simulator.num_servers),
        )


def _route(table: SlotTable, deployment: Deployment, width: int) -> NDArray[np.int64]:
    sizes = [table.slot_of(max(size, 1), deployment.calibration) for size in range(width)]
    return np.array(sizes, np.int64)


def make_default_ladder(task: Task) -> Controller:
    """SGLang's ladder with its default configuration."""
    return Ladder()


LADDERS = ((0,), (0, 1), (0, 1, 3), (0, 1, 3, 5, 7), (1, 2, 3), (1, 3, 5, 7), (2, 3, 5), (3,), (7,))
"""Candidate depths that tuning tries in each slot."""
SLOT_SIZES = (1, 8, 32, 64, 128)


def make_tuned_ladder(task: Task) -> Controller:
    """SGLang's ladder with thresholds, time scale and candidates tuned, one after the other."""
    limit = task.deployment.max_running_requests
    name = "tuned ladder"
    sizes = [size for size in SLOT_SIZES if size <= limit]
    start = [replace(DEFAULT_LADDER[min(i, 3)], batch_size=b) for i, b in enumerate(sizes)]
    best = Ladder(tuple(start), name)
    best_score = task.score(best)

    def attempt(candidate: Ladder) -> None:
        nonlocal best, best_score
        score = task.score(candidate)
        if score > best_score:
            best, best_score = candidate, score

    for i in reversed(range(len(sizes))):
        seen = {fitted_slots(best.slots, task.num_steps)[i].steps}
        for steps in LADDERS:
            slot = replace(best.slots[i], steps=steps)
            fitted = fitted_slots([slot], task.num_steps)[0].steps
            if fitted not in seen:
                seen.add(fitted)
                attempt(Ladder((*best.slots[:i], slot, *best.slots[i + 1 :]), name))
    changes: tuple[dict[str, Any], ...] = (
        *({"alpha": alpha} for alpha in (0.05, 0.1, 0.5)),
        *({"interval": interval} for interval in (1, 20)),
        *({"down": down, "up": up} for down in (-0.5, 0.0, 0.25) for up in (-0.25, 0.0, 0.25)),
        *({"ceiling": ceiling} for ceiling in (1.5, 2.0)),
    )
    for change in changes:
        attempt(Ladder(tuple(replace(slot, **change) for slot in best.slots), name))
    return best
