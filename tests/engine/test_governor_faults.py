"""Whatever is wrong with the governor, the server serves on, at its static steps, and says so."""

import pytest
from harness import EngineFailed, start_engine, write_plugin
from test_governor import governed, prompts, read_rounds

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 120

# Some good decisions, then errors, then numbers that are none, then good decisions again.
BROKEN_POLICY = """
def register():
    from engine_hooks.governor import Governor

    calls = 0

    def policy_tier(self, *seen):
        nonlocal calls
        calls += 1
        if 5 < calls <= 10:
            raise RuntimeError("planted")
        if 10 < calls <= 15:
            return float("nan")
        return 1

    Governor.policy_tier = policy_tier
"""

RENAMED_SYMBOL = """
def register():
    from engine_hooks import symbols

    renamed = symbols.Symbol(f"{symbols.SCHEDULER}.run_batch_renamed", ("self", "batch"))
    symbols.SYMBOLS = (*symbols.SYMBOLS, renamed)
"""

# SGLang logs a hook that it cannot apply, and starts.
NOT_APPLIED = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply = HookRegistry._apply_target.__func__

    def fails(cls, target, hooks):
        if target.endswith(".process_batch_result"):
            raise RuntimeError("planted")
        apply(cls, target, hooks)

    HookRegistry._apply_target = classmethod(fails)
"""


@pytest.fixture(scope="module")
def expected():
    with start_engine() as engine:
        return tokens_of(engine)


def tokens_of(engine):
    return [out.token_ids for out in engine.generate(prompts(3), NUM_TOKENS)]


def test_errors_and_nan_leave_their_rounds_static(tmp_path, expected):
    decisions, env = governed(tmp_path, "cold,1,3")
    plugin = write_plugin(tmp_path / "plugin", BROKEN_POLICY)
    with start_engine(env=env, plugins=[plugin]) as engine:
        assert tokens_of(engine) == expected
        log = engine.log()
        rounds = read_rounds(decisions)
    steps = [row["num_steps"] for row in rounds]
    assert steps[:15] == [1] * 5 + [3] * 10
    assert set(steps[15:]) == {1}
    assert [row["asked"] for row in rounds[5:15]] == [None] * 10
    assert log.count("an error in the governor") == 1
    assert "RuntimeError: planted" in log


@pytest.mark.parametrize(
    ("plugin", "env", "reason"),
    [
        (None, {"SPECGOVERNOR_POLICY": "/nonexistent"}, "expected a checkpoint directory"),
        (None, {"SPECGOVERNOR_MODE": "maybe"}, "SPECGOVERNOR_MODE: expected off, shadow, on"),
        (RENAMED_SYMBOL, {}, "Scheduler.run_batch_renamed is missing"),
        (NOT_APPLIED, {}, "no hook sits on sglang.srt.managers.scheduler.Scheduler.process"),
    ],
    ids=["missing", "setting", "renamed", "not-applied"],
)
def test_a_server_that_cannot_be_governed_serves_and_says_why(
    tmp_path, expected, plugin, env, reason
):
    _, variables = governed(tmp_path, "cold,1,3")
    plugins = [] if plugin is None else [write_plugin(tmp_path / "plugin", plugin)]
    with start_engine(env={**variables, **env}, plugins=plugins) as engine:
        assert tokens_of(engine) == expected
        lines = [line for line in engine.log().splitlines() if "does NOT govern" in line]
    assert lines
    assert all(reason in line for line in lines)


def test_strict_refuses_to_start(tmp_path):
    env = {"SPECGOVERNOR_POLICY": str(tmp_path / "none"), "SPECGOVERNOR_STRICT": "1"}
    with pytest.raises(EngineFailed, match="expected a checkpoint directory"):
        with start_engine(env=env):
            pass


def test_what_sglang_would_only_warn_about_is_an_error(tmp_path):
    _, env = governed(tmp_path, "cold,1,3")
    with pytest.raises(EngineFailed, match="only topk=1 is supported"):
        with start_engine(env=env, speculative_eagle_topk=2, speculative_num_draft_tokens=4):
            pass
