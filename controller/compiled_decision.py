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
NO_LAUNCH = (-1, 0, False, 0)
NOT_FINITE = -1
"""What the decision kernel returns if an entry of the observation is not finite."""


@register_jitable
def _parts(state: Array, num_tiers: int) -> tuple[Array, ...]:
    """Return the parts of the state: memory, tries, successes, recent, ages, digest, work space."""
    tries = NUM_MEMORY
    successes = tries + NUM_COUNTS
    recent = successes + NUM_COUNTS
    ages = recent + num_tiers
    digest = ages + num_tiers
    work = digest + SCRATCH_SIZE
    return (
        state[:tries],
        state[tries:successes],
        state[successes:recent],
        state[recent:ages],
        state[ages:digest],
        state[digest:work],
        state[work:],
    )


@register_jitable
def _launch(
    state: Array, num_tiers: int, tier: int, steps: int, keeps_draft_warm: bool, batch_size: int
) -> None:
    """Record a launch, unless the tier is negative: then there is none to record."""
    if tier >= 0:
        memory, _, _, recent, ages, _, _ = _parts(state, num_tiers)
        record_launch(memory, ages, recent, tier, steps, keeps_draft_warm, batch_size)


@register_jitable
def _second_layer(h: Array, z: Array, second_weight: Array, vectors: Array) -> float:
    """Return what the second hidden layer adds to a logit; ``h`` before its relu, ``z`` work."""
    second = len(z)
    z[:] = vectors[:second]
    for i in range(len(h)):
        x = h[i]
        if x > 0.0:
            for j in range(second):
                z[j] += x * second_weight[i, j]
    logit = 0.0
    for j in range(second):
        if z[j] > 0.0:
            logit += z[j] * vectors[second + j]
    return logit


@register_jitable
def _best_tier(
    observation: Array, num_tiers: int, weights: Array, hidden: int, second: int, work: Array
) -> int:
    """Return the tier with the highest logit; the arguments are those of :func:`_decide`."""
    num_global = NUM_GLOBAL
    num_per_tier = NUM_PER_TIER
    if not math.isfinite(np.abs(observation).sum()):
        return NOT_FINITE
    at = (num_global + 1) * hidden
    global_weight = weights[:at].reshape(num_global + 1, hidden)
    tier_weight = weights[at : at + num_per_tier * hidden].reshape(num_per_tier, hidden)
    at += num_per_tier * hidden
    second_weight = weights[at : at + hidden * second].reshape(hidden, second)
    vectors = weights[at + hidden * second :]
    shared = work[num_tiers : num_tiers + hidden]
    h = work[num_tiers + hidden : num_tiers + 2 * hidden]
    z = work[num_tiers + 2 * hidden :]
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
            logit += x * vectors[2 * second + i]
            for j in range(hidden):
                h[j] += x * tier_weight[i, j]
        logit += _second_layer(h, z, second_weight, vectors)
        if logit > best_logit:
            best_logit = logit
            best = k
    return best


def _decide(
    batch_size: int,
    queue_depth: int,
    context_tokens: int,
    kv_use: float,
    launched_tier: int,
    launched_steps: int,
    launched_warm: bool,
    launched_batch: int,
    max_running_requests: int,
    prefill_s: float,
    costs: Array,
    num_steps: Array,
    state: Array,
    observation: Array,
    weights: Array,
    hidden: int,
    second: int,
) -> int:
    """Fill the observation and return the best tier, the first if some tie.

    Few arrays hold everything: each one that is handed over costs time, and more so in a server
    whose other work has emptied the caches.

    Args:
        batch_size: As :func:`controller.features.fill_observation` takes it, like the next four.
        queue_depth: The same.
        context_tokens: The same.
        kv_use: The same.
        launched_tier: See :func:`_launch`, like the next three.
        launched_steps: The same.
        launched_warm: The same.
        launched_batch: The same.
        max_running_requests: The same.
        prefill_s: The same.
        costs: ``(max_running_requests + 2, K)`` seconds by batch size; the last row is seconds a
            context token.
        num_steps: ``(K,)``.
        state: Parts as :func:`_parts` lays them out.
        observation: ``(observation_size(K),)``, filled; float32, as in training.
        weights: Global weights and first bias ``(num_global + 1, hidden)``, tier weights
            ``(num_per_tier, hidden)``, second weights ``(hidden, second)``, second bias, logit
            weights, skip weights, one after the other.
        hidden: Width of the first hidden layer.
        second: Width of the second.

    Returns:
        The tier, or ``NOT_FINITE``.
    """
    num_tiers = len(num_steps)
    _launch(state, num_tiers, launched_tier, launched_steps, launched_warm, launched_batch)
    memory, _, _, _, ages, digest, work = _parts(state, num_tiers)
    step_s = work[:num_tiers]
    row = costs[min(batch_size, max_running_requests)]
    slopes = costs[max_running_requests + 1]
    for k in range(num_tiers):
        step_s[k] = row[k] + slopes[k] * context_tokens
    fill_digested(
        observation,
        batch_size,
        queue_depth,
        context_tokens,
        kv_use,
        max_running_requests,
        memory,
        ages,
        num_steps,
        step_s,
        prefill_s,
        digest,
    )
    return _best_tier(observation, num_tiers, weights, hidden, second, work)


def _join(
    state: Array,
    num_steps: Array,
    launched_tier: int,
    launched_steps: int,
    launched_warm: bool,
    launched_batch: int,
    num_joined: int,
    batch_size: int,
) -> None:
    """Record the launch before it and that requests joined, and digest the evidence."""
    _launch(state, len(num_steps), launched_tier, launched_steps, launched_warm, launched_batch)
    memory, tries, successes, recent, _, digest, _ = _parts(state, len(num_steps))
    record_join(memory, tries, successes, num_joined, batch_size)
    digest_evidence(digest, tries, successes, recent, num_steps)


