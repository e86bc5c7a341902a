"""Two references that know what no controller can: the oracle and the bound.

Both know the accept rates, the costs and the arrivals, but not the random draws.

Oracle: before each round it runs a copy of the batch ahead, in expectation, once for every tier
held over the next 64 rounds, and looks at the plan after 1, 2, 4, ... 64 of them. Request time lost
by a plan is counted against the best that a warm draft could do in the same state,

    loss = requests in system * (seconds - tokens / best tokens per second),

so that plans of different length can be compared while load and acceptance change; the plan with
the smallest share of its request time lost wins, and its first round is run.

Bound: the tier with the most expected tokens per second in this round, with a draft that never goes
stale. Free switching makes the one-round choice the best one in a closed loop, up to what the
fixed cost of prefill batches and the spread of lengths hide from it; with real switching costs it
is out of reach.
"""

import numpy as np
from numba import prange

from controller.tiers import MAX_NUM_STEPS
from env.acceptance_process import accept_rate, deficit_after_gap, deficit_after_tokens
from env.compiled import kernel
from env.decode import expected_tokens
from env.ideal import add_powers, best_rate, full_round_s
from env.server_loop import step_server

BLOCKS = np.array([1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 16])
"""Rounds that are run ahead at once: singly at first, when a cold draft recovers."""
HOLDS = np.array([1, 2, 4, 8, 16, 32, 64])


@kernel
def warm_moments(state, e, moments):
    """Sum the powers of the running requests' warm accept rates into ``moments[0..7]``."""
    server = state.server[e]
    config = state.config[e]
    moments[:] = 0.0
    for i in range(server.num_running):
        request_id = state.running[e, i]
        generated = state.request[e, request_id].generated
        rate = accept_rate(config, request_id, generated, server.now_s)
        left = state.request[e, request_id].output_tokens - generated
        add_powers(config, moments, rate, left)


@kernel
def copy_batch(state, e, ids, work):
    """Copy the unfinished running requests into the work space.

    Returns:
        Their number, and their context tokens.
    """
    size = 0
    context = 0.0
    for i in range(state.server[e].num_running):
        request_id = state.running[e, i]
        request = state.request[e, request_id]
        if request.finished_in < 0:
            ids[size] = request_id
            work[0, size] = request.generated
            work[1, size] = request.stale_tokens
            work[2, size] = request.deficit
            context += request.prompt_tokens + request.generated
            size += 1
    return size, context


@kernel
def expect_rounds(config, ids, work, size, now_s, num_steps, keeps_warm, repeat, moments):
    """Let the copy decode ``repeat`` rounds as expected; return its tokens, fill the moments."""
    moments[:] = 0.0
    tokens = 0.0
    for i in range(size):
        rate = accept_rate(config, ids[i], work[0, i], now_s)
        add_powers(config, moments, rate, MAX_NUM_STEPS + 1)
        if work[1, i] > 0.0:
            rate *= config.cold_start_share
        else:
            rate *= 1.0 - config.worst_loss * work[2, i]
        gain = repeat * expected_tokens(config, rate, num_steps)
        tokens += gain
        work[0, i] += gain
        if not keeps_warm:
            work[1, i] += gain
        elif work[1, i] > 0.0:
            work[2, i] = max(work[2, i], deficit_after_gap(config, work[1, i]))
            work[1, i] = 0.0
        else:
            work[2, i] = deficit_after_tokens(config, work[2, i], gain)
    return tokens


@kernel
def drop_completed(state, e, ids, work, size):
    """Take the requests with all their tokens out of the copy.

    Returns:
        How many are left, and the context tokens of those that left.
    """
    kept = 0
    freed = 0.0
    for i in range(size):
        request = state.request[e, ids[i]]
        if work[0, i] >= request.output_tokens:
            freed += request.prompt_tokens + work[0, i]
        else:
            ids[kept] = ids[i]
            work[:, kept] = work[:, i]
            kept += 1
    return kept, freed


