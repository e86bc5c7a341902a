"""What the policy sees: the one place that owns feature order and scaling.

An observation for ``K`` tiers is a flat vector of ``len(GLOBAL_FEATURES) + K *
len(TIER_FEATURES)`` numbers: the global features, then the features of the first tier, then those
of the second, and so on. All are clipped to the range in the tables below. Costs enter only as
ratios between tiers, so one policy reads any calibration. Every input is a count, a calibrated
constant or an accept result: equal on all tensor-parallel ranks, and never a clock reading.

Round time. A round that completes a request lets the next one in, whose prefill batch interrupts
decoding for a fixed time, shared by all that complete in one round. With ``n`` tokens a round and
``1 / L`` completed requests a token, some request completes with probability ``1 - exp(-n / L)``
(Poisson), so that share of a prefill batch's fixed time counts as part of the round. That favours
deep rounds where requests are short and batches large; without it the policy stops too early.
"""

import math
from collections.abc import MutableSequence, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controller.acceptance import NUM_SCALES, estimate_accept_len
from controller.memory import (
    CURRENT_TIER,
    JOINED,
    ROUNDS_SINCE_SPECULATION,
    ROUNDS_SINCE_SWITCH,
    completion_rate,
)
from controller.tiers import MAX_NUM_STEPS, OFF_KINDS


@dataclass(frozen=True)
class Feature:
    """One number of an observation.

    Attributes:
        name: Name in the checkpoint's manifest.
        unit: Unit before scaling.
        low: Smallest value after scaling; smaller ones are clipped.
        high: Largest value after scaling.
        description: Formula and meaning.
    """

    name: str
    unit: str
    low: float
    high: float
    description: str


GLOBAL_FEATURES = (
    Feature("batch_size", "requests", 0, 1, "log2(1 + running requests) / 10"),
    Feature("occupancy", "share", 0, 1, "running requests / max running requests"),
    Feature("queue_depth", "requests", 0, 1, "log2(1 + waiting requests) / 10"),
    Feature("context_per_request", "tokens", 0, 1, "log2(1 + context tokens / batch) / 20"),
    Feature("kv_use", "share", 0, 1, "KV tokens in use or reserved / KV capacity"),
    Feature("speculating", "flag", 0, 1, "1 if the last launched tier speculates"),
    Feature("num_steps", "draft steps", 0, 1, "draft steps of the last launched tier / 7"),
    Feature("since_switch", "rounds", 0, 1, "log2(1 + rounds since the last switch) / 12"),
    Feature("since_speculation", "rounds", 0, 1, "log2(1 + rounds since speculating) / 12"),
    Feature("unseen", "share", 0, 1, "requests that joined since the last speculation / batch"),
    Feature("accept_rate_fast", "share", 0, 1, "accept rate of the first draft, fast scale"),
    Feature("accept_rate_medium", "share", 0, 1, "the same, medium scale"),
    Feature("accept_rate_slow", "share", 0, 1, "the same, slow scale"),
    Feature("evidence_fast", "tries", 0, 1, "log2(1 + decayed tries of the first draft) / 14"),
    Feature("evidence_medium", "tries", 0, 1, "the same, medium scale"),
    Feature("evidence_slow", "tries", 0, 1, "the same, slow scale"),
)

TIER_FEATURES = (
    Feature("off", "flag", 0, 1, "1 if the tier does not draft"),
    Feature("num_steps", "draft steps", 0, 1, "draft steps / 7"),
    Feature("current", "flag", 0, 1, "1 if the tier was launched last"),
    Feature("cost", "log ratio", -3, 3, "ln(round time / first tier's), with its share of prefill"),
    Feature("gain_fast", "log ratio", -10, 0, "10 ln(tokens/s / best tier's), fast scale"),
    Feature("gain_medium", "log ratio", -10, 0, "the same, medium scale"),
    Feature("gain_slow", "log ratio", -10, 0, "the same, slow scale"),
    Feature("advantage", "log ratio", -10, 10, "10 ln(tokens/s / first tier's), medium scale"),
    Feature("ceiling", "log ratio", -10, 10, "the same, were 95% of all drafts accepted"),
    Feature("recent_accept_len", "ln tokens", 0, 3, "ln(mean accept length of its recent rounds)"),
    Feature("since_used", "rounds", 0, 1, "log2(1 + rounds since the tier ran) / 12"),
)

