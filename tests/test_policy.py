"""The policy network: arithmetic by hand, against PyTorch, symmetry over tiers, errors."""

import array

import numpy as np
import pytest
import torch

from controller.errors import CheckpointError, SpecGovernorError
from controller.features import NUM_GLOBAL, NUM_PER_TIER
from controller.policy import PARAMETER_DIMENSIONS, NumpyPolicy, parameter_shapes


def random_parameters(seed=0, num_global=5, num_per_tier=4, hidden=16, second=8):
    rng = np.random.default_rng(seed)
    shapes = parameter_shapes(num_global, num_per_tier, hidden, second)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def tiny_parameters():
    """One global feature, two a tier, two hidden units, one second unit."""
    values = {
        "global.weight": [[1], [-1]],
        "tier.weight": [[1, 0], [0, 2]],
        "hidden.bias": [0.5, 0],
        "second.weight": [[1, 3]],
        "second.bias": [-1],
        "logit.weight": [2],
        "skip.weight": [0.25, -0.5],
    }
    return {name: np.array(value, np.float32) for name, value in values.items()}


def torch_logits(parameters, observations, num_tiers):
    p = {name: torch.from_numpy(value) for name, value in parameters.items()}
    observations = torch.from_numpy(observations)
    num_global = p["global.weight"].shape[1]
    x = observations[:, num_global:].reshape(len(observations), num_tiers, -1)
    a = observations[:, :num_global] @ p["global.weight"].T + p["hidden.bias"]
    h = torch.relu(a[:, None] + x @ p["tier.weight"].T)
    z = torch.relu(h @ p["second.weight"].T + p["second.bias"])
    return (z @ p["logit.weight"] + x @ p["skip.weight"]).numpy()


def test_arithmetic_by_hand():
    policy = NumpyPolicy(tiny_parameters())
    # a = (1 * 2 + 0.5, -1 * 2) = (2.5, -2)
    # tier 0, x = (1, 0):  h = (3.5, 0), z = 3.5 - 1 = 2.5,         logit = 5 + 0.25 = 5.25
    # tier 1, x = (-4, 2): h = (0, 2),   z = 3 * 2 - 1 = 5,         logit = 10 - 1 - 1 = 8
    # tier 2, x = (-4, 0): h = (0, 0),   z = relu(-1) = 0,          logit = 0 - 1 = -1
    observation = np.array([2, 1, 0, -4, 2, -4, 0], np.float32)
    assert policy.logits(observation).tolist() == [5.25, 8.0, -1.0]
    assert policy.choose(observation) == 1
    assert policy.hidden_sizes == (2, 1)


@pytest.mark.parametrize("num_tiers", [1, 2, 6, 8])
def test_agrees_with_torch(num_tiers):
    parameters = random_parameters(1, NUM_GLOBAL, NUM_PER_TIER, 64, 64)
    parameters = {name: value * np.float32(0.2) for name, value in parameters.items()}
    policy = NumpyPolicy(parameters)
    rng = np.random.default_rng(2)
    size = NUM_GLOBAL + num_tiers * NUM_PER_TIER
    observations = rng.uniform(-1, 1, (200, size)).astype(np.float32)
    expected = torch_logits(parameters, observations, num_tiers)
    logits = policy.logits(observations)
    assert logits.shape == (200, num_tiers)
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=1e-5)
    chosen = [policy.choose(observation) for observation in observations]
    assert chosen == logits.argmax(axis=1).tolist()


def test_batch_axes_do_not_matter():
    policy = NumpyPolicy(random_parameters())
    observations = np.random.default_rng(3).normal(size=(2, 3, 5 + 3 * 4)).astype(np.float32)
    logits = policy.logits(observations)
    assert logits.shape == (2, 3, 3)
    np.testing.assert_allclose(logits[1, 2], policy.logits(observations[1, 2]), rtol=1e-12)


def test_permuting_tiers_permutes_logits():
    policy = NumpyPolicy(random_parameters())
    rng = np.random.default_rng(4)
    shared, tiers = rng.normal(size=5), rng.normal(size=(6, 4))
    logits = policy.logits(np.concatenate([shared, tiers.ravel()]))
    for _ in range(10):
        order = rng.permutation(6)
        permuted = np.concatenate([shared, tiers[order].ravel()])
        np.testing.assert_allclose(policy.logits(permuted), logits[order], rtol=1e-12)
        assert order[policy.choose(permuted)] == logits.argmax()


