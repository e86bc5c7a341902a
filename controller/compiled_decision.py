"""The decision path, compiled with Numba: what a server runs if Numba is installed.

The same functions as without it (``controller.features``, ``memory``, ``acceptance``), over arrays
instead of lists, and the network of ``controller.policy`` as loops: at these sizes most of the time
of a NumPy call is the call. The sums run in another order than BLAS has, so logits agree to some
1e-15 only; all ranks of one server therefore decide by the same path.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.extending import register_jitable

from controller.acceptance import NUM_COUNTS
from controller.compiled import HERE, cache_folder, compile_kernel
from controller.decision import checked_rows
from controller.features import (
    NUM_GLOBAL,
    NUM_PER_TIER,
    SCRATCH_SIZE,
    digest_evidence,
    fill_digested,
    observation_size,
)
from controller.memory import (
    NUM_MEMORY,
    record_join,
    record_launch,
    record_result,
    reset_memory,
)
from controller.policy import NumpyPolicy
from controller.tiers import MAX_NUM_STEPS

Array = Any
"""A NumPy array; Numba looks at its type, and the controller's functions are typed for lists."""
NOT_FINITE = -1
"""What the decision kernel returns if an entry of the observation is not finite."""
NUM_SETTINGS = 4
"""Settings before the tiers' draft steps."""
MAX_EVENTS = 64
"""Launches and results that may wait for the next decision."""
RESULT = 1 << 17
"""Bit of an event that is a result and no launch.

An event is ``tier | num_steps << 8 | flag << 16 | rows << 18``: one number, since each one that is
handed over costs time. The flag says whether a launch kept the draft warm, or whether a result
began cold. The correct drafts of a result with one row are in the bits from ``CORRECT`` on, others
in an array.
"""
CORRECT = 48


@register_jitable
def _parts(state: Array, num_tiers: int) -> tuple[Array, ...]:
    """Return memory, tries, successes, recent, ages, digest, histogram, step_s, costs."""
    tries = NUM_MEMORY
    successes = tries + NUM_COUNTS
    recent = successes + NUM_COUNTS
    ages = recent + num_tiers
    digest = ages + num_tiers
    histogram = digest + SCRATCH_SIZE
    step_s = histogram + MAX_NUM_STEPS + 1
    costs = step_s + num_tiers
    return (
        state[:tries],
        state[tries:successes],
        state[successes:recent],
        state[recent:ages],
        state[ages:digest],
        state[digest:histogram],
        state[histogram:step_s],
        state[step_s:costs],
        state[costs:],
    )


@register_jitable
def _record(num_events: int, correct: Array, settings: Array, state: Array) -> None:
    """Record the events in their order; the arguments are those of :func:`_decide`."""
    num_tiers = settings[3]
    num_steps = settings[NUM_SETTINGS : NUM_SETTINGS + num_tiers]
    memory, tries, successes, recent, ages, digest, histogram, _, _ = _parts(state, num_tiers)
    first_row = 0
    has_result = False
    for index in range(num_events):
        event = settings[NUM_SETTINGS + num_tiers + index]
        tier, steps, flag = event & 255, event >> 8 & 255, event >> 16 & 1 > 0
        rows = event >> 18 & 0x3FFFFFFF
        if event & RESULT == 0:
            record_launch(memory, ages, recent, tier, steps, flag, rows)
            continue
        has_result = True
        histogram[:] = 0.0
        if rows == 1:
            histogram[event >> CORRECT] = 1.0
        else:
            for row in range(first_row, first_row + rows):
                histogram[correct[row]] += 1.0
            first_row += rows
        record_result(tries, successes, recent, tier, steps, flag, histogram)
    if has_result:
        digest_evidence(digest, tries, successes, recent, num_steps)


@register_jitable
def _second_layer(h: Array, z: Array, weight: Array, bias: Array, logit_weight: Array) -> float:
    """Return what the second hidden layer adds to a logit; ``h`` before its relu, ``z`` work."""
    second = len(z)
    z[:] = bias
    for i in range(len(h)):
        x = h[i]
        if x > 0.0:
            for j in range(second):
                z[j] += x * weight[i, j]
    logit = 0.0
    for j in range(second):
        if z[j] > 0.0:
            logit += z[j] * logit_weight[j]
    return logit


