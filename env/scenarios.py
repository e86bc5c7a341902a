"""Acceptance scenarios by name. The rates below are settings to try controllers on, not findings.

| name | what changes | what a controller must do |
| --- | --- | --- |
| ``stationary`` | nothing | find the depth, then stay |
| ``golden`` | nothing; rates by position as measured | the same, where later drafts differ |
| ``mixture`` | each request has its own rate | judge a batch whose mix turns over |
| ``drift`` | one level for all moves with time | follow it |
| ``drift-per-request`` | each request's level moves | know that a batch averages it away |
| ``phase-shift`` | later requests differ: chat, then code | notice it by those that join |
| ``collapse`` | the level falls at once, and comes back | stop soon, look again from off |

``env.acceptance_process`` has the formulas. Every draw is a pure function of seed, request and
output position, so all controllers on one seed meet the same luck.

Where the shape by draft position is measured, it can be had by the name of a preset: the golden
accept lengths of InferenceX (github.com/SemiAnalysisAI/InferenceX, ``golden_al_distribution/``,
Apache-2.0, commit 843c6254; SPEED-Bench coding, 4,096 output tokens). Each depth was measured in
a run of its own. They go to depth 8, tiers here to 7.
"""

from controller.errors import ConfigError
from env.acceptance_process import Acceptance, rates_from_accept_lens
from env.registry import Registry

GOLDEN_ACCEPT_LENS = {
    "kimi-k2.5-eagle3": (1.83, 2.43, 2.88, 3.24, 3.46, 3.62, 3.71, 3.77),
    "kimi-k2.5-eagle3-no-thinking": (1.80, 2.33, 2.75, 3.06, 3.25, 3.43, 3.46),
}
"""Accept lengths of depths 1, 2, ..., bonus token included. Without thinking depth 8 is left out:
measured at 3.51 it gains more than depth 7 did, and no chain of drafts can do that."""

Shape = str | tuple[float, ...]
"""Name of a preset, or factors of the level by draft position."""

SCENARIOS: Registry[Acceptance] = Registry("acceptance scenario")


def shape_of(shape: Shape) -> tuple[float, ...]:
    """Return the factors of the level by draft position: 1, then how later drafts compare.

    Args:
        shape: ``"flat"``, a key of ``GOLDEN_ACCEPT_LENS``, or the factors themselves.
    """
    if not isinstance(shape, str):
        return tuple(float(factor) for factor in shape)
    if shape == "flat":
        return (1.0,)
    rates = _golden_rates(shape)
    return tuple(rate / rates[0] for rate in rates)


def _golden_rates(preset: str) -> tuple[float, ...]:
    if preset not in GOLDEN_ACCEPT_LENS:
        raise ConfigError(
            f"accept rates {preset!r}: expected one of flat, {', '.join(GOLDEN_ACCEPT_LENS)}"
        )
    return rates_from_accept_lens(GOLDEN_ACCEPT_LENS[preset])


@SCENARIOS.register("stationary")
def stationary(rate: float = 0.7, shape: Shape = "flat") -> Acceptance:
    """One rate for all requests, for good."""
    return Acceptance("shared", rate, rate, shape=shape_of(shape))


@SCENARIOS.register("golden")
def golden(preset: str = "kimi-k2.5-eagle3") -> Acceptance:
    """One rate by draft position that gives exactly the accept lengths of a preset."""
    rate = _golden_rates(preset)[0]
    return Acceptance("shared", rate, rate, shape=shape_of(preset))


@SCENARIOS.register("mixture")
def mixture(
    low: float = 0.4, high: float = 0.9, share: float = 0.5, shape: Shape = "flat"
) -> Acceptance:
    """A share of the requests accepts well, the others badly, each at one rate throughout."""
    return Acceptance("mixture", low, high, share=share, shape=shape_of(shape))


@SCENARIOS.register("drift")
def drift(
    low: float = 0.3, high: float = 0.9, period_s: float = 5.0, shape: Shape = "flat"
) -> Acceptance:
    """One level for all requests that moves with time."""
    return Acceptance("shared", low, high, period_s, shape=shape_of(shape))


@SCENARIOS.register("drift-per-request")
def drift_per_request(
    low: float = 0.3, high: float = 0.9, period_tokens: float = 256.0, shape: Shape = "flat"
) -> Acceptance:
    """A level for each request that moves with its output tokens."""
    return Acceptance("per-request", low, high, period_tokens, shape=shape_of(shape))


@SCENARIOS.register("phase-shift")
def phase_shift(
    chat: float = 0.5, code: float = 0.85, requests: int = 200, shape: Shape = "flat"
) -> Acceptance:
    """Blocks of requests, the first of chat, the second of code, and so on."""
    return Acceptance("phases", chat, code, float(requests), shape=shape_of(shape))


@SCENARIOS.register("collapse")
def collapse(
    high: float = 0.8, low: float = 0.05, period_s: float = 10.0, shape: Shape = "flat"
) -> Acceptance:
    """One level for all that falls at once, and comes back after as long."""
    return Acceptance("collapse", low, high, period_s, shape=shape_of(shape))
