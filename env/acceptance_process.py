"""How likely a draft is to be accepted: by time or request, by draft position, by draft state.

Level. Every request has, at every moment, the accept rate of its first draft, between ``low`` and
``high``. How it moves is the kind:

``shared``
    Levels drawn uniformly, one each ``period`` seconds; each holds for half a period, then moves to
    the next along a straight line. All requests follow the one path.
``per-request``
    The same, but each request has a path of its own, over its output tokens.
``mixture``
    Each request keeps one rate: ``high`` for a ``share`` of them, ``low`` for the others.
``phases``
    Requests come in blocks of ``period``, by order of arrival: ``low`` in the first, ``high`` in
    the second, and so on. Who belongs to which block depends on no controller.
``collapse``
    ``high`` for ``period`` seconds, then ``low`` for as long, and so on, for all at once.

Position. The draft at position ``j`` (0-based) is accepted, given that those before it were, with
the level times ``shape[j]``. A flat shape means one rate for all positions.

Stale draft state. Rounds that leave the draft's KV behind (native or cold off) open a gap. On
resuming SGLang drafts once from token 0 and a zero hidden state, so that round accepts at
``cold_start_share`` of the rate; then the rate is short by ``deficit * worst_loss``, where the
deficit starts at ``gap / (gap + gap_scale_tokens)`` and shrinks with every token that the draft
is extended over. That shape follows from what SGLang does; its constants are assumptions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controller.errors import ConfigError
from controller.tiers import MAX_NUM_STEPS
from env.compiled import kernel
from env.counter_rng import STREAM_MIXTURE, item_key, key_of, uniform

SHARED = 0
PER_REQUEST = 1
MIXTURE = 2
PHASES = 3
COLLAPSE = 4
KINDS = {
    "shared": SHARED,
    "per-request": PER_REQUEST,
    "mixture": MIXTURE,
    "phases": PHASES,
    "collapse": COLLAPSE,
}
NUM_POSITIONS = MAX_NUM_STEPS + 1
"""Draft positions that a shape may describe. Tiers use the first ``MAX_NUM_STEPS``."""


@dataclass(frozen=True)
class Acceptance:
    """Accept rate of a draft token, given that those before it were accepted.

    Attributes:
        kind: How the level moves, see the module.
        low: Smallest level, 0 to 1.
        high: Largest level, ``low`` to 1; equal to ``low`` for a constant one.
        period: Seconds if shared or collapse, output tokens if per-request, requests if phases.
        share: Share of the requests at ``high`` in a mixture.
        shape: Factors of the level by draft position, at most ``NUM_POSITIONS``; the last one holds
            for all further positions.
    """

    kind: str = "shared"
    low: float = 0.3
    high: float = 0.9
    period: float = 5.0
    share: float = 0.5
    shape: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"acceptance kind {self.kind!r}: expected one of {list(KINDS)}")
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ConfigError(
                f"accept rates from {self.low} to {self.high}: expected 0 <= low <= high <= 1"
            )
        if not (0.0 < self.period < float("inf")):
            raise ConfigError(f"acceptance period {self.period}: expected a positive number")
        if not 0.0 <= self.share <= 1.0:
            raise ConfigError(f"acceptance share {self.share}: expected 0 to 1")
        if not 1 <= len(self.shape) <= NUM_POSITIONS:
            raise ConfigError(
                f"acceptance shape of {len(self.shape)} positions: expected 1 to {NUM_POSITIONS}"
            )
        # A rate of 1 given as a product of two rounded numbers may be above 1 by a few ulps.
        if not all(0.0 <= factor * self.high <= 1.0 + 1e-12 for factor in self.shape):
            raise ConfigError(
                f"acceptance shape {self.shape}: expected factors that leave {self.high} * factor "
                "between 0 and 1; lower high or the factor"
            )

    def position_factors(self) -> tuple[float, ...]:
        """Return the factors of all ``NUM_POSITIONS`` positions."""
        return self.shape + self.shape[-1:] * (NUM_POSITIONS - len(self.shape))

    def accept_len(self, num_steps: int, level: float | None = None) -> float:
        """Return the expected accept length of a depth, bonus token included.

        Args:
            num_steps: Draft steps, 0 to ``NUM_POSITIONS``.
            level: Accept rate of the first draft; None takes ``high``.
        """
        if not 0 <= num_steps <= NUM_POSITIONS:
            raise ConfigError(f"{num_steps} draft steps: expected 0 to {NUM_POSITIONS}")
        rate = self.high if level is None else level
        reach = total = 1.0
        for factor in self.position_factors()[:num_steps]:
            reach *= rate * factor
            total += reach
        return total


def rates_from_accept_lens(accept_lens: Sequence[float]) -> tuple[float, ...]:
    """Return the conditional accept rate of each draft position.

    The accept length of depth ``k`` is one plus the sum over ``j = 1..k`` of the product of the
    first ``j`` rates, so ``L[k] - L[k-1]`` is that product, and the quotient of two neighbouring
    differences is a rate.

    Args:
        accept_lens: ``(num_depths,)`` accept lengths of depths 1, 2, ..., bonus token included.

    Raises:
        ConfigError: If no chain of drafts can have these lengths.

    >>> [round(rate, 4) for rate in rates_from_accept_lens([1.8, 2.2, 2.3])]
    [0.8, 0.5, 0.25]
    """
    if not 1 <= len(accept_lens) <= NUM_POSITIONS:
        raise ConfigError(
            f"{len(accept_lens)} accept lengths: expected those of depths 1 to "
            f"{NUM_POSITIONS} at most"
        )
    rates = []
    before, reach = 1.0, 1.0
    for depth, accept_len in enumerate(accept_lens, start=1):
        gain = accept_len - before
        if not 0.0 < gain <= reach * (1.0 + 1e-9):
            raise ConfigError(
                f"accept length {accept_len} at depth {depth}: expected more than {before:g} and "
                f"at most {before + reach:g}, since a depth adds what its last draft adds"
            )
        rates.append(min(gain / reach, 1.0))
        before, reach = accept_len, gain
    return tuple(rates)


@dataclass(frozen=True)
class DraftRecovery:
    """What an off stretch costs the acceptance afterwards. Assumed constants, see the module.

    Attributes:
        cold_start_share: Share of the accept rate left in the first round after the stretch.
        worst_loss: Share of the accept rate lost after a very long stretch.
        gap_scale_tokens: Gap, in tokens a request, that loses half of ``worst_loss``.
        recovery_tokens: Tokens of drafting after which half of the deficit is left.
    """

    cold_start_share: float = 0.0
    worst_loss: float = 0.5
    gap_scale_tokens: float = 32.0
    recovery_tokens: float = 8.0

    def __post_init__(self) -> None:
        shares = (self.cold_start_share, self.worst_loss)
        if not all(0.0 <= share <= 1.0 for share in shares):
            raise ConfigError(f"draft recovery shares {shares}: expected 0 to 1")
        if not (self.gap_scale_tokens > 0.0 and self.recovery_tokens > 0.0):
            raise ConfigError("draft recovery token counts: expected positive numbers")


@kernel
def same_for_all(config):
    """Tell whether all requests have one accept rate at any moment."""
    if config.accept_high <= config.accept_low:
        return True
    return config.accept_kind == SHARED or config.accept_kind == COLLAPSE


@kernel
def accept_rate(config, request_id, position, now_s):
    """Return the accept rate of a warm draft's first token, before any staleness.

    Args:
        config: Record of ``env.state.CONFIG``.
        request_id: Index of the request.
        position: Output tokens that it has.
        now_s: Time in seconds.
    """
    if config.accept_high <= config.accept_low:
        return config.accept_low
    kind = config.accept_kind
    if kind == SHARED:
        item = np.uint64(0)
        at = now_s / config.accept_period
    elif kind == PER_REQUEST:
        item = np.uint64(request_id + 1)
        at = position / config.accept_period
    elif kind == MIXTURE:
        luck = uniform(key_of(config.seed, STREAM_MIXTURE, np.uint64(request_id)), 0)
        return config.accept_high if luck < config.accept_share else config.accept_low
    else:
        at = (now_s if kind == COLLAPSE else float(request_id)) / config.accept_period
        odd = np.int64(at) % 2 == 1
        return config.accept_high if odd == (kind == PHASES) else config.accept_low
    knot = np.int64(at)
    share = max(2.0 * (at - knot) - 1.0, 0.0)
    key = item_key(config.drift_stream, item)
    left = uniform(key, knot)
    right = uniform(key, knot + 1)
    level = left + share * (right - left)
    return config.accept_low + (config.accept_high - config.accept_low) * level


@kernel
def deficit_after_gap(config, stale_tokens):
    """Return the deficit (0 to 1) with which drafting resumes after a gap."""
    return stale_tokens / (stale_tokens + config.gap_scale_tokens)


@kernel
def deficit_after_tokens(config, deficit, tokens):
    """Return the deficit after the draft was extended over ``tokens`` more tokens."""
    if deficit < 1e-12:
        return 0.0
    return deficit * 0.5 ** (tokens / config.recovery_tokens)
