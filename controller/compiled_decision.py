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
from numpy.typing import NDArray

from controller.acceptance import NUM_COUNTS
from controller.compiled import HERE, cache_folder, compile_kernel
from controller.features import SCRATCH_SIZE, digest_evidence, fill_digested, observation_size
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
    observation: Array,
    num_tiers: int,
    global_weight: Array,
    tier_weight: Array,
    second_weight: Array,
    vectors: Array,
    work: Array,
) -> int:
    """Return the tier with the highest logit; the arguments are those of :func:`_decide`."""
    num_per_tier, hidden = tier_weight.shape
    second = second_weight.shape[1]
    num_global = global_weight.shape[0] - 1
    shared = work[num_tiers : num_tiers + hidden]
    h = work[num_tiers + hidden : num_tiers + 2 * hidden]
    z = work[num_tiers + 2 * hidden :]
    if not math.isfinite(np.abs(observation).sum()):
        return NOT_FINITE
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
    max_running_requests: int,
    base_s: Array,
    context_s: Array,
    num_steps: Array,
    memory: Array,
    ages: Array,
    digest: Array,
    observation: Array,
    global_weight: Array,
    tier_weight: Array,
    second_weight: Array,
    vectors: Array,
    work: Array,
) -> int:
    """Fill the observation and return the best tier, the first if some tie.

    Args:
        batch_size: As :func:`controller.features.fill_observation` takes it, like the rest.
        queue_depth: The same.
        context_tokens: The same.
        kv_use: The same.
        max_running_requests: The same.
        base_s: ``(max_running_requests + 1, K)`` seconds by batch size.
        context_s: ``(K,)`` seconds a context token.
        num_steps: ``(K,)``.
        memory: ``(NUM_MEMORY,)``.
        ages: ``(K,)``.
        digest: ``(SCRATCH_SIZE,)``.
        observation: ``(observation_size(K),)``, filled; float32, as in training.
        global_weight: ``(num_global + 1, hidden)``, the last row the bias.
        tier_weight: ``(num_per_tier, hidden)``.
        second_weight: ``(hidden, second)``.
        vectors: ``(2 * second + num_per_tier,)`` second bias, logit weight, skip weight.
        work: ``(K + 2 * hidden + second,)`` work space.

    Returns:
        The tier, or ``NOT_FINITE``.
    """
    num_tiers = len(num_steps)
    step_s = work[:num_tiers]
    row = base_s[min(batch_size, max_running_requests)]
    for k in range(num_tiers):
        step_s[k] = row[k] + context_s[k] * context_tokens
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
        digest,
    )
    return _best_tier(
        observation, num_tiers, global_weight, tier_weight, second_weight, vectors, work
    )


def _join(
    memory: Array,
    tries: Array,
    successes: Array,
    recent: Array,
    num_steps: Array,
    digest: Array,
    num_joined: int,
    batch_size: int,
) -> None:
    """Record that requests joined, and digest the evidence."""
    record_join(memory, tries, successes, num_joined, batch_size)
    digest_evidence(digest, tries, successes, recent, num_steps)


def _launch(
    memory: Array,
    ages: Array,
    tier: int,
    num_steps: int,
    keeps_draft_warm: bool,
) -> bool:
    """Record a launch."""
    return record_launch(memory, ages, tier, num_steps, keeps_draft_warm)


def _result(
    tries: Array,
    successes: Array,
    recent: Array,
    tier_steps: Array,
    digest: Array,
    histogram: Array,
    tier: int,
    num_steps: int,
    cold_start: bool,
    num_correct: Array,
) -> None:
    """Record a result, and digest the evidence."""
    histogram[:] = 0
    for count in num_correct:
        if count <= MAX_NUM_STEPS:
            histogram[count] += 1
    record_result(tries, successes, recent, tier, num_steps, cold_start, histogram)
    digest_evidence(digest, tries, successes, recent, tier_steps)