def _result(
    state: Array,
    num_steps: Array,
    histogram: Array,
    launched_tier: int,
    launched_steps: int,
    launched_warm: bool,
    launched_batch: int,
    tier: int,
    steps: int,
    cold_start: bool,
    num_correct: Array,
) -> None:
    """Record the launch before it and a result, and digest the evidence."""
    _launch(state, len(num_steps), launched_tier, launched_steps, launched_warm, launched_batch)
    _, tries, successes, recent, _, digest, _ = _parts(state, len(num_steps))
    histogram[:] = 0
    for count in num_correct:
        if count <= MAX_NUM_STEPS:
            histogram[count] += 1
    record_result(tries, successes, recent, tier, steps, cold_start, histogram)
    digest_evidence(digest, tries, successes, recent, num_steps)


_CACHE = cache_folder(HERE, (HERE,))
_decide_kernel = compile_kernel(_decide, _CACHE)
_join_kernel = compile_kernel(_join, _CACHE)
_result_kernel = compile_kernel(_result, _CACHE)


class CompiledDecision:
    """Memory and network of one server; the counterpart of ``controller.decision.ListDecision``.

    A call of compiled code costs more than what it computes, above all in a server whose other work
    has emptied the caches. So a launch is only noted, and recorded by whatever is called next.
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
        parameters = {name: value.astype(np.float64) for name, value in policy.parameters.items()}
        num_tiers = len(num_steps)
        hidden, second = policy.hidden_sizes
        self._policy = policy
        self._num_tiers = num_tiers
        self._num_steps: Array = np.array(num_steps, np.int64)
        self._histogram: Array = np.zeros(MAX_NUM_STEPS + 1, np.int64)
        self._observation: Array = np.zeros(observation_size(num_tiers), np.float32)
        size = NUM_MEMORY + 2 * NUM_COUNTS + 2 * num_tiers + SCRATCH_SIZE
        self._state: Array = np.zeros(size + num_tiers + 2 * hidden + second)
        weights = (
            parameters["global.weight"].T,
            parameters["hidden.bias"],
            parameters["tier.weight"].T,
            parameters["second.weight"].T,
            parameters["second.bias"],
            parameters["logit.weight"],
            parameters["skip.weight"],
        )
        self._fixed: tuple[Any, ...] = (
            max_running_requests,
            prefill_s,
            np.ascontiguousarray(np.vstack((base_s, context_s)), np.float64),
            self._num_steps,
            self._state,
            self._observation,
            np.concatenate([np.ravel(weight) for weight in weights]),
            hidden,
            second,
        )
        self._pending: tuple[int, int, bool, int] = NO_LAUNCH
        self._stale = False
        self._reset(current_tier)
        self._rehearse()
        self._reset(current_tier)

    def _reset(self, current_tier: int) -> None:
        memory, tries, successes, recent, ages, digest, _ = _parts(self._state, self._num_tiers)
        reset_memory(memory, tries, successes, recent, ages, current_tier)
        digest_evidence(digest, tries, successes, recent, self._num_steps)
        self._pending, self._stale = NO_LAUNCH, False

    def _rehearse(self) -> None:
        """Call everything once, so that no request waits for a compiler."""
        tier = self.choose(1, 0, 1, 0.0)
        self.joined(1, 1)
        steps = int(self._num_steps[tier])
        self.launched(tier, steps, True, 1)
        self.result(tier, steps, False, b"\0")

    @property
    def accept_len(self) -> Array:
        """Estimated accept length by scale and depth; see :mod:`controller.acceptance`."""
        return _parts(self._state, self._num_tiers)[5]

    @property
    def recent_accept_len(self) -> Array:
        """``(K,)`` mean accept length of each tier's recent rounds; 1 for a tier never run."""
        return _parts(self._state, self._num_tiers)[3]

    def choose(self, batch_size: int, queue_depth: int, context_tokens: int, kv_use: float) -> int:
        """Return the policy's tier for the next round.

        Raises:
            SpecGovernorError: If an entry of the observation is not finite.
        """
        pending, self._pending = self._pending, NO_LAUNCH
        tier: int = _decide_kernel(
            batch_size, queue_depth, context_tokens, kv_use, *pending, *self._fixed
        )
        if tier == NOT_FINITE:
            return self._policy.choose(self._observation)  # Names the entry in its error.
        return tier

    def joined(self, num_joined: int, batch_size: int) -> None:
        """Note that requests were prefilled into what is now a batch of ``batch_size``."""
        pending, self._pending = self._pending, NO_LAUNCH
        _join_kernel(self._state, self._num_steps, *pending, num_joined, batch_size)

    def launched(self, tier: int, num_steps: int, keeps_warm: bool, batch_size: int) -> bool:
        """Note the round that runs now; return whether it drafts on a stale draft state."""
        if self._pending is not NO_LAUNCH:  # Another one, with nothing in between.
            self.joined(0, batch_size)
        self._pending = (tier, num_steps, keeps_warm, batch_size)
        cold_start = self._stale and num_steps > 0
        self._stale = num_steps == 0 and not keeps_warm
        return cold_start

    def result(self, tier: int, num_steps: int, cold_start: bool, num_correct: bytes) -> None:
        """Add the correct drafts of each row of a round."""
        pending, self._pending = self._pending, NO_LAUNCH
        _result_kernel(
            self._state,
            self._num_steps,
            self._histogram,
            *pending,
            tier,
            num_steps,
            cold_start,
            np.frombuffer(num_correct, np.uint8),
        )
