"""How likely a draft is to be accepted: a rate that drifts, and a draft state that can go stale.

Drift: levels drawn uniformly from [low, high], one each ``period``; each holds for half a period,
then moves to the next along a straight line. With ``shared`` acceptance all requests follow one
path over time in seconds; with ``per-request`` each has a path of its own over its output tokens.

Stale draft state: rounds that leave the draft's KV behind (native or cold off) open a gap. On
resuming SGLang drafts once from token 0 and a zero hidden state, so that round accepts at
``cold_start_share`` of the rate; then the rate is short by ``deficit * worst_loss``, where the
deficit starts at ``gap / (gap + gap_scale_tokens)`` and shrinks with every token that the draft
is extended over. That shape follows from what SGLang does; its constants are assumptions.
"""

from dataclasses import dataclass

import numpy as np

from controller.errors import ConfigError
from env.compiled import kernel
from env.counter_rng import STREAM_DRIFT, key_of, uniform

SHARED = 0
PER_REQUEST = 1
KINDS = {"shared": SHARED, "per-request": PER_REQUEST}


@dataclass(frozen=True)
class Acceptance:
    """Accept rate of a draft token, given that those before it were accepted.

    Attributes:
        kind: ``"shared"`` or ``"per-request"``.
        low: Smallest rate, 0 to 1.
        high: Largest rate, ``low`` to 1; equal to ``low`` for a constant rate.
        period: Distance of two levels: seconds if shared, output tokens if per request.
    """

    kind: str = "shared"
    low: float = 0.3
    high: float = 0.9
    period: float = 5.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"acceptance kind {self.kind!r}: expected one of {list(KINDS)}")
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ConfigError(
                f"accept rates from {self.low} to {self.high}: expected 0 <= low <= high <= 1"
            )
        if not (0.0 < self.period < float("inf")):
            raise ConfigError(f"acceptance period {self.period}: expected a positive number")


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
def accept_rate(config, request_id, position, now_s):
    """Return the accept rate of a warm draft, before any staleness.

    Args:
        config: Record of ``env.state.CONFIG``.
        request_id: Index of the request.
        position: Output tokens that it has.
        now_s: Time in seconds.
    """
    if config.accept_high <= config.accept_low:
        return config.accept_low
    if config.accept_kind == 0:
        item = np.uint64(0)
        at = now_s / config.accept_period
    else:
        item = np.uint64(request_id + 1)
        at = position / config.accept_period
    knot = np.int64(at)
    share = max(2.0 * (at - knot) - 1.0, 0.0)
    key = key_of(config.seed, STREAM_DRIFT, item)
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
