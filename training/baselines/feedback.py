"""Which results of decode rounds are known at a decision.

Under the overlap schedule a round is launched before the result of the round before it has been
processed, unless a prefill batch came between them. A simulated server keeps only the result of the
last round; so what is not known yet is held here until the next decision.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from controller.memory import CURRENT_TIER
from controller.tiers import MAX_NUM_STEPS
from env.compiled import kernel

TIER = 0
ROWS = 1
COLD_START = 2
HISTOGRAM = 3
"""Index of the first entry of the histogram of correct drafts, in a result."""
WIDTH = HISTOGRAM + MAX_NUM_STEPS + 1


@kernel
def collect(state, e, held, known):
    """Sort the last round's results into what is known and what is held; call once a decision.

    Args:
        state: The servers.
        e: The server.
        held: ``(WIDTH + 1,)`` a result to come, the last entry 1 if there is one; changed.
        known: ``(2, WIDTH)``, filled, oldest first.

    Returns:
        How many are known.
    """
    server = state.server[e]
    count = 0
    if server.done or server.num_rounds == 0:
        return count
    if held[WIDTH] > 0:
        known[0, :] = held[:WIDTH]
        held[WIDTH] = 0
        count = 1
    target = held
    if server.pending_tier < 0:
        target = known[count]
        count += 1
    else:
        held[WIDTH] = 1
    target[TIER] = np.int64(state.memory[e, CURRENT_TIER])
    target[COLD_START] = 1 if server.pending_cold_start else 0
    rows = 0
    for correct in range(MAX_NUM_STEPS + 1):
        target[HISTOGRAM + correct] = state.histogram[e, correct]
        rows += state.histogram[e, correct]
    target[ROWS] = rows
    return count


class Feedback(NamedTuple):
    """The results that are known at the decision, for every server.

    Attributes:
        held: ``(num_servers, WIDTH + 1)``, see :func:`collect`.
        known: ``(num_servers, 2, WIDTH)`` tier, rows, whether the drafts were stale, and the rows
            by number of correct drafts; rows of requests that have finished count, as in SGLang.
    """

    held: NDArray[np.int64]
    known: NDArray[np.int64]


def new_feedback(num_servers: int) -> Feedback:
    """Return feedback of servers that have run no round."""
    return Feedback(
        np.zeros((num_servers, WIDTH + 1), np.int64), np.zeros((num_servers, 2, WIDTH), np.int64)
    )