def test_ties_go_to_the_lowest_index():
    policy = NumpyPolicy(tiny_parameters())
    assert policy.choose([2, -4, 0, 1, 0, 1, 0]) == 1
    assert policy.choose([2, 1, 0, 1, 0, 1, 0]) == 0


def test_choose_takes_any_sequence_and_keeps_no_state():
    policy = NumpyPolicy(random_parameters())
    rng = np.random.default_rng(5)
    observations = [rng.normal(size=5 + k * 4) for k in (3, 6, 3, 1, 6) for _ in range(5)]
    first = [policy.choose(observation) for observation in observations]
    fresh = [NumpyPolicy(random_parameters()).choose(o.tolist()) for o in observations]
    again = [policy.choose(array.array("d", o)) for o in reversed(observations)]
    assert first == fresh == again[::-1]
    assert all(isinstance(choice, int) for choice in first)
    assert len(set(first)) > 2


def test_float64_observations_are_rounded_as_float32():
    policy = NumpyPolicy(random_parameters())
    observation = np.random.default_rng(6).normal(size=5 + 2 * 4)
    rounded = policy.logits(observation.astype(np.float32))
    assert policy.logits(observation).tolist() == rounded.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 4, 5, 12])
def test_an_entry_that_is_not_finite_raises(bad, position):
    policy = NumpyPolicy({name: np.abs(v) * 0 for name, v in random_parameters().items()})
    observation = np.zeros(5 + 2 * 4, np.float32)
    assert policy.choose(observation) == 0
    observation[position] = bad
    for call in (policy.choose, policy.logits):
        with pytest.raises(SpecGovernorError, match=f"got {bad} in entry {position};"):
            call(observation)
    observation[position] = 0
    assert policy.choose(observation) == 0


def test_the_largest_numbers_do_not_overflow():
    largest = np.float32(np.finfo(np.float32).max)
    policy = NumpyPolicy({n: np.full_like(v, largest) for n, v in random_parameters().items()})
    observation = np.full(5 + 2 * 4, largest)
    observation[5:9] = -largest
    assert policy.choose(observation) == 1
    assert np.isfinite(policy.logits(observation)).all()


@pytest.mark.parametrize("size", [0, 1, 5, 6, 8, 10])
def test_a_length_that_fits_no_tiers_raises(size):
    policy = NumpyPolicy(random_parameters())
    for call in (policy.choose, policy.logits):
        with pytest.raises(SpecGovernorError, match=rf"5 \+ 4 \* tiers entries, got {size};"):
            call(np.zeros(size, np.float32))


def test_the_parameters_are_copies_that_cannot_be_written():
    parameters = random_parameters()
    policy = NumpyPolicy(parameters)
    observation = np.ones(5 + 2 * 4)
    before = policy.logits(observation).tolist()
    parameters["skip.weight"][:] = 9
    assert policy.logits(observation).tolist() == before
    with pytest.raises(ValueError, match="read-only"):
        policy.parameters["skip.weight"][:] = 9


@pytest.mark.parametrize("name", PARAMETER_DIMENSIONS)
def test_bad_parameters_are_named(name):
    good = random_parameters()
    wide = {**good, name: good[name].astype(np.float64)}
    longer = {**good, name: np.zeros((*good[name].shape, 1), np.float32)}
    nan = {**good, name: np.full_like(good[name], np.nan)}
    listed = {**good, name: good[name].tolist()}
    missing = {key: value for key, value in good.items() if key != name}
    for parameters, message in (
        (wide, f"parameter {name}: expected float32, got float64"),
        (listed, f"parameter {name}: expected float32, got list"),
        (longer, f"parameter {name}: expected shape"),
        (nan, f"parameter {name}: expected finite"),
        (missing, f"missing \\['{name}'\\]"),
        ({**good, "other": good[name]}, "unknown \\['other'\\]"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            NumpyPolicy(parameters)
        assert "train again with" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_dimension_must_agree_with_the_others():
    parameters = random_parameters()
    parameters["second.weight"] = np.zeros((8, 15), np.float32)
    with pytest.raises(CheckpointError, match=r"shape \(second, hidden=16\), got \(8, 15\)"):
        NumpyPolicy(parameters)
