"""One decode round: how long it takes, and what every request of the batch gets out of it."""

import numpy as np

from controller.tiers import MAX_NUM_STEPS
from env.acceptance_process import accept_rate, deficit_after_gap, deficit_after_tokens
from env.compiled import kernel
from env.counter_rng import STREAM_ACCEPT, STREAM_NOISE, key_of, standard_bell, uniform
from env.ideal import add_powers, best_rate, expected_step_s, full_round_s
from env.outcome import finish_request
from env.scheduler import pass_time


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
def draw_correct(config, request_id, position, rate, num_steps):
    """Draw how many of the drafts at a position are correct."""
    key = key_of(config.seed, STREAM_ACCEPT, np.uint64(request_id))
    correct = 0
    while correct < num_steps and uniform(key, position + correct) < rate:
        correct += 1
    return correct


@kernel
def expected_tokens(rate, num_steps):
    """Return the expected accept length, bonus token included."""
    power = 1.0
    total = 1.0
    for _ in range(num_steps):
        power *= rate
        total += power
    return total


@kernel
def noisy(costs, config, tier, batch_size, round_number, step_s):
    """Return a round time with the measured scatter."""
    noise = costs.noise[config.cost_row, tier, batch_size]
    if noise <= 0.0:
        return step_s
    key = key_of(config.seed, STREAM_NOISE, np.uint64(0))
    return step_s * max(1.0 + noise * standard_bell(key, round_number), 0.3)


@kernel
def run_decode(state, costs, e, tier):
    """Run one round of a tier over all running requests.

    A request that finished in the last batch is still among them under the overlap schedule: it
    costs time and yields nothing, but its row counts in the accept results, as in SGLang where
    requests end at a stop token (one that ends at its length limit leaves a round earlier there).
    """
    server = state.server[e]
    config = state.config[e]
    running = state.running[e]
    num_steps = costs.num_steps[tier]
    keeps_warm = costs.keeps_warm[tier]
    batch_size = server.num_running
    context_tokens = server.context_tokens
    in_system = server.num_in_system
    start_s = server.now_s

    step_s = expected_step_s(costs, config.cost_row, tier, batch_size, context_tokens)
    pass_time(state, e, noisy(costs, config, tier, batch_size, server.num_rounds, step_s))
    server.num_batches += 1
    server.num_rounds += 1

    histogram = state.histogram[e]
    histogram[:] = 0
    expected_before = server.expected_tokens
    moments = np.zeros(MAX_NUM_STEPS + 1)
    for i in range(batch_size):
        request_id = running[i]
        request = state.request[e, request_id]
        warm_rate = accept_rate(config, request_id, request.generated, start_s)
        rate = draft_rate(config, request, warm_rate, num_steps)
        correct = draw_correct(config, request_id, request.generated, rate, num_steps)
        histogram[correct] += 1
        if request.finished_in >= 0:
            continue
        left = request.output_tokens - request.generated
        tokens = min(correct + 1, left)
        add_powers(moments, warm_rate, left)
        server.num_proposed += num_steps
        server.num_correct += correct
        server.expected_tokens += expected_tokens(rate, min(num_steps, left - 1))
        update_draft_state(config, request, num_steps, keeps_warm, tokens)
        request.generated += tokens
        server.output_tokens += tokens
        server.context_tokens += tokens
        server.kv_tokens += tokens
        if request.generated >= request.output_tokens:
            finish_request(state, e, request_id)
    if moments[0] > 0.0:
        expected = server.expected_tokens - expected_before
        took_s = full_round_s(costs, config, tier, batch_size, context_tokens, expected)
        _, ideal_tokens, best = best_rate(costs, config, moments, batch_size, context_tokens)
        server.ideal_tokens += ideal_tokens
        server.lost_s += in_system * (took_s - expected / best)
