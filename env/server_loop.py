"""The loop of one simulated server: batches until the next decision, then one decode round.

A decision is due when a decode round is about to be launched. Under the overlap schedule a batch
is launched before the result of the one before it is processed; so a decision does not know the
last round's accept results, and a request that the last round finished is still in the batch.
"""

import numpy as np

from controller.features import fill_observation
from controller.memory import CURRENT_TIER, record_join, record_launch, record_result, reset_memory
from env.compiled import kernel
from env.counter_rng import STREAM_ACCEPT, STREAM_DRIFT, stream_key
from env.decode import run_decode
from env.ideal import expected_step_s
from env.outcome import drop_finished
from env.scheduler import (
    NEW_TOKEN_RATIO,
    decay_new_token_ratio,
    pull_arrivals,
    retract,
    run_prefill,
)


@kernel
def reset_server(state, e):
    """Empty a server. Its config and request table are already in place."""
    server = state.server[e]
    config = state.config[e]
    config.accept_stream = stream_key(config.seed, STREAM_ACCEPT)
    config.drift_stream = stream_key(config.seed, STREAM_DRIFT)
    server.now_s = 0.0
    server.visible_s = 0.0
    server.num_running = 0
    server.num_waiting = 0
    server.waiting_head = 0
    server.next_visible = 0
    server.next_arrival = 0
    server.num_finished = 0
    server.num_in_system = 0
    server.num_lingering = 0
    server.chunked = -1
    server.context_tokens = 0
    server.kv_tokens = 0
    server.new_token_ratio = NEW_TOKEN_RATIO
    server.batch_full = False
    server.output_tokens = 0
    server.expected_tokens = 0.0
    server.ideal_tokens = 0.0
    server.lost_s = 0.0
    server.num_rounds = 0
    server.num_batches = 0
    server.num_switches = 0
    server.num_retracted = 0
    server.num_proposed = 0
    server.num_correct = 0
    server.pending_tier = -1
    server.pending_cold_start = False
    server.pending_batch = -1
    server.area = 0.0
    server.slo_misses = 0
    server.done = False
    for i in range(config.num_requests):
        request = state.request[e, i]
        request.first_token_s = np.nan
        request.finish_s = np.nan
        request.generated = 0
        request.prefilled = 0
        request.stale_tokens = 0.0
        request.deficit = 0.0
        request.finished_in = -1
    server.num_issued = config.num_requests
    if config.concurrency > 0:
        server.num_issued = min(config.concurrency, config.num_requests)
    while (
        server.next_arrival < server.num_issued
        and state.request[e, server.next_arrival].arrival_s <= 0.0
    ):
        server.next_arrival += 1
        server.num_in_system += 1
    state.tier_rounds[e, :] = 0
    reset_memory(
        state.memory[e],
        state.tries[e],
        state.successes[e],
        state.recent[e],
        state.ages[e],
        config.initial_tier,
    )


@kernel
def process_result(state, costs, e):
    """Do what the scheduler does once the pending batch's result has reached the CPU."""
    server = state.server[e]
    if server.pending_tier >= 0:
        record_result(
            state.tries[e],
            state.successes[e],
            state.recent[e],
            server.pending_tier,
            costs.num_steps[server.pending_tier],
            server.pending_cold_start,
            state.histogram[e],
        )
        server.pending_tier = -1
    if server.pending_batch >= 0:
        drop_finished(state, e, server.pending_batch)
        server.pending_batch = -1


@kernel
def is_done(state, e):
    """Tell whether the episode has reached its end."""
    server = state.server[e]
    config = state.config[e]
    if config.concurrency > 0 and server.output_tokens >= config.token_target:
        return True
    return server.num_finished >= config.num_requests


@kernel
def after_prefill(state, costs, e, joined):
    """Do the bookkeeping of a prefill batch that ``joined`` requests came out of."""
    server = state.server[e]
    process_result(state, costs, e)
    server.pending_batch = server.num_batches
    if joined > 0:
        record_join(state.memory[e], state.tries[e], state.successes[e], joined, server.num_running)
    if not state.config[e].overlap:
        process_result(state, costs, e)


@kernel
def wait_for_arrival(state, costs, e):
    """Let an idle server see what it has not seen yet, and then sleep until the next arrival."""
    server = state.server[e]
    if server.pending_batch >= 0:
        process_result(state, costs, e)
    elif server.visible_s < server.now_s:
        server.visible_s = server.now_s
    else:
        arrival_s = state.request[e, server.next_visible].arrival_s
        if server.next_visible == server.next_arrival:
            server.next_arrival += 1
            server.num_in_system += 1
        server.new_token_ratio = NEW_TOKEN_RATIO
        server.now_s = max(server.now_s, arrival_s)
        server.visible_s = server.now_s


@kernel
def advance(state, costs, e):
    """Run prefill batches and idle time until a decode round is due or the episode is over."""
    server = state.server[e]
    while True:
        if is_done(state, e):
            server.done = True
            return
        pull_arrivals(state, e)
        joined = run_prefill(state, costs, e)
        if joined >= 0:
            after_prefill(state, costs, e, joined)
        elif server.num_running > 0:
            if not retract(state, e):
                decay_new_token_ratio(server)
            return
        else:
            wait_for_arrival(state, costs, e)


@kernel
def step_server(state, costs, e, tier):
    """Run one decode round of ``tier`` and go on to the next decision."""
    server = state.server[e]
    memory = state.memory[e]
    if server.num_rounds > 0 and memory[CURRENT_TIER] != tier:
        server.num_switches += 1
    state.tier_rounds[e, tier] += 1
    cold_start = record_launch(
        memory,
        state.ages[e],
        state.recent[e],
        tier,
        costs.num_steps[tier],
        costs.keeps_warm[tier],
        server.num_running,
    )
    # The pending round's result is still unprocessed while this one is put together and runs, and
    # its histogram is overwritten by it: process the statistics first, the finished rows after.
    previous_batch = server.pending_batch
    server.pending_batch = -1
    process_result(state, costs, e)
    run_decode(state, costs, e, tier)
    if previous_batch >= 0:
        drop_finished(state, e, previous_batch)
    server.pending_tier = tier
    server.pending_cold_start = cold_start
    server.pending_batch = server.num_batches
    if not state.config[e].overlap:
        process_result(state, costs, e)
    advance(state, costs, e)


@kernel
def observe_server(state, costs, e, out, step_s, scratch):
    """Fill the observation of the decision that is due."""
    server = state.server[e]
    config = state.config[e]
    num_tiers = costs.num_steps.shape[0]
    batch_size = max(server.num_running, 1)
    for k in range(num_tiers):
        step_s[k] = expected_step_s(costs, config.cost_row, k, batch_size, server.context_tokens)
    fill_observation(
        out,
        batch_size,
        server.num_waiting,
        server.context_tokens,
        server.kv_tokens / config.kv_capacity_tokens,
        config.max_running_requests,
        state.memory[e],
        state.tries[e],
        state.successes[e],
        state.recent[e],
        state.ages[e],
        costs.num_steps,
        step_s,
        costs.prefill_base_s[config.cost_row],
        scratch,
    )
