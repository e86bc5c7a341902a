"""Two references that know what no controller can: the oracle and the bound.

Both know the accept rates, the costs and the arrivals, but not the random draws.

Oracle: before each round it runs a copy of the batch ahead, in expectation, once for every tier
held over the next 64 rounds, and looks at the plan after 1, 2, 4, ... 64 of them. Request time lost
by a plan is counted against the best that a warm draft could do in the same state,

    loss = requests in system * (seconds - tokens / best tokens per second),

so that plans of different length can be compared while load and acceptance change; the plan with
the smallest share of its request time lost wins, and its first round is run.

Bound: the tier with the most expected tokens per second in this round, with a draft that never goes
stale. Free switching makes the one-round choice optimal, so no controller can do better on average
in a closed loop; with real switching costs it is out of reach.
"""

import numpy as np
from numba import prange

from controller.tiers import MAX_NUM_STEPS
from env.acceptance_process import accept_rate, deficit_after_gap, deficit_after_tokens
from env.compiled import kernel
from env.decode import draft_rate, expected_step_s
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
        add_powers(moments, rate)


@kernel
def add_powers(moments, rate):
    """Add ``rate ** j`` to ``moments[j]`` for every ``j``."""
    power = 1.0
    for j in range(MAX_NUM_STEPS + 1):
        moments[j] += power
        power *= rate


@kernel
def best_rate(costs, row, moments, batch_size, context_tokens):
    """Return the best tier and its tokens per second for a batch with these warm moments."""
    best = -1.0
    best_tier = 0
    for k in range(costs.num_steps.shape[0]):
        tokens = 0.0
        for j in range(costs.num_steps[k] + 1):
            tokens += moments[j]
        rate = tokens / expected_step_s(costs, row, k, batch_size, context_tokens)
        if rate > best:
            best = rate
            best_tier = k
    return best_tier, best


@kernel
def look_ahead(state, costs, e, tier, ids, generated, stale, deficit, lost):
    """Hold one tier on a copy of the batch and fill ``lost`` with the share lost by each hold.

    Args:
        state: The servers; not changed.
        costs: Their round times.
        e: The server.
        tier: The tier to hold.
        ids: ``(max_running,)`` work space, like the next three.
        generated: Output tokens, as expected values.
        stale: Gap of each request's draft, in tokens.
        deficit: Deficit of each request's draft.
        lost: ``(len(HOLDS),)``, filled.
    """
    server = state.server[e]
    config = state.config[e]
    num_steps = costs.num_steps[tier]
    keeps_warm = costs.keeps_warm[tier]
    now_s = server.now_s
    size = 0
    context = 0.0
    for i in range(server.num_running):
        request_id = state.running[e, i]
        request = state.request[e, request_id]
        if request.finished_in >= 0:
            continue
        ids[size] = request_id
        generated[size] = request.generated
        stale[size] = request.stale_tokens
        deficit[size] = request.deficit
        context += request.prompt_tokens + request.generated
        size += 1
    waiting = 0
    upcoming = server.next_visible if config.concurrency == 0 else server.num_issued
    in_system = float(server.num_in_system)
    moments = np.empty(MAX_NUM_STEPS + 1)
    lost_time = 0.0
    all_time = 0.0
    rounds = 0
    hold = 0
    for block in range(BLOCKS.shape[0]):
        repeat = BLOCKS[block]
        if size > 0:
            moments[:] = 0.0
            tokens = 0.0
            step_s = expected_step_s(costs, config.cost_row, tier, size, context)
            for i in range(size):
                rate = accept_rate(config, ids[i], generated[i], now_s)
                add_powers(moments, rate)
                if num_steps == 0:
                    gain = 1.0
                else:
                    if stale[i] > 0.0:
                        rate *= config.cold_start_share
                    else:
                        rate *= 1.0 - config.worst_loss * deficit[i]
                    gain = 1.0
                    power = 1.0
                    for _ in range(num_steps):
                        power *= rate
                        gain += power
                gain *= repeat
                tokens += gain
                generated[i] += gain
                if not keeps_warm:
                    stale[i] += gain
                elif stale[i] > 0.0:
                    deficit[i] = max(deficit[i], deficit_after_gap(config, stale[i]))
                    stale[i] = 0.0
                else:
                    deficit[i] = deficit_after_tokens(config, deficit[i], gain)
            _, best = best_rate(costs, config.cost_row, moments, size, context)
            seconds = repeat * step_s
            lost_time += in_system * (seconds - tokens / best)
            all_time += in_system * seconds
            now_s += seconds
            context += tokens
        rounds += repeat
        if rounds == HOLDS[hold]:
            lost[hold] = lost_time / all_time if all_time > 0.0 else 0.0
            hold += 1

        # Those with their last token leave; in a closed loop each client sends its next request.
        kept = 0
        for i in range(size):
            request = state.request[e, ids[i]]
            if generated[i] >= request.output_tokens:
                context -= request.prompt_tokens + generated[i]
                if config.concurrency > 0:
                    waiting += 1
                else:
                    in_system -= 1.0
            else:
                ids[kept] = ids[i]
                generated[kept] = generated[i]
                stale[kept] = stale[i]
                deficit[kept] = deficit[i]
                kept += 1
        size = kept
        while size < config.max_running_requests and upcoming < config.num_requests:
            if config.concurrency > 0:
                if waiting == 0:
                    break
                waiting -= 1
            else:
                if state.request[e, upcoming].arrival_s > now_s:
                    break
                in_system += 1.0
            ids[size] = upcoming
            generated[size] = 1.0
            stale[size] = 0.0
            deficit[size] = 0.0
            context += state.request[e, upcoming].prompt_tokens + 1
            upcoming += 1
            size += 1


@kernel
def oracle_tier(state, costs, e, ids, work, lost):
    """Return the first tier of the plan that loses the least."""
    best = np.inf
    best_tier = 0
    for k in range(costs.num_steps.shape[0]):
        look_ahead(state, costs, e, k, ids, work[0], work[1], work[2], lost)
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
            tier, _ = best_rate(
                costs,
                state.config[e].cost_row,
                moments,
                max(server.num_running, 1),
                server.context_tokens,
            )
            step_server(state, costs, e, tier)