_CACHE = cache_folder(HERE, (HERE,))
_decide_kernel = compile_kernel(_decide, _CACHE)
_join_kernel = compile_kernel(_join, _CACHE)
_launch_kernel = compile_kernel(_launch, _CACHE)
_result_kernel = compile_kernel(_result, _CACHE)


class CompiledDecision:
    """Memory and network of one server; the counterpart of ``controller.decision.ListDecision``."""

    def __init__(
        self,
        policy: NumpyPolicy,
        num_steps: Sequence[int],
        base_s: Array,
        context_s: Array,
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
        self._max_running_requests = max_running_requests
        self._num_steps: Array = np.array(num_steps, np.int64)
        self._memory: Array = np.zeros(NUM_MEMORY)
        self._tries: Array = np.zeros(NUM_COUNTS)
        self._successes: Array = np.zeros(NUM_COUNTS)
        self._recent: Array = np.zeros(num_tiers)
        self._ages: Array = np.zeros(num_tiers)
        self._digest: Array = np.zeros(SCRATCH_SIZE)
        self._histogram = np.zeros(MAX_NUM_STEPS + 1, np.int64)
        self._observation = np.zeros(observation_size(num_tiers), np.float32)
        self._arrays: tuple[NDArray[Any], ...] = (
            np.ascontiguousarray(base_s, np.float64),
            np.ascontiguousarray(context_s, np.float64),
            self._num_steps,
            self._memory,
            self._ages,
            self._digest,
            self._observation,
            np.ascontiguousarray(
                np.vstack((parameters["global.weight"].T, parameters["hidden.bias"]))
            ),
            np.ascontiguousarray(parameters["tier.weight"].T),
            np.ascontiguousarray(parameters["second.weight"].T),
            np.concatenate([parameters[n] for n in ("second.bias", "logit.weight", "skip.weight")]),
            np.zeros(num_tiers + 2 * hidden + second),
        )
        self._reset(current_tier)
        self._rehearse()
        self._reset(current_tier)

    def _reset(self, current_tier: int) -> None:
        reset_memory(
            self._memory, self._tries, self._successes, self._recent, self._ages, current_tier
        )
        digest_evidence(self._digest, self._tries, self._successes, self._recent, self._num_steps)

    def _rehearse(self) -> None:
        """Call everything once, so that no request waits for a compiler."""
        tier = self.choose(1, 0, 1, 0.0)
        self.joined(1, 1)
        steps = int(self._num_steps[tier])
        self.launched(tier, steps, True)
        self.result(tier, steps, False, b"\0")

    @property
    def accept_len(self) -> Array:
        """Estimated accept length by scale and depth; see :mod:`controller.acceptance`."""
        return self._digest

    @property
    def recent_accept_len(self) -> Array:
        """``(K,)`` mean accept length of each tier's recent rounds; 1 for a tier never run."""
        return self._recent

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
            self._max_running_requests,
            *self._arrays,
        )
        if tier == NOT_FINITE:
            return self._policy.choose(self._observation)  # Names the entry in its error.
        return tier

    def joined(self, num_joined: int, batch_size: int) -> None:
        """Note that requests were prefilled into what is now a batch of ``batch_size``."""
        _join_kernel(
            self._memory,
            self._tries,
            self._successes,
            self._recent,
            self._num_steps,
            self._digest,
            num_joined,
            batch_size,
        )

    def launched(self, tier: int, num_steps: int, keeps_warm: bool) -> bool:
        """Note the round that runs now; return whether it drafts on a stale draft state."""
        return bool(_launch_kernel(self._memory, self._ages, tier, num_steps, keeps_warm))

    def result(self, tier: int, num_steps: int, cold_start: bool, num_correct: bytes) -> None:
        """Add the correct drafts of each row of a round."""
        _result_kernel(
            self._tries,
            self._successes,
            self._recent,
            self._num_steps,
            self._digest,
            self._histogram,
            tier,
            num_steps,
            cold_start,
            np.frombuffer(num_correct, np.uint8),
        )
