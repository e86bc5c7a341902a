"""What an untrained policy does: it follows the cost model, holds what it took up, and probes.

The rule is planted in the first hidden units of the network (residual policy learning, Silver et
al., arXiv:1812.06298), so that training refines it and a policy that is not trained at all is the
rule itself. Three things that the cost model misses are in it, since a learner finds them only by
long detours:

Hold. A depth that was just taken up is held for some rounds: after an off stretch the first round
drafts on a stale state and, under the overlap schedule, tells nothing before two more have started,
so that a probe of one round costs its price and yields no evidence.

Probe. While off, no evidence comes in. The longer that lasts, and the more requests have joined
meanwhile, the larger a bonus depths get, until it outweighs how far behind the estimates say they
are: the worse a depth looked, the rarer it is tried.

Promise. What a depth would gain were nearly all drafts accepted (``ceiling``) needs no evidence: it
follows from costs. The less that is, the rarer a probe; where nothing can be won, there is none.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from controller.features import GAIN_SCALE, GLOBAL_FEATURES, TIER_FEATURES

PRIOR_FEATURES = ("gain_fast", "gain_medium", "gain_slow")
"""Tier features whose skip weights add up to ``prior`` for each unit of ln(tokens/s)."""
DEFAULT_PRIOR = 40.0
NUM_UNITS = 3
"""Hidden units, in both layers, that the rule takes."""


@dataclass(frozen=True)
class StartingRule:
    """What an untrained policy does beside following the cost model, in logits at DEFAULT_PRIOR.

    There 0.4 is one percent of tokens/s. The constants are the best of 64 drawn at random over wide
    ranges, by the mean log objective of 1,352 short cells in rounds of elimination: the loads and
    scenarios of the tuning part of ``training.protocol`` and of ``training.family``, on the H200
    and on systems drawn around it. No measured system that the protocol holds out was looked at.
    The best three were within 0.1% of each other.

    Attributes:
        keep: How far the current tier is ahead; switches that win less are not worth it.
        hold: How far a depth is ahead in the round after it was taken up.
        hold_rounds: Rounds until nothing is left of that.
        probe: Gain of depths for each doubling of the rounds without speculation.
        patience: log2 of the rounds without speculation at which that begins.
        unseen: Doublings that a batch of nothing but unknown requests counts for.
        promise: Gain over off, ln(tokens/s) were 95% of all drafts accepted, below which a depth
            is probed more rarely.
        doubt: Doublings of the rounds without speculation that each 10% short of it takes back.
    """

    keep: float = 0.5
    hold: float = 25.0
    hold_rounds: float = 7.0
    probe: float = 3.2
    patience: float = 5.3
    unseen: float = 2.3
    promise: float = 0.22
    doubt: float = 1.2


def plant(weights: Mapping[str, Tensor], rule: StartingRule, scale: float) -> None:
    """Set the weights of the first hidden units, in both layers, so that they follow a rule.

    Args:
        weights: Parameters under their checkpoint names; changed.
        rule: What the units do.
        scale: Factor of its logits.
    """
    common = {feature.name: i for i, feature in enumerate(GLOBAL_FEATURES)}
    tier = {feature.name: i for i, feature in enumerate(TIER_FEATURES)}
    for name in ("global.weight", "tier.weight", "hidden.bias", "second.weight", "second.bias"):
        weights[name][:NUM_UNITS] = 0.0
    held, probed, doubted = range(NUM_UNITS)
    for unit, logits in ((held, rule.hold), (probed, rule.probe), (doubted, 0.0)):
        weights["second.weight"][unit, unit] = 1.0
        weights["logit.weight"][unit] = scale * logits
    # relu(1 for the current tier if it drafts, less what the rounds since the switch use up).
    weights["tier.weight"][held, tier["current"]] = 1.0
    weights["tier.weight"][held, tier["off"]] = -2.0
    used_up = 12.0 / math.log2(1.0 + rule.hold_rounds)
    weights["global.weight"][held, common["since_switch"]] = -used_up
    # relu(log2(rounds without speculation) and what stands for more of them, less the patience).
    weights["tier.weight"][probed, tier["off"]] = -100.0
    weights["global.weight"][probed, common["since_speculation"]] = 12.0
    weights["global.weight"][probed, common["unseen"]] = rule.unseen
    weights["hidden.bias"][probed] = -rule.patience
    # relu(what a depth is short of the promise that a probe asks for).
    weights["tier.weight"][doubted, tier["ceiling"]] = -1.0
    weights["hidden.bias"][doubted] = GAIN_SCALE * rule.promise
    weights["second.weight"][probed, doubted] = -rule.doubt
    weights["skip.weight"][tier["current"]] = scale * rule.keep
