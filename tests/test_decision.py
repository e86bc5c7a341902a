"""The two forms of the decision path, on lists and compiled, choose alike."""

import numpy as np
import pytest

from controller.calibration import Calibration
from controller.compiled_decision import CompiledDecision
from controller.decision import ListDecision, make_decision
from controller.errors import SpecGovernorError
from controller.features import NUM_GLOBAL, NUM_PER_TIER
from controller.policy import NumpyPolicy, parameter_shapes
from controller.tiers import tier_of

CALIBRATION = "checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json"
TIERS = ("cold", "1", "2", "3", "5", "7")
MAX_RUNNING = 64


def arguments(seed=0, hidden=(16, 8), base_s=None):
    rng = np.random.default_rng(seed)
    shapes = parameter_shapes(NUM_GLOBAL, NUM_PER_TIER, *hidden)
    # Large enough that all tiers win now and then, and that relu cuts both layers.
    weights = {name: rng.normal(0.0, 0.7, s).astype(np.float32) for name, s in shapes.items()}
    tiers = [tier_of(name) for name in TIERS]
    table = Calibration.load(CALIBRATION).table(tiers, MAX_RUNNING)
    steps = [tier.num_steps for tier in tiers]
    return (
        NumpyPolicy(weights),
        steps,
        table.base_s.T if base_s is None else base_s,
        table.context_s_per_token,
        0.012,
        MAX_RUNNING,
        3,
    )


@pytest.mark.parametrize("hidden", [(16, 8), (1, 1), (7, 33)])
def test_both_forms_choose_alike_through_a_run(hidden):
    given = arguments(1, hidden)
    forms = [ListDecision(*given), CompiledDecision(*given)]
    rng = np.random.default_rng(2)
    chosen = []
    for _ in range(3000):
        batch_size = int(rng.integers(1, MAX_RUNNING + 9))
        if rng.random() < 0.2:
            for form in forms:
                form.joined(min(3, batch_size), batch_size)
        seen = (batch_size, int(rng.integers(0, 99)), int(rng.integers(1, 10**6)), rng.random())
        tier, other = (form.choose(*seen) for form in forms)
        assert tier == other
        chosen.append(tier)
        tier = int(rng.integers(len(TIERS)))  # Not only what one policy likes.
        steps = given[1][tier]
        cold = {form.launched(tier, steps, steps > 0, batch_size) for form in forms}
        assert len(cold) == 1
        correct = bytes(rng.integers(0, steps + 1, batch_size).tolist())
        for form in forms:
            form.result(tier, steps, cold.copy().pop(), correct)
    np.testing.assert_allclose(forms[0].accept_len[:24], forms[1].accept_len[:24], rtol=1e-12)
    np.testing.assert_allclose(forms[0].recent_accept_len, forms[1].recent_accept_len, rtol=1e-12)
    assert len(set(chosen)) > 1 or hidden == (1, 1)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (60, 64), (1, 300)])
def test_both_forms_remember_alike_however_long_no_decision_comes(sizes):
    """More launches, results and rows than wait for the next decision, and fewer."""
    given = arguments(3)
    forms = [ListDecision(*given), CompiledDecision(*given)]
    rng = np.random.default_rng(4)
    for rounds in (1, 2, 31, 32, 33, 64, 65, 200):
        for _ in range(rounds):
            tier = int(rng.integers(len(TIERS)))
            steps = given[1][tier]
            rows = int(rng.integers(sizes[0], sizes[1] + 1))
            correct = rng.integers(0, steps + 1, rows).tolist()
            for form in forms:
                cold = form.launched(tier, steps, steps > 0, rows)
                form.result(tier, steps, cold, correct)
        seen = (4, 3, 2000, 0.5)
        assert forms[0].choose(*seen) == forms[1].choose(*seen)
        np.testing.assert_allclose(forms[0].accept_len[:24], forms[1].accept_len[:24], rtol=1e-12)
        np.testing.assert_allclose(
            forms[0].recent_accept_len, forms[1].recent_accept_len, rtol=1e-12
        )
        np.testing.assert_allclose(
            forms[0]._memory, forms[1]._state[: len(forms[0]._memory)], rtol=1e-12
        )


@pytest.mark.parametrize("form", [ListDecision, CompiledDecision])
@pytest.mark.parametrize("correct", [[4], [-1], [0, 4], [2, -1], [300]])
def test_more_correct_drafts_than_there_were_are_refused(form, correct):
    decision = form(*arguments())
    decision.launched(3, 3, True, len(correct))
    with pytest.raises(ValueError, match=r"0 to 3 correct drafts|range"):
        decision.result(3, 3, False, correct)
    decision.result(3, 3, False, [3] * len(correct))
    decision.choose(4, 0, 100, 0.5)
    decision.result(2, 9, False, [9])  # Deeper than any tier: of no use, and no error.


def test_the_first_of_equal_tiers_is_chosen():
    policy, *rest = arguments()
    zeros = {name: np.zeros_like(value) for name, value in policy.parameters.items()}
    for form in (ListDecision, CompiledDecision):
        assert form(NumpyPolicy(zeros), *rest).choose(4, 0, 100, 0.5) == 0


@pytest.mark.parametrize("form", [ListDecision, CompiledDecision])
def test_a_cost_that_is_none_is_named(form):
    given = arguments(base_s=np.full((MAX_RUNNING + 1, len(TIERS)), 0.01))
    given[2][5, 2] = np.nan
    decision = form(*given)
    decision.choose(4, 0, 100, 0.5)
    with pytest.raises(SpecGovernorError, match="expected finite observations, got nan"):
        decision.choose(5, 0, 100, 0.5)


def test_the_compiled_form_is_taken_where_numba_is(monkeypatch, caplog):
    caplog.set_level("INFO")
    assert isinstance(make_decision(*arguments()), CompiledDecision)
    monkeypatch.setitem(__import__("sys").modules, "controller.compiled_decision", None)
    assert isinstance(make_decision(*arguments()), ListDecision)
    assert "Numba is not installed" in caplog.text


def test_a_compiler_that_fails_leaves_the_lists(monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("no space for machine code")

    monkeypatch.setattr("controller.compiled_decision.CompiledDecision", fails)
    assert isinstance(make_decision(*arguments()), ListDecision)
    assert "no space for machine code" in caplog.text
