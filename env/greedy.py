"""The cheapest policy that uses its observation: the tier with the best estimated tokens a second.

It reads the medium-scale gain of every tier (``controller/features.py``) and takes the largest; it
pays no heed to switching costs and never looks whether acceptance has changed. It runs compiled, so
it shows what the simulator costs when its policy costs nothing.
"""

import numpy as np
from numba import prange

from controller.features import NUM_GLOBAL, NUM_PER_TIER, SCRATCH_SIZE, TIER_FEATURES
from env.compiled import kernel
from env.server_loop import observe_server, step_server

FIRST_SCORE = NUM_GLOBAL + [feature.name for feature in TIER_FEATURES].index("gain_medium")
"""Index in an observation of the first tier's score; the next is ``NUM_PER_TIER`` on."""


@kernel
def greedy_tier(observation, num_tiers):
    """Return the tier with the largest score, the first one of equals."""
    best = 0
    for k in range(1, num_tiers):
        if (
            observation[FIRST_SCORE + k * NUM_PER_TIER]
            > observation[FIRST_SCORE + best * NUM_PER_TIER]
        ):
            best = k
    return best


@kernel(parallel=True)
def run_greedy(state, costs, rounds):
    """Run every server for a number of rounds, or to its end, under the greedy policy."""
    num_tiers = costs.num_steps.shape[0]
    for e in prange(state.server.shape[0]):
        observation = np.empty(NUM_GLOBAL + num_tiers * NUM_PER_TIER, np.float32)
        step_s = np.empty(num_tiers)
        scratch = np.empty(SCRATCH_SIZE)
        for _ in range(rounds):
            if state.server[e].done:
                break
            observe_server(state, costs, e, observation, step_s, scratch)
            step_server(state, costs, e, greedy_tier(observation, num_tiers))