@register_jitable
def _best_tier(observation: Array, network: Array, num_tiers: int, hidden: int, second: int) -> int:
    """Return the tier with the highest logit; the arguments are those of :func:`_decide`."""
    num_global = NUM_GLOBAL
    num_per_tier = NUM_PER_TIER
    if not math.isfinite(np.abs(observation).sum()):
        return NOT_FINITE
    shared = network[:hidden]
    h = network[hidden : 2 * hidden]
    z = network[2 * hidden : 2 * hidden + second]
    weights = network[2 * hidden + second :]
    at = (num_global + 1) * hidden
    global_weight = weights[:at].reshape(num_global + 1, hidden)
    tier_weight = weights[at : at + num_per_tier * hidden].reshape(num_per_tier, hidden)
    at += num_per_tier * hidden
    second_weight = weights[at : at + hidden * second].reshape(hidden, second)
    at += hidden * second
    second_bias = weights[at : at + second]
    logit_weight = weights[at + second : at + 2 * second]
    skip_weight = weights[at + 2 * second :]
    # The inner loops run over neurons, not inputs: they need no reordering to use vector units.
    shared[:] = global_weight[num_global]
    for i in range(num_global):
        x = float(observation[i])
        for j in range(hidden):
            shared[j] += x * global_weight[i, j]
    best = 0
    best_logit = -np.inf
    for k in range(num_tiers):
        start = num_global + k * num_per_tier
        logit = 0.0
        h[:] = shared
        for i in range(num_per_tier):
            x = float(observation[start + i])
            logit += x * skip_weight[i]
            for j in range(hidden):
                h[j] += x * tier_weight[i, j]
        logit += _second_layer(h, z, second_weight, second_bias, logit_weight)
        if logit > best_logit:
            best_logit = logit
            best = k
    return best


def _decide(
    batch_size: int,
    queue_depth: int,
    context_tokens: int,
    kv_use: float,
    num_events: int,
    correct: Array,
    settings: Array,
    state: Array,
    observation: Array,
    network: Array,
) -> int:
    """Record what happened since the last decision, then fill the observation and choose.

    Few arguments hold everything: each one that is handed over costs time, and more so in a server
    whose other work has emptied the caches.

    Args:
        batch_size: As :func:`controller.features.fill_observation` takes it, like the next three.
        queue_depth: The same.
        context_tokens: The same.
        kv_use: The same.
        num_events: Launches and results since the last decision.
        correct: Correct drafts of the rows of these results, one after the other; uint8.
        settings: Largest batch, widths of the two hidden layers, K, ``(K,)`` draft steps, events;
            int64.
        state: Parts as :func:`_parts` lays them out; float64. Costs are ``(largest batch + 2, K)``
            seconds by batch size, the last row seconds a context token, then the fixed seconds of
            a prefill batch.
        observation: ``(observation_size(K),)``, filled; float32, as in training.
        network: Work space for the hidden layers, then global weights and first bias
            ``(num_global + 1, hidden)``, tier weights ``(num_per_tier, hidden)``, second weights
            ``(hidden, second)``, second bias, logit weights, skip weights; float64, so that what
            two kinds of CPU round differently is too small to part ranks.

    Returns:
        The best tier, the first if some tie, or ``NOT_FINITE``.
    """
    _record(num_events, correct, settings, state)
    limit = settings[0]
    num_tiers = settings[3]
    num_steps = settings[NUM_SETTINGS : NUM_SETTINGS + num_tiers]
    memory, _, _, _, ages, digest, _, step_s, costs = _parts(state, num_tiers)
    row = min(batch_size, limit) * num_tiers
    slopes = (limit + 1) * num_tiers
    for k in range(num_tiers):
        step_s[k] = costs[row + k] + costs[slopes + k] * context_tokens
    fill_digested(
        observation,
        batch_size,
        queue_depth,
        context_tokens,
        kv_use,
        limit,
        memory,
        ages,
        num_steps,
        step_s,
        costs[slopes + num_tiers],
        digest,
    )
    return _best_tier(observation, network, num_tiers, settings[1], settings[2])


def _update(
    num_events: int,
    num_joined: int,
    batch_size: int,
    correct: Array,
    settings: Array,
    state: Array,
) -> None:
    """Record the events, and then that requests joined, if their number is positive."""
    _record(num_events, correct, settings, state)
    if num_joined > 0:
        num_steps = settings[NUM_SETTINGS : NUM_SETTINGS + settings[3]]
        memory, tries, successes, recent, _, digest, _, _, _ = _parts(state, len(num_steps))
        record_join(memory, tries, successes, num_joined, batch_size)
        digest_evidence(digest, tries, successes, recent, num_steps)


_CACHE = cache_folder(HERE, (HERE,))
_decide_kernel = compile_kernel(_decide, _CACHE)
_update_kernel = compile_kernel(_update, _CACHE)


