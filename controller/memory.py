"""What the controller remembers from round to round, and how each event changes it.

The memory is a flat sequence of numbers, so that the server keeps it in a list and the simulator in
a row of an array; both call the functions below, compiled or not. Every entry is a count of rounds
or of requests: none depends on a clock, so all tensor-parallel ranks hold the same values.
"""

from collections.abc import MutableSequence, Sequence

from controller.acceptance import observe_join, observe_round

CURRENT_TIER = 0
"""Index of the tier that was launched last."""
ROUNDS_SINCE_SWITCH = 1
"""Rounds launched on the current tier after the one that switched to it."""
ROUNDS_SINCE_SPECULATION = 2
"""Rounds launched since the last speculative one; 0 right after it."""
STALE_ROUNDS = 3
"""Rounds that left the draft's KV behind, since it was last extended."""
JOINED = 4
"""Requests that joined the batch since the last speculative round."""
BATCH = 5
"""Requests of the round that was launched last."""
JUST_JOINED = 6
"""Requests that joined the batch since that round."""
COMPLETED = 7
"""Requests that left the batch, of late."""
TOKENS = 8
"""Output tokens of the rounds that they left in, as far as the launches tell."""
NUM_MEMORY = 9

LATE_REQUESTS = 32.0
"""How many completed requests are remembered, exponentially weighted."""
USUAL_TOKENS = 512.0
"""Output tokens of a request, until some are known: they count as one completed request."""

FAR = 1e6
"""Age, in rounds, of what has never happened."""


def reset_memory(
    memory: MutableSequence[float],
    tries: MutableSequence[float],
    successes: MutableSequence[float],
    recent_accept_len: MutableSequence[float],
    ages: MutableSequence[float],
    current_tier: int,
) -> None:
    """Start from nothing: no evidence, and no tier has run.

    Args:
        memory: ``(NUM_MEMORY,)``, filled.
        tries: ``(NUM_COUNTS,)``, filled with 0.
        successes: ``(NUM_COUNTS,)``, filled with 0.
        recent_accept_len: ``(num_tiers,)``, filled with 1.
        ages: ``(num_tiers,)`` rounds since each tier ran, filled with ``FAR``.
        current_tier: The tier that the server starts with.
    """
    for index in range(NUM_MEMORY):
        memory[index] = 0.0
    memory[CURRENT_TIER] = current_tier
    for index in range(len(tries)):
        tries[index] = 0.0
        successes[index] = 0.0
    for index in range(len(ages)):
        ages[index] = FAR
        recent_accept_len[index] = 1.0


def record_join(
    memory: MutableSequence[float],
    tries: MutableSequence[float],
    successes: MutableSequence[float],
    num_joined: int,
    batch_size: int,
) -> None:
    """Note that ``num_joined`` requests were prefilled into a batch that is now ``batch_size``."""
    memory[JOINED] += num_joined
    memory[JUST_JOINED] += num_joined
    observe_join(tries, successes, min(num_joined / max(batch_size, 1), 1.0))


def record_turnover(memory: MutableSequence[float], accept_len: float, batch_size: int) -> None:
    """Note how many requests left the batch since the last launch, and what it made meanwhile.

    Only counts of launches are read: accept results come one launch late under the overlap
    schedule, and rounds without drafts have none.

    Args:
        memory: ``(NUM_MEMORY,)``.
        accept_len: Mean accept length that the round launched last is taken to have had.
        batch_size: Requests of the round that is launched now.
    """
    left = memory[BATCH] + memory[JUST_JOINED] - batch_size
    if left < 0.0:
        left = 0.0
    keep = LATE_REQUESTS / (LATE_REQUESTS + left)
    memory[COMPLETED] = keep * (memory[COMPLETED] + left)
    memory[TOKENS] = keep * (memory[TOKENS] + memory[BATCH] * accept_len)
    memory[BATCH] = batch_size
    memory[JUST_JOINED] = 0.0


def completion_rate(memory: Sequence[float]) -> float:
    """Return how many requests complete for each output token: 1 / mean output length."""
    return (memory[COMPLETED] + 1.0) / (memory[TOKENS] + USUAL_TOKENS)


def record_launch(
    memory: MutableSequence[float],
    ages: MutableSequence[float],
    recent_accept_len: Sequence[float],
    tier: int,
    num_steps: int,
    keeps_draft_warm: bool,
    batch_size: int,
) -> bool:
    """Note that a decode round was launched.

    Args:
        memory: ``(NUM_MEMORY,)``.
        ages: ``(num_tiers,)``.
        recent_accept_len: ``(num_tiers,)``, see :func:`record_result`.
        tier: The tier that runs.
        num_steps: Its draft steps.
        keeps_draft_warm: Whether it extends the draft's KV.
        batch_size: Requests of the round.

    Returns:
        Whether this round drafts on a stale draft state: the first speculative round after rounds
        that left the draft's KV behind. Its result says little about what follows.
    """
    record_turnover(memory, recent_accept_len[int(memory[CURRENT_TIER])], batch_size)
    if memory[CURRENT_TIER] != tier:
        memory[CURRENT_TIER] = tier
        memory[ROUNDS_SINCE_SWITCH] = 0.0
    else:
        memory[ROUNDS_SINCE_SWITCH] += 1.0
    for index in range(len(ages)):
        ages[index] += 1.0
    ages[tier] = 0.0
    if num_steps > 0:
        cold_start = memory[STALE_ROUNDS] > 0.0
        memory[ROUNDS_SINCE_SPECULATION] = 0.0
        memory[STALE_ROUNDS] = 0.0
        memory[JOINED] = 0.0
        return cold_start
    memory[ROUNDS_SINCE_SPECULATION] += 1.0
    memory[STALE_ROUNDS] = 0.0 if keeps_draft_warm else memory[STALE_ROUNDS] + 1.0
    return False


def record_result(
    tries: MutableSequence[float],
    successes: MutableSequence[float],
    recent_accept_len: MutableSequence[float],
    tier: int,
    num_steps: int,
    cold_start: bool,
    histogram: Sequence[int],
) -> None:
    """Add the result of a round, known one launch later under the overlap schedule.

    Args:
        tries: ``(NUM_COUNTS,)``.
        successes: ``(NUM_COUNTS,)``.
        recent_accept_len: ``(num_tiers,)`` mean accept length of each tier's recent rounds,
            each new round weighted 0.3.
        tier: The tier that ran.
        num_steps: Its draft steps.
        cold_start: What :func:`record_launch` returned for the round.
        histogram: ``(MAX_NUM_STEPS + 1,)`` requests by number of correct drafts.
    """
    if num_steps == 0 or cold_start:
        return
    observe_round(tries, successes, histogram, num_steps)
    rows = 0
    correct = 0
    for count in range(num_steps + 1):
        rows += histogram[count]
        correct += count * histogram[count]
    if rows > 0:
        recent_accept_len[tier] += 0.3 * (1.0 + correct / rows - recent_accept_len[tier])
