"""What the critic may know in training and no controller ever sees.

A critic that knows the true accept rates, now and soon, and the load to come judges a state with
far less noise; the policy is trained against it and runs without it (asymmetric actor-critic,
Pinto et al., arXiv:1710.06542).
"""

import math

import numpy as np

from controller.tiers import MAX_NUM_STEPS
from env.acceptance_process import accept_rate
from env.compiled import kernel
from env.decode import draft_rate, expected_tokens

DEPTHS = np.array([1, 3, 7])
AHEAD_S = np.array([0.0, 0.5, 2.0])
AHEAD_TOKENS = np.array([0.0, 48.0, 192.0])
NUM_PRIVILEGED = len(DEPTHS) * len(AHEAD_S) + 5
SOON_S = 2.0


@kernel
def fill_privileged(state, e, out):
    """Fill the privileged part of an observation.

    Args:
        state: The servers.
        e: The server.
        out: ``(NUM_PRIVILEGED,)``: ln of the mean accept length of a warm draft for 3 depths at 3
            looks ahead; ln of the next round's at depth 3; the mean draft deficit; the share of
            requests with a gap; the mean share of output left; arrivals soon over batch size.
    """
    server = state.server[e]
    config = state.config[e]
    size = max(server.num_running, 1)
    at = 0
    for look in range(AHEAD_S.shape[0]):
        for d in range(DEPTHS.shape[0]):
            out[at + d] = 0.0
        for i in range(server.num_running):
            request_id = state.running[e, i]
            generated = state.request[e, request_id].generated
            rate = accept_rate(
                config, request_id, generated + AHEAD_TOKENS[look], server.now_s + AHEAD_S[look]
            )
            power = 1.0
            total = 0.0
            d = 0
            for j in range(1, MAX_NUM_STEPS + 1):
                power *= rate * config.accept_shape[j - 1]
                total += power
                if j == DEPTHS[d]:
                    out[at + d] += total
                    d += 1
        for d in range(DEPTHS.shape[0]):
            out[at + d] = math.log(1.0 + out[at + d] / size)
        at += DEPTHS.shape[0]
    cold = 0.0
    deficit = 0.0
    gaps = 0.0
    left = 0.0
    for i in range(server.num_running):
        request_id = state.running[e, i]
        request = state.request[e, request_id]
        rate = accept_rate(config, request_id, request.generated, server.now_s)
        rate = draft_rate(config, request, rate, 3)
        cold += expected_tokens(config, rate, 3) - 1.0
        deficit += request.deficit
        gaps += 1.0 if request.stale_tokens > 0.0 else 0.0
        left += 1.0 - request.generated / request.output_tokens
    out[at] = math.log(1.0 + cold / size)
    out[at + 1] = deficit / size
    out[at + 2] = gaps / size
    out[at + 3] = left / size
    arrivals = 0
    upcoming = server.next_visible
    while (
        upcoming < server.num_issued
        and arrivals < 2 * size
        and state.request[e, upcoming].arrival_s <= server.now_s + SOON_S
    ):
        arrivals += 1
        upcoming += 1
    out[at + 4] = arrivals / size
