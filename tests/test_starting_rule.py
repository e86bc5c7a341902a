"""What a policy does before any training: the cost model's choice, holding, and probing."""

import math

import numpy as np
import pytest
import torch

from controller.features import (
    GAIN_SCALE,
    GLOBAL_FEATURES,
    NUM_GLOBAL,
    NUM_PER_TIER,
    TIER_FEATURES,
)
from controller.policy import NumpyPolicy
from training.network import TierScorer
from training.starting_rule import DEFAULT_PRIOR, StartingRule

OFF, DEPTH_1, DEPTH_3 = range(3)


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(3)
    return NumpyPolicy(TierScorer(64, 64, DEFAULT_PRIOR).arrays())


def choice(policy, current, gains, since_switch=1000, since_speculation=0, unseen=0.0, promise=0.5):
    """Return the tier chosen by a server with tiers off, 1 and 3; gains in ln(tokens/s)."""
    common = {feature.name: 0.3 for feature in GLOBAL_FEATURES}
    common |= {
        "speculating": float(current != OFF),
        "since_switch": math.log2(1 + since_switch) / 12,
        "since_speculation": math.log2(1 + since_speculation) / 12,
        "unseen": unseen,
    }
    rows = []
    for k, steps in enumerate((0, 1, 3)):
        row = dict.fromkeys((feature.name for feature in TIER_FEATURES), 0.0)
        row |= {"off": float(steps == 0), "num_steps": steps / 7, "current": float(k == current)}
        row |= {f"gain_{scale}": GAIN_SCALE * gains[k] for scale in ("fast", "medium", "slow")}
        row |= {"ceiling": GAIN_SCALE * promise * (steps > 0)}
        rows += [row[feature.name] for feature in TIER_FEATURES]
    observation = np.array([*(common[f.name] for f in GLOBAL_FEATURES), *rows], np.float32)
    assert observation.shape == (NUM_GLOBAL + 3 * NUM_PER_TIER,)
    return policy.choose(observation)


@pytest.mark.parametrize("best", [OFF, DEPTH_1, DEPTH_3])
def test_it_follows_the_cost_model(policy, best):
    gains = [-0.1] * 3
    gains[best] = 0.0
    for current in (OFF, DEPTH_1, DEPTH_3):
        assert choice(policy, current, gains) == best


def test_it_keeps_its_tier_over_less_than_a_percent(policy):
    assert choice(policy, DEPTH_3, [-0.2, 0.0, -0.004]) == DEPTH_3
    assert choice(policy, DEPTH_3, [-0.2, 0.0, -0.03]) == DEPTH_1


def test_it_holds_a_depth_that_it_has_just_taken_up(policy):
    held = [
        choice(policy, DEPTH_1, [0.0, -0.2, -0.3], since_switch=rounds) == DEPTH_1
        for rounds in range(9)
    ]
    assert held[0] and held[1]
    assert not any(held[4:])
    assert choice(policy, OFF, [-0.2, 0.0, -0.3], since_switch=0) == DEPTH_1, "off is not held"


def probed_after(policy, gains, **more):
    return next(
        rounds
        for rounds in range(10**6)
        if choice(policy, OFF, gains, since_speculation=rounds, **more) != OFF
    )


def test_it_probes_the_more_rarely_the_worse_it_looked(policy):
    near = probed_after(policy, [0.0, -0.05, -0.2])
    far = probed_after(policy, [0.0, -0.3, -0.4])
    rule = StartingRule()
    assert near == pytest.approx(
        2 ** (rule.patience + (0.05 * 40 + rule.keep) / rule.probe), rel=0.1
    )
    assert far == pytest.approx(2 ** (rule.patience + (0.3 * 40 + rule.keep) / rule.probe), rel=0.1)
    assert far > 1.5 * near
    assert choice(policy, OFF, [0.0, -0.05, -0.2], since_speculation=near) == DEPTH_1
    assert probed_after(policy, [0.0, -0.05, -0.2], unseen=1.0) < 0.5 * near


def test_it_does_not_probe_where_nearly_all_drafts_accepted_would_not_pay(policy):
    gains = [0.0, -0.3, -0.4]
    plain = probed_after(policy, gains)
    enough = probed_after(policy, gains, promise=StartingRule().promise)
    assert enough == pytest.approx(plain, rel=0.03), "the untrained units say little"
    assert probed_after(policy, gains, promise=0.1) > 2 * plain
    for unseen in (0.0, 1.0):
        for rounds in (1000, 4095):  # The feature ends there.
            more = dict(since_speculation=rounds, unseen=unseen)
            assert choice(policy, OFF, gains, promise=-0.4, **more) == OFF
            assert choice(policy, OFF, gains, promise=0.5, **more) == DEPTH_1


def test_little_promise_does_not_stop_what_the_cost_model_prefers(policy):
    assert choice(policy, OFF, [-0.1, 0.0, -0.2], promise=0.0) == DEPTH_1
    assert choice(policy, DEPTH_3, [-0.1, -0.2, 0.0], promise=-0.5) == DEPTH_3


def test_without_a_prior_there_is_no_rule():
    torch.manual_seed(3)
    arrays = TierScorer(64, 64, 0.0).arrays()
    assert not arrays["skip.weight"].any()
    assert np.abs(arrays["logit.weight"]).max() < 0.011


def test_half_the_prior_is_half_of_every_logit():
    torch.manual_seed(3)
    full = TierScorer(64, 64, DEFAULT_PRIOR).arrays()
    torch.manual_seed(3)
    half = TierScorer(64, 64, DEFAULT_PRIOR / 2).arrays()
    np.testing.assert_allclose(half["skip.weight"], full["skip.weight"] / 2)
    assert full["logit.weight"][0] == pytest.approx(StartingRule().hold)
    assert half["logit.weight"][1] == pytest.approx(StartingRule().probe / 2)
