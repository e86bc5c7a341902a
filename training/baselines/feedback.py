"""Which results of decode rounds are known at a decision.

Under the overlap schedule a round is launched before the result of the round before it has been
processed, unless a prefill batch came between them. A simulated server keeps only the result of the
last round; so what is not known yet is held here until the next decision.
"""

import numpy as np
from numpy.typing import NDArray

from controller.tiers import MAX_NUM_STEPS
from env.compiled import kernel
from env.simulator import Simulator

TIER = 0
ROWS = 1
COLD_START = 2
HISTOGRAM = 3
"""Index of the first entry of the histogram of correct drafts, in a result."""
WIDTH = HISTOGRAM + MAX_NUM_STEPS + 1


@kernel
def collect(state, held, known, num_known):
    """Sort the last round's results into what is known and what is held.

    Args:
        state: The servers.
        held: ``(num_servers, WIDTH + 1)`` results to come, the last entry 1 where there is one.
        known: ``(num_servers, 2, WIDTH)``, filled, oldest first.
        num_known: ``(num_servers,)``, filled with 0 to 2.
    """
    for e in range(num_known.shape[0]):
        server = state.server[e]
        num_known[e] = 0
        if server.done or server.num_rounds == 0:
            continue
        if held[e, WIDTH] > 0:
            known[e, 0, :] = held[e, :WIDTH]
            num_known[e] = 1
            held[e, WIDTH] = 0
        target = held[e]
        if server.pending_tier < 0:
            target = known[e, num_known[e]]
            num_known[e] += 1
        else:
            held[e, WIDTH] = 1
        target[TIER] = np.int64(state.memory[e, 0])
        target[COLD_START] = 1 if server.pending_cold_start else 0
        rows = 0
        for count in range(MAX_NUM_STEPS + 1):
            target[HISTOGRAM + count] = state.histogram[e, count]
            rows += state.histogram[e, count]
        target[ROWS] = rows


class Feedback:
    """The results that become known between one decision and the next.

    Attributes:
        known: ``(num_servers, 2, WIDTH)`` tier, rows, whether the drafts were stale, and the rows
            by number of correct drafts; rows of requests that have finished count, as in SGLang.
        num_known: ``(num_servers,)`` how many of the two are new.
    """

    def __init__(self, num_servers: int) -> None:
        self.known: NDArray[np.int64] = np.zeros((num_servers, 2, WIDTH), np.int64)
        self.num_known: NDArray[np.int64] = np.zeros(num_servers, np.int64)
        self._held = np.zeros((num_servers, WIDTH + 1), np.int64)

    def update(self, simulator: Simulator) -> None:
        """Take in the round since the last call; call it once before each decision."""
        collect(simulator.state, self._held, self.known, self.num_known)
