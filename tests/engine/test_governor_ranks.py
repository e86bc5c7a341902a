"""All tensor-parallel ranks decide alike, in the real engine with two of them."""

import json
import time

import pytest
from harness import EngineFailed, start_engine, write_plugin
from test_governor import RANDOM_TIERS, governed, play, prompts

pytestmark = pytest.mark.timeout(900)

# Every rank draws its own tiers, as a policy would that read a clock.
RANK_LOCAL = """
import os, random

def register():
    from engine_hooks.governor import Governor

    generator = random.Random(os.getpid())
    Governor.policy_tier = lambda self, *seen: generator.randrange(len(self.tiers.tiers))
"""

# A policy that always takes 5 steps, and rounds of 5 steps that take much longer than others.
STUCK_ON_THE_WORST = """
import time

def register():
    from engine_hooks.governor import Governor
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def policy_tier(self, *seen):
        return self.tiers.num_steps.index(5)

    def slow(original, scheduler, batch, *args):
        result = original(scheduler, batch, *args)
        if result.speculative_num_draft_tokens == 6:
            time.sleep(0.1)
        return result

    Governor.policy_tier = policy_tier
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.run_batch", slow, HookType.AROUND
    )
"""


def sequences(path):
    """Return what each rank asked for and ran, round by round."""
    time.sleep(1.5)  # the logs are written once a second
    ranks = []
    for file in (path, path.with_name(f"{path.name}.rank1")):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        ranks.append(
            [
                (
                    row["asked"],
                    row["off"],
                    row["num_steps"],
                    row["num_correct"],
                    row["batch_size"],
                    row["forced"],
                )
                for row in rows
            ]
        )
    return ranks


def check_ranks_agree(engine, path, work):
    """Give the engine work and compare the ranks."""
    work(engine)
    first, second = sequences(path)
    assert first
    assert first == second
    return first


@pytest.mark.parametrize(
    ("source", "repeat"), [(None, "3"), (RANDOM_TIERS, "1")], ids=["policy", "random"]
)
def test_both_ranks_run_the_same_tiers(tmp_path, source, repeat):
    decisions, env = governed(tmp_path, "native,cold,1,2,3,5", SPECGOVERNOR_REPEAT=repeat)
    plugins = [] if source is None else [write_plugin(tmp_path / "plugin", source)]
    with start_engine(env=env, plugins=plugins, tp_size=2) as engine:
        rounds = check_ranks_agree(engine, decisions, play)
    assert {asked for asked, *_ in rounds} == {"native", "cold", "1", "2", "3", "5"}
    assert [asked for asked, *_ in rounds] == [str(off or steps) for _, off, steps, *_ in rounds]


def test_the_guard_overrules_a_policy_that_sticks_to_the_worst_tier(tmp_path):
    decisions, env = governed(
        tmp_path, "cold,1,2,3,5", SPECGOVERNOR_GUARD="1", SPECGOVERNOR_REPEAT="8"
    )
    plugin = write_plugin(tmp_path / "plugin", STUCK_ON_THE_WORST)
    with start_engine(env=env, plugins=[plugin], tp_size=2) as engine:
        rounds = check_ranks_agree(
            engine, decisions, lambda engine: engine.generate(prompts(3), 1500, limit_s=300)
        )
        log = engine.log()
    # The guard's order is for this batch size; requests end one after the other.
    rounds = rounds[: [size for *_, size, _ in rounds].index(2)]
    asked = [asked for asked, *_ in rounds]
    forced = [forced for *_, forced in rounds]
    # Tried tiers come in short stretches; the one that is forced stays.
    start = len(forced) - forced[::-1].index(False)
    assert 100 < start <= 300
    assert len(rounds) - start > 100
    assert len(set(asked[start:])) == 1
    assert asked[start] != "5"
    assert log.count("is forced for 1000 rounds") == 1


def test_the_mode_changes_on_both_ranks_in_the_same_round(tmp_path):
    decisions, env = governed(tmp_path, "cold,1,2,5", SPECGOVERNOR_MODE="off")
    plugin = write_plugin(tmp_path / "plugin", RANDOM_TIERS)
    with start_engine(env=env, plugins=[plugin], tp_size=2) as engine:
        request = engine.submit(prompts(1)[0], 900)
        for count, mode in ((20, 1), (80, 2), (300, 0)):
            request.wait_for_tokens(count)
            assert engine.set_state(specgovernor_mode=mode) == [True]
        assert engine.set_state(specgovernor_mode=3) == [False]
        assert engine.set_state(specgovernor_mode=1, pp_max_micro_batch_size=1) == [False]
        request.output()
        log = engine.log()
        first, second = sequences(decisions)
    assert first == second
    asked = [asked for asked, *_ in first]
    steps = [steps for _, _, steps, *_ in first]
    off, shadow = asked.index(None), next(i for i, a in enumerate(asked) if a is not None)
    on = next(i for i, s in enumerate(steps) if s != 3)
    end = len(asked) - next(i for i, a in enumerate(asked[::-1]) if a is not None)
    assert off == 0 < shadow < on < end < len(asked)
    assert all(asked[shadow:end])
    assert set(steps[:on]) == set(steps[end:]) == {3}
    assert [str(step or "cold") for step in steps[on:end]] == asked[on:end]
    assert len(set(asked[on:end])) == 4
    for change in ("off to shadow", "shadow to on", "on to off"):
        assert log.count(f"mode changed from {change}") == 1
    assert "expected a mode from 0 to 2, got 3" in log
    assert "expected specgovernor_mode alone" in log


def test_a_decision_of_a_rank_of_its_own_is_found(tmp_path):
    decisions, env = governed(tmp_path, "cold,1,2,3,5")
    plugin = write_plugin(tmp_path / "plugin", RANK_LOCAL)
    with start_engine(env=env, plugins=[plugin], tp_size=2) as engine:
        with pytest.raises((AssertionError, EngineFailed)):
            check_ranks_agree(
                engine, decisions, lambda engine: engine.generate(prompts(2), 100, limit_s=30)
            )
