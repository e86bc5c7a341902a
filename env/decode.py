"""One decode round: how long it takes, and what every request of the batch gets out of it."""

import numpy as np

from env.acceptance_process import accept_rate, deficit_after_gap, deficit_after_tokens
from env.compiled import kernel
from env.counter_rng import STREAM_ACCEPT, STREAM_NOISE, key_of, standard_bell, uniform
from env.outcome import finish_request
from env.scheduler import MIN_NEW_TOKEN_RATIO, NEW_TOKEN_RATIO_DECAY, pass_time


@kernel
def expected_step_s(costs, row, tier, batch_size, context_tokens):
    """Return the calibrated round time in seconds."""
    base_s = costs.base_s[row, tier, batch_size]
    return base_s + costs.context_s[row, tier] * context_tokens


@kernel
def draft_rate(config, request, rate, num_steps):
    """Return the accept rate of a request's drafts, staleness included; 0 if nothing drafts."""
    if num_steps == 0:
        return 0.0
    if request.stale_tokens > 0.0:
        return rate * config.cold_start_share
    return rate * (1.0 - config.worst_loss * request.deficit)


@kernel
def update_draft_state(config, request, num_steps, keeps_warm, tokens):
    """Age or refresh the draft's KV of one request by a round that gave ``tokens`` tokens."""
    if not keeps_warm:
        request.stale_tokens += tokens
    elif request.stale_tokens > 0.0:
        request.deficit = max(request.deficit, deficit_after_gap(config, request.stale_tokens))
        request.stale_tokens = 0.0
    else:
        request.deficit = deficit_after_tokens(config, request.deficit, tokens)


@kernel
def run_decode(state, costs, e, tier):
    """Run one round of a tier over all running requests.

    A request that finished in the last batch is still among them under the overlap schedule: it
    costs time and yields nothing, but its row counts in the accept results, as in SGLang.
    """
    server = state.server[e]
    config = state.config[e]
    running = state.running[e]
    num_steps = costs.num_steps[tier]
    keeps_warm = costs.keeps_warm[tier]
    batch_size = server.num_running

    step_s = expected_step_s(costs, config.cost_row, tier, batch_size, server.context_tokens)
    noise = costs.noise[config.cost_row, tier, batch_size]
    if noise > 0.0:
        key = key_of(config.seed, STREAM_NOISE, np.uint64(0))
        step_s *= max(1.0 + noise * standard_bell(key, server.num_rounds), 0.3)
    start_s = server.now_s
    pass_time(state, e, step_s)
    server.num_batches += 1
    server.num_rounds += 1
    server.new_token_ratio = max(
        server.new_token_ratio - NEW_TOKEN_RATIO_DECAY, MIN_NEW_TOKEN_RATIO
    )

    histogram = state.histogram[e]
    histogram[:] = 0
    for i in range(batch_size):
        request_id = running[i]
        request = state.request[e, request_id]
        correct = 0
        if num_steps > 0:
            rate = accept_rate(config, request_id, request.generated, start_s)
            rate = draft_rate(config, request, rate, num_steps)
            key = key_of(config.seed, STREAM_ACCEPT, np.uint64(request_id))
            while correct < num_steps and uniform(key, request.generated + correct) < rate:
                correct += 1
        histogram[correct] += 1
        if request.finished_in >= 0:
            continue
        tokens = min(correct + 1, request.output_tokens - request.generated)
        server.num_proposed += num_steps
        server.num_correct += correct
        update_draft_state(config, request, num_steps, keeps_warm, tokens)
        request.generated += tokens
        server.output_tokens += tokens
        server.context_tokens += tokens
        server.kv_tokens += tokens
        if request.generated >= request.output_tokens:
            finish_request(state, e, request_id)