GAIN_SCALE = 10.0
"""Neighbouring tiers differ by a few percent: on the scale of the other features, a tenth is 1."""
NUM_GLOBAL = len(GLOBAL_FEATURES)
NUM_PER_TIER = len(TIER_FEATURES)
CEILING_RATE = 0.95
LOG_CEILING = tuple(
    math.log((1.0 - CEILING_RATE ** (depth + 1)) / (1.0 - CEILING_RATE))
    for depth in range(MAX_NUM_STEPS + 1)
)
"""ln(accept length) by depth, were 95% of all drafts accepted."""
MAX_TIERS = MAX_NUM_STEPS + len(OFF_KINDS)
LOG_LEN = NUM_SCALES * (MAX_NUM_STEPS + 1)
"""Index in the digest of ln(accept length): scale-major, then depth, of the tiers' depths only."""
RATE = 2 * LOG_LEN
"""Index in the digest of the first draft's accept rate, by scale; then its evidence, by scale."""
LOG_RECENT = RATE + 2 * NUM_SCALES
"""Index in the digest of ln(recent accept length), by tier, clipped."""
SCRATCH_SIZE = LOG_RECENT + MAX_TIERS
"""Length of the digest: accept lengths by scale and depth, and what is above."""


def feature_manifest() -> dict[str, Any]:
    """Return the feature tables as plain values; a checkpoint is valid for this list alone."""
    return {
        "global": [asdict(feature) for feature in GLOBAL_FEATURES],
        "tier": [asdict(feature) for feature in TIER_FEATURES],
    }


def observation_size(num_tiers: int) -> int:
    """Return the length of an observation for ``num_tiers`` tiers."""
    return NUM_GLOBAL + num_tiers * NUM_PER_TIER


def observation_bounds(num_tiers: int) -> tuple[list[float], list[float]]:
    """Return the smallest and largest value of every entry of an observation."""
    features = GLOBAL_FEATURES + TIER_FEATURES * num_tiers
    return [f.low for f in features], [f.high for f in features]


def fill_observation(
    out: MutableSequence[float],
    batch_size: int,
    queue_depth: int,
    context_tokens: int,
    kv_use: float,
    max_running_requests: int,
    memory: Sequence[float],
    tries: Sequence[float],
    successes: Sequence[float],
    recent_accept_len: Sequence[float],
    ages: Sequence[float],
    num_steps: Sequence[int],
    step_s: MutableSequence[float],
    prefill_s: float,
    scratch: MutableSequence[float],
) -> None:
    """Fill one observation. Runs on lists in the server and compiled over arrays in ``env/``.

    Args:
        out: ``(observation_size(K),)``, filled.
        batch_size: Running requests, at least 1.
        queue_depth: Waiting requests.
        context_tokens: Context tokens summed over the batch.
        kv_use: Share of the KV cache in use or reserved, 0 to 1.
        max_running_requests: The server's limit.
        memory: ``(NUM_MEMORY,)``, see ``controller.memory``.
        tries: ``(NUM_COUNTS,)``, see ``controller.acceptance``.
        successes: ``(NUM_COUNTS,)``.
        recent_accept_len: ``(K,)`` tokens, bonus included.
        ages: ``(K,)`` rounds since each tier ran.
        num_steps: ``(K,)`` draft steps of each tier, ascending; 0 is off.
        step_s: ``(K,)`` predicted round time of each tier at this batch and context, seconds; on
            return with its share of the prefill batches that interrupt decoding.
        prefill_s: Fixed time of a prefill batch, seconds.
        scratch: ``(SCRATCH_SIZE,)`` work space.
    """
    digest_evidence(scratch, tries, successes, recent_accept_len, num_steps)
    fill_digested(
        out,
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
        scratch,
    )


def digest_evidence(
    digest: MutableSequence[float],
    tries: Sequence[float],
    successes: Sequence[float],
    recent_accept_len: Sequence[float],
    num_steps: Sequence[int],
) -> None:
    """Do the part of :func:`fill_observation` that changes only with results and joins.

    Args:
        digest: ``(SCRATCH_SIZE,)``, filled.
        tries: ``(NUM_COUNTS,)``.
        successes: ``(NUM_COUNTS,)``.
        recent_accept_len: ``(K,)``.
        num_steps: ``(K,)``.
    """
    depths = MAX_NUM_STEPS + 1
    estimate_accept_len(tries, successes, digest)
    for scale in range(NUM_SCALES):
        start = scale * depths
        for depth in num_steps:
            digest[LOG_LEN + start + depth] = math.log(digest[start + depth])
        digest[RATE + scale] = digest[start + 1] - 1.0
        digest[RATE + NUM_SCALES + scale] = min(
            math.log2(1.0 + tries[scale * MAX_NUM_STEPS]) / 14.0, 1.0
        )
    for k in range(len(num_steps)):
        digest[LOG_RECENT + k] = min(max(math.log(recent_accept_len[k]), 0.0), 3.0)


