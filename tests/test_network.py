"""The torch policy and the NumPy policy are one function."""

import numpy as np
import pytest
import torch

from controller.features import NUM_PER_TIER, observation_bounds
from controller.policy import NumpyPolicy
from training.network import TierScorer


@pytest.mark.parametrize("num_tiers", [1, 2, 6, 8])
def test_numpy_policy_agrees_with_torch(num_tiers):
    torch.manual_seed(num_tiers)
    scorer = TierScorer(hidden=64, second=48, prior=40.0)
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    low, high = (np.array(x, np.float32) for x in observation_bounds(num_tiers))
    rng = np.random.default_rng(num_tiers)
    states = rng.uniform(low, high, (500, len(low))).astype(np.float32)
    policy = NumpyPolicy(scorer.arrays())
    with torch.no_grad():
        expected = scorer(torch.from_numpy(states)).numpy()
    found = policy.logits(states)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    for state, logits in zip(states[:50], found[:50], strict=True):
        assert policy.choose(state) == logits.argmax()


def test_untrained_policy_prefers_what_the_cost_model_prefers():
    torch.manual_seed(0)
    policy = NumpyPolicy(TierScorer(hidden=64, second=64, prior=40.0).arrays())
    low, _ = observation_bounds(3)
    state = np.array(low, np.float32)
    per_tier = state[-3 * NUM_PER_TIER :].reshape(3, NUM_PER_TIER)
    per_tier[:, 4:7] = np.array([-3.0, 0.0, -1.0])[:, None]
    assert policy.choose(state) == 1
    assert policy.logits(state)[1] - policy.logits(state)[0] == pytest.approx(12.0, abs=1.0)


def test_parameters_survive_a_round_trip():
    scorer, other = TierScorer(8, 4, 1.0), TierScorer(8, 4, 2.0)
    other.load_arrays(scorer.arrays())
    for name, value in scorer.arrays().items():
        assert np.array_equal(other.arrays()[name], value)