@kernel
def look_ahead(state, costs, e, tier, ids, work, lost):
    """Hold one tier on a copy of the batch and fill ``lost`` with the share lost by each hold.

    Args:
        state: The servers; not changed.
        costs: Their round times.
        e: The server.
        tier: The tier to hold.
        ids: ``(max_running,)`` work space.
        work: ``(3, max_running)`` work space: tokens, gap and deficit of each request.
        lost: ``(len(HOLDS),)``, filled.
    """
    server = state.server[e]
    config = state.config[e]
    # Clients that think are known by the arrivals that they have set.
    closed = config.concurrency > 0 and config.think_s == 0.0
    issued = config.num_requests if closed else server.num_issued
    moments = np.empty(MAX_NUM_STEPS + 1)
    size, context = copy_batch(state, e, ids, work)
    now_s = server.now_s
    upcoming = server.num_issued if closed else server.next_visible
    in_system = float(server.num_in_system)
    queued = 0 if closed else server.num_waiting
    waiting = 0
    lost_s = 0.0
    all_s = 0.0
    rounds = 0
    hold = 0
    for repeat in BLOCKS:
        if size > 0:
            tokens = expect_rounds(
                config,
                ids,
                work,
                size,
                now_s,
                costs.num_steps[tier],
                costs.keeps_warm[tier],
                repeat,
                moments,
            )
            seconds = repeat * full_round_s(costs, config, tier, size, context, tokens / repeat)
            _, _, best = best_rate(costs, config, moments, size, context)
            lost_s += in_system * (seconds - tokens / best)
            all_s += in_system * seconds
            now_s += seconds
            context += tokens
        rounds += repeat
        if rounds == HOLDS[hold]:
            lost[hold] = lost_s / all_s if all_s > 0.0 else 0.0
            hold += 1

        # In a closed loop each client whose request is complete sends its next one.
        before = size
        size, freed = drop_completed(state, e, ids, work, size)
        context -= freed
        waiting += before - size
        if not closed:
            in_system -= before - size
        while size < config.max_running_requests:
            joining = upcoming
            if queued > 0:
                at = server.waiting_head + server.num_waiting - queued
                joining = state.waiting[e, at % state.waiting.shape[1]]
                queued -= 1
            elif upcoming == issued or (closed and waiting == 0):
                break
            elif not closed and state.request[e, upcoming].arrival_s > now_s:
                break
            else:
                waiting -= 1
                upcoming += 1
                if not closed and joining >= server.next_arrival:
                    in_system += 1.0
            ids[size] = joining
            work[0, size] = max(state.request[e, joining].generated, 1)
            work[1:, size] = 0.0
            context += state.request[e, joining].prompt_tokens + work[0, size]
            size += 1


@kernel
def oracle_tier(state, costs, e, ids, work, lost):
    """Return the first tier of the plan that loses the least."""
    best = np.inf
    best_tier = 0
    for k in range(costs.num_steps.shape[0]):
        look_ahead(state, costs, e, k, ids, work, lost)
        for hold in range(HOLDS.shape[0]):
            if lost[hold] < best - 1e-12:
                best = lost[hold]
                best_tier = k
    return best_tier


@kernel(parallel=True)
def run_oracle(state, costs):
    """Run every server to its end under the oracle."""
    for e in prange(state.server.shape[0]):
        size = state.running.shape[1]
        ids = np.empty(size, np.int64)
        work = np.empty((3, size))
        lost = np.empty(HOLDS.shape[0])
        while not state.server[e].done:
            step_server(state, costs, e, oracle_tier(state, costs, e, ids, work, lost))


@kernel(parallel=True)
def run_bound(state, costs):
    """Run every server to its end with the best tier of each round."""
    for e in prange(state.server.shape[0]):
        moments = np.empty(MAX_NUM_STEPS + 1)
        while not state.server[e].done:
            server = state.server[e]
            warm_moments(state, e, moments)
            tier, _, _ = best_rate(
                costs,
                state.config[e],
                moments,
                max(server.num_running, 1),
                server.context_tokens,
            )
            step_server(state, costs, e, tier)
