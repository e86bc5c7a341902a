"""Running estimate of how many drafts the target accepts, at three time scales.

Each speculative round of depth ``k`` tries draft position ``j`` (0-based) on every request whose
drafts before ``j`` were all correct. Counting tries and successes by position gives the conditional
accept rate of each position, the discrete hazard of a right-censored sample (Kaplan and Meier,
JASA 1958). Unlike one rate for all positions it stays right when requests differ: those that reach
a deep position are the ones that accept well.

The counts decay with every speculative round, at three rates (:data:`DECAYS`). A position with few
tries leans on its neighbour at the slow scale and on the next slower scale at the faster ones, with
:data:`PRIOR_TRIES` pseudo-tries; with no evidence at all the rate is :data:`PRIOR_RATE`. When
requests join a batch, the fast and medium counts shrink by the share that is new, since what was
measured says nothing about them; the slow counts keep what the traffic looked like.

The functions take plain sequences and use no Python objects, so that the server runs them on lists
(no NumPy call overhead) and the simulator compiles the same source over arrays.
"""

from collections.abc import MutableSequence, Sequence

from controller.tiers import MAX_NUM_STEPS

NUM_SCALES = 3
DECAYS = (0.6, 0.9, 0.98)
"""Share of the counts that a speculative round keeps: fast, medium, slow."""
PRIOR_RATE = 0.6
PRIOR_TRIES = 2.0
NUM_COUNTS = NUM_SCALES * MAX_NUM_STEPS
"""Length of ``tries`` and ``successes``: scale-major, then draft position."""


def observe_round(
    tries: MutableSequence[float],
    successes: MutableSequence[float],
    histogram: Sequence[int],
    num_steps: int,
) -> None:
    """Add the result of one speculative round.

    Args:
        tries: ``(NUM_COUNTS,)`` decayed tries, updated in place.
        successes: ``(NUM_COUNTS,)`` decayed successes, updated in place.
        histogram: ``(num_steps + 1,)`` or longer; entry ``c`` counts the requests with ``c``
            correct drafts.
        num_steps: Draft steps of the round, 1 to ``MAX_NUM_STEPS``.

    >>> tries, successes = [0.0] * NUM_COUNTS, [0.0] * NUM_COUNTS
    >>> observe_round(tries, successes, [1, 0, 3], 2)  # of 4 requests, 3 accepted both drafts
    >>> tries[:3], successes[:3]
    ([4.0, 3.0, 0.0], [3.0, 3.0, 0.0])
    """
    for scale in range(NUM_SCALES):
        decay = DECAYS[scale]
        start = scale * MAX_NUM_STEPS
        for index in range(start, start + MAX_NUM_STEPS):
            tries[index] *= decay
            successes[index] *= decay
        reached = 0
        for position in range(num_steps, 0, -1):
            reached += histogram[position]
            successes[start + position - 1] += reached
            tries[start + position - 1] += reached + histogram[position - 1]


def observe_join(
    tries: MutableSequence[float], successes: MutableSequence[float], share: float
) -> None:
    """Shrink the fast and medium counts when ``share`` (0 to 1) of the batch is new."""
    keep = 1.0 - share
    for index in range((NUM_SCALES - 1) * MAX_NUM_STEPS):
        tries[index] *= keep
        successes[index] *= keep


def estimate_accept_len(
    tries: Sequence[float],
    successes: Sequence[float],
    accept_len: MutableSequence[float],
) -> None:
    """Estimate the accept length (bonus token included) of every depth at every scale.

    The accept length of depth ``k`` is one plus the sum over ``j = 1..k`` of the product of the
    first ``j`` conditional accept rates.

    Args:
        tries: ``(NUM_COUNTS,)``.
        successes: ``(NUM_COUNTS,)``.
        accept_len: ``(NUM_SCALES * (MAX_NUM_STEPS + 1),)`` or longer, filled; scale-major, then
            depth 0 to ``MAX_NUM_STEPS``. The entry of depth 1 less 1 is the first accept rate.

    >>> accept_len = [0.0] * NUM_SCALES * (MAX_NUM_STEPS + 1)
    >>> estimate_accept_len([0.0] * NUM_COUNTS, [0.0] * NUM_COUNTS, accept_len)
    >>> [round(x, 3) for x in accept_len[:3]]
    [1.0, 1.6, 1.96]
    """
    depths = MAX_NUM_STEPS + 1
    for scale in range(NUM_SCALES - 1, -1, -1):
        slower = scale + 1 < NUM_SCALES
        accept_len[scale * depths] = 1.0
        reach = 1.0
        total = 1.0
        rate = PRIOR_RATE
        slower_reach = 1.0
        for position in range(MAX_NUM_STEPS):
            index = scale * MAX_NUM_STEPS + position
            prior = rate
            if slower:
                # The slower scale's conditional rate, recovered from its accept lengths.
                row = (scale + 1) * depths + position
                gained = accept_len[row + 1] - accept_len[row]
                prior = gained / slower_reach
                slower_reach = gained
            rate = (successes[index] + PRIOR_TRIES * prior) / (tries[index] + PRIOR_TRIES)
            # A floor keeps the recovered rates of a faster scale finite.
            reach = max(reach * rate, 1e-9)
            total += reach
            accept_len[scale * depths + position + 1] = total
