"""The best that one round could do: what time is lost against."""

import math

from controller.tiers import MAX_NUM_STEPS
from env.compiled import kernel


@kernel
def expected_step_s(costs, row, tier, batch_size, context_tokens):
    """Return the calibrated round time in seconds."""
    base_s = costs.base_s[row, tier, batch_size]
    return base_s + costs.context_s[row, tier] * context_tokens


@kernel
def add_powers(config, moments, rate, tokens_left):
    """Add the chance of ``j`` correct drafts or more to ``moments[j]``, for each with room left.

    With a flat shape that is ``rate ** j``.
    """
    power = 1.0
    for j in range(min(MAX_NUM_STEPS + 1, tokens_left)):
        moments[j] += power
        power *= rate * config.accept_shape[j]


@kernel
def full_round_s(costs, config, tier, batch_size, context_tokens, tokens):
    """Return a round's time with its part of the prefill batches that interrupt decoding.

    In a closed loop a round that completes a request lets the next one in, whose prefill batch has
    a fixed cost; the more requests a round completes, the more share it. With ``tokens`` a round
    and requests of mean length ``L``, some request completes in a round with probability
    ``1 - exp(-tokens / L)``. In an open loop prefill follows arrivals, whatever the tier.
    """
    step_s = expected_step_s(costs, config.cost_row, tier, batch_size, context_tokens)
    if config.concurrency == 0:
        return step_s
    completes = 1.0 - math.exp(-tokens / config.mean_output_tokens)
    return step_s + costs.prefill_base_s[config.cost_row] * completes


@kernel
def best_rate(costs, config, moments, batch_size, context_tokens):
    """Return the best tier, its expected tokens, and those per second, were every draft warm.

    Args:
        costs: Round times.
        config: Record of ``env.state.CONFIG``.
        moments: ``(MAX_NUM_STEPS + 1,)`` sums over the batch of :func:`add_powers`, so
            that depth ``k`` is expected to yield ``moments[0] + ... + moments[k]`` tokens.
        batch_size: Rows of the batch.
        context_tokens: Summed over the batch.
    """
    best = -1.0
    best_tier = 0
    best_tokens = 0.0
    for k in range(costs.num_steps.shape[0]):
        tokens = 0.0
        for j in range(costs.num_steps[k] + 1):
            tokens += moments[j]
        rate = tokens / full_round_s(costs, config, k, batch_size, context_tokens, tokens)
        if rate > best:
            best = rate
            best_tier = k
            best_tokens = tokens
    return best_tier, best_tokens, best