class CompiledDecision:
    """Memory and network of one server; the counterpart of ``controller.decision.ListDecision``.

    A call of compiled code costs more than what it computes, above all in a server whose other work
    has emptied the caches. So launches and results are only noted, and the next decision records
    them: one call a decision.
    """

    def __init__(
        self,
        policy: NumpyPolicy,
        num_steps: Sequence[int],
        base_s: Array,
        context_s: Array,
        prefill_s: float,
        max_running_requests: int,
        current_tier: int,
    ) -> None:
        """Lay the weights out, forget everything, and compile, which takes some seconds once.

        The arguments are those of ``controller.decision.ListDecision``.
        """
        parameters = policy.parameters
        num_tiers = len(num_steps)
        hidden, second = policy.hidden_sizes
        weights = (
            parameters["global.weight"].T,
            parameters["hidden.bias"],
            parameters["tier.weight"].T,
            parameters["second.weight"].T,
            parameters["second.bias"],
            parameters["logit.weight"],
            parameters["skip.weight"],
        )
        self._policy = policy
        self._num_tiers = num_tiers
        self._num_steps: Array = np.array(num_steps, np.int64)
        numbers = (max_running_requests, hidden, second, num_tiers, *num_steps)
        self._settings: Array = np.array((*numbers, *[0] * MAX_EVENTS), np.int64)
        self._events = memoryview(self._settings[len(numbers) :].data)
        self._num_events = 0
        size = NUM_MEMORY + 2 * NUM_COUNTS + 2 * num_tiers + SCRATCH_SIZE
        self._state: Array = np.concatenate(
            (
                np.zeros(size + MAX_NUM_STEPS + 1 + num_tiers),
                np.ravel(base_s),
                np.ravel(context_s),
                (prefill_s,),
            )
        )
        self._observation: Array = np.zeros(observation_size(num_tiers), np.float32)
        work = np.zeros(2 * hidden + second)
        self._network: Array = np.concatenate(
            [work, *(np.ravel(weight) for weight in weights)], dtype=np.float64
        )
        self._correct: Array = np.zeros(2 * max_running_requests + 1, np.uint8)
        self._correct_bytes = memoryview(self._correct.data)
        self._num_rows = 0
        self._stale = False
        self._reset(current_tier)
        self._rehearse()
        self._reset(current_tier)

    def _reset(self, current_tier: int) -> None:
        memory, tries, successes, recent, ages, digest, *_ = _parts(self._state, self._num_tiers)
        reset_memory(memory, tries, successes, recent, ages, current_tier)
        digest_evidence(digest, tries, successes, recent, self._num_steps)
        self._num_events = self._num_rows = 0
        self._stale = False

    def _rehearse(self) -> None:
        """Call everything once, so that no request waits for a compiler."""
        tier = self.choose(1, 0, 1, 0.0)
        self.joined(1, 1)
        steps = int(self._num_steps[tier])
        self.launched(tier, steps, True, 1)
        self.result(tier, steps, False, b"\0")
        self.choose(1, 0, 1, 0.0)

    @property
    def accept_len(self) -> Array:
        """Estimated accept length by scale and depth; see :mod:`controller.acceptance`."""
        self._update()
        return _parts(self._state, self._num_tiers)[5]

    @property
    def recent_accept_len(self) -> Array:
        """``(K,)`` mean accept length of each tier's recent rounds; 1 for a tier never run."""
        self._update()
        return _parts(self._state, self._num_tiers)[3]

    def choose(self, batch_size: int, queue_depth: int, context_tokens: int, kv_use: float) -> int:
        """Return the policy's tier for the next round.

        Raises:
            SpecGovernorError: If an entry of the observation is not finite.
        """
        tier: int = _decide_kernel(
            batch_size,
            queue_depth,
            context_tokens,
            kv_use,
            self._num_events,
            self._correct,
            self._settings,
            self._state,
            self._observation,
            self._network,
        )
        self._num_events = self._num_rows = 0
        if tier == NOT_FINITE:
            return self._policy.choose(self._observation)  # Names the entry in its error.
        return tier

    def joined(self, num_joined: int, batch_size: int) -> None:
        """Note that requests were prefilled into what is now a batch of ``batch_size``."""
        self._update(num_joined, batch_size)

    def _update(self, num_joined: int = 0, batch_size: int = 0) -> None:
        """Record what was noted, and then that requests joined, if any did."""
        if self._num_events == 0 and num_joined == 0:
            return
        _update_kernel(
            self._num_events, num_joined, batch_size, self._correct, self._settings, self._state
        )
        self._num_events = self._num_rows = 0

    def launched(self, tier: int, num_steps: int, keeps_warm: bool, batch_size: int) -> bool:
        """Note the round that runs now; return whether it drafts on a stale draft state."""
        if self._num_events == MAX_EVENTS:  # No decision came for long.
            self._update()
        self._events[self._num_events] = tier | num_steps << 8 | keeps_warm << 16 | batch_size << 18
        self._num_events += 1
        # As `record_launch` will find it: what it remembers is of launches that may be noted only.
        cold_start = self._stale and num_steps > 0
        self._stale = num_steps == 0 and not keeps_warm
        return cold_start

    def result(
        self, tier: int, num_steps: int, cold_start: bool, num_correct: Sequence[int]
    ) -> None:
        """Note the result of a round; see ``controller.decision.ListDecision``."""
        if num_steps > MAX_NUM_STEPS:
            return
        if self._num_events == MAX_EVENTS:
            self._update()
        rows = len(num_correct)
        event = RESULT | tier | num_steps << 8 | cold_start << 16 | rows << 18
        if rows == 1 and 0 <= num_correct[0] <= num_steps:
            event |= num_correct[0] << CORRECT
        else:
            self._note_rows(checked_rows(num_correct, num_steps))
        self._events[self._num_events] = event
        self._num_events += 1

    def _note_rows(self, rows: bytes) -> None:
        end = self._num_rows + len(rows)
        if end > len(self._correct):
            self._update()
            end = len(rows)
        if end > len(self._correct):
            self._correct = np.zeros(end, np.uint8)
            self._correct_bytes = memoryview(self._correct.data)
        self._correct_bytes[self._num_rows : end] = rows
        self._num_rows = end
