"""One decode round: how long it takes, and what every request of the batch gets out of it."""

import numpy as np

from env.acceptance_process import accept_rate, deficit_after_gap, same_for_all
from env.compiled import kernel
from env.counter_rng import STREAM_NOISE, item_key, key_of, standard_bell, uniform
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
    elif request.deficit > 0.0:
        # ``deficit_after_tokens`` for the few token counts that a round can give.
        kept = request.deficit * config.recovery[tokens]
        request.deficit = kept if request.deficit >= 1e-12 else 0.0


@kernel
def draw_correct(config, key, position, rate, num_steps):
    """Draw how many of the drafts at a position are correct.

    All drafts are drawn, also those after a wrong one: where the first wrong one is cannot be
    predicted, and a mispredicted branch costs more than the draws.
    """
    correct = 0
    right = 1
    for ahead in range(num_steps):
        right &= uniform(key, position + ahead) < rate * config.accept_shape[ahead]
        correct += right
    return correct


@kernel
def expected_tokens(config, rate, num_steps):
    """Return the expected accept length, bonus token included."""
    power = 1.0
    total = 1.0
    for position in range(num_steps):
        power *= rate * config.accept_shape[position]
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
def draw_results(state, e, num_steps, now_s):
    """Draw how many drafts each row of the batch has correct.

    Fills ``state.rates`` with the accept rate of a warm draft and the rate at hand, ``state.drawn``
    with the correct drafts, and the histogram, which counts rows of finished requests too.
    """
    config = state.config[e]
    running = state.running[e]
    warm = state.rates[e, 0]
    now = state.rates[e, 1]
    drawn = state.drawn[e]
    histogram = state.histogram[e]
    histogram[:] = 0
    one_rate = same_for_all(config)
    rate = accept_rate(config, 0, 0, now_s)
    for i in range(state.server[e].num_running):
        request_id = running[i]
        request = state.request[e, request_id]
        if not one_rate:
            rate = accept_rate(config, request_id, request.generated, now_s)
        warm[i] = rate
        now[i] = draft_rate(config, request, rate, num_steps)
        key = item_key(config.accept_stream, np.uint64(request_id))
        drawn[i] = draw_correct(config, key, request.generated, now[i], num_steps)
        histogram[drawn[i]] += 1


@kernel
def sum_moments(state, e, moments):
    """Sum the powers of the warm accept rates of the unfinished rows, see ``ideal.add_powers``."""
    config = state.config[e]
    running = state.running[e]
    warm = state.rates[e, 0]
    moments[:] = 0.0
    for i in range(state.server[e].num_running):
        request = state.request[e, running[i]]
        if request.finished_in < 0:
            add_powers(config, moments, warm[i], request.output_tokens - request.generated)


@kernel
def credit_tokens(state, e, num_steps, keeps_warm):
    """Give every unfinished row its tokens.

    Returns:
        The tokens that were to be expected, drafts counted by their accept rate.
    """
    server = state.server[e]
    config = state.config[e]
    running = state.running[e]
    now = state.rates[e, 1]
    drawn = state.drawn[e]
    before = server.expected_tokens
    expected = before
    new_tokens = 0
    rows = 0
    correct = 0
    for i in range(server.num_running):
        request_id = running[i]
        request = state.request[e, request_id]
        if request.finished_in >= 0:
            continue
        left = request.output_tokens - request.generated
        tokens = min(drawn[i] + 1, left)
        rows += 1
        correct += drawn[i]
        new_tokens += tokens
        expected += expected_tokens(config, now[i], min(num_steps, left - 1))
        update_draft_state(config, request, num_steps, keeps_warm, tokens)
        request.generated += tokens
        if tokens == left:
            finish_request(state, e, request_id)
    server.num_proposed += rows * num_steps
    server.num_correct += correct
    server.expected_tokens = expected
    server.output_tokens += new_tokens
    server.context_tokens += new_tokens
    server.kv_tokens += new_tokens
    return expected - before


@kernel
def run_decode(state, costs, e, tier):
    """Run one round of a tier over all running requests.

    A request that finished in the last batch is still among them under the overlap schedule: it
    costs time and yields nothing, but its row counts in the accept results, as in SGLang where
    requests end at a stop token (one that ends at its length limit leaves a round earlier there).
    """
    server = state.server[e]
    config = state.config[e]
    num_steps = costs.num_steps[tier]
    batch_size = server.num_running
    context_tokens = server.context_tokens
    in_system = server.num_in_system
    start_s = server.now_s

    step_s = expected_step_s(costs, config.cost_row, tier, batch_size, context_tokens)
    pass_time(state, e, noisy(costs, config, tier, batch_size, server.num_rounds, step_s))
    server.num_batches += 1
    server.num_rounds += 1

    draw_results(state, e, num_steps, start_s)
    moments = state.moments[e]
    sum_moments(state, e, moments)
    expected = credit_tokens(state, e, num_steps, costs.keeps_warm[tier])
    if moments[0] > 0.0:
        took_s = full_round_s(costs, config, tier, batch_size, context_tokens, expected)
        _, ideal_tokens, best = best_rate(costs, config, moments, batch_size, context_tokens)
        server.ideal_tokens += ideal_tokens
        server.lost_s += in_system * (took_s - expected / best)