def fill_digested(
    out: MutableSequence[float],
    batch_size: int,
    queue_depth: int,
    context_tokens: int,
    kv_use: float,
    max_running_requests: int,
    memory: Sequence[float],
    ages: Sequence[float],
    num_steps: Sequence[int],
    step_s: MutableSequence[float],
    prefill_s: float,
    digest: Sequence[float],
) -> None:
    """Fill one observation from a digest; the arguments are those of :func:`fill_observation`.

    This is what the server waits for before a launch, hence conditions instead of ``min`` and
    ``max``, which cost a call each.
    """
    log2 = math.log2
    log = math.log
    exp = math.exp
    current = int(memory[CURRENT_TIER])
    current_steps = num_steps[current]

    x = log2(1.0 + batch_size) / 10.0
    out[0] = x if x < 1.0 else 1.0
    x = batch_size / max_running_requests
    out[1] = x if x < 1.0 else 1.0
    x = log2(1.0 + queue_depth) / 10.0
    out[2] = x if x < 1.0 else 1.0
    x = log2(1.0 + context_tokens / batch_size) / 20.0
    out[3] = x if x < 1.0 else 1.0
    x = kv_use if kv_use > 0.0 else 0.0
    out[4] = x if x < 1.0 else 1.0
    out[5] = 1.0 if current_steps > 0 else 0.0
    out[6] = current_steps / MAX_NUM_STEPS
    x = log2(1.0 + memory[ROUNDS_SINCE_SWITCH]) / 12.0
    out[7] = x if x < 1.0 else 1.0
    x = log2(1.0 + memory[ROUNDS_SINCE_SPECULATION]) / 12.0
    out[8] = x if x < 1.0 else 1.0
    x = memory[JOINED] / batch_size
    out[9] = x if x < 1.0 else 1.0
    for index in range(2 * NUM_SCALES):
        out[10 + index] = digest[RATE + index]

    # The medium scale serves all three: how many tokens a round makes matters little to the share.
    lengths = MAX_NUM_STEPS + 1
    tokens_to_share = -batch_size * completion_rate(memory)
    for k in range(len(num_steps)):
        tokens = digest[lengths + num_steps[k]]
        step_s[k] += prefill_s * (1.0 - exp(tokens * tokens_to_share))

    # Three scores a tier, in ln(tokens/s) off by a constant: what counts is how far behind the best
    # they are. ``out`` does not keep them; it may be float32, whose differences have few digits.
    first_s = step_s[0]
    fast = LOG_LEN
    medium = LOG_LEN + MAX_NUM_STEPS + 1
    slow = LOG_LEN + 2 * (MAX_NUM_STEPS + 1)
    first = digest[medium + num_steps[0]]
    best_0 = best_1 = best_2 = -1e300
    for k in range(len(num_steps)):
        depth = num_steps[k]
        cost = log(step_s[k] / first_s)
        x = digest[fast + depth] - cost
        if x > best_0:
            best_0 = x
        x = digest[medium + depth] - cost
        if x > best_1:
            best_1 = x
        x = digest[slow + depth] - cost
        if x > best_2:
            best_2 = x
    at = NUM_GLOBAL
    for k in range(len(num_steps)):
        depth = num_steps[k]
        cost = log(step_s[k] / first_s)
        out[at] = 0.0 if depth else 1.0
        out[at + 1] = depth / MAX_NUM_STEPS
        out[at + 2] = 1.0 if k == current else 0.0
        out[at + 3] = -3.0 if cost < -3.0 else 3.0 if cost > 3.0 else cost
        x = GAIN_SCALE * (digest[fast + depth] - cost - best_0)
        out[at + 4] = x if x > -10.0 else -10.0
        score = digest[medium + depth] - cost
        x = GAIN_SCALE * (score - best_1)
        out[at + 5] = x if x > -10.0 else -10.0
        x = GAIN_SCALE * (digest[slow + depth] - cost - best_2)
        out[at + 6] = x if x > -10.0 else -10.0
        x = GAIN_SCALE * (score - first)
        out[at + 7] = -10.0 if x < -10.0 else 10.0 if x > 10.0 else x
        x = GAIN_SCALE * (LOG_CEILING[depth] - cost)
        out[at + 8] = -10.0 if x < -10.0 else 10.0 if x > 10.0 else x
        out[at + 9] = digest[LOG_RECENT + k]
        x = log2(1.0 + ages[k]) / 12.0
        out[at + 10] = x if x < 1.0 else 1.0
        at += NUM_PER_TIER
