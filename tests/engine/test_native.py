"""Native rounds in the real engine: plain decoding, no token or KV slot changed, any fault cold.

That they change no token beside all other tiers is in test_governor.py.
"""

import json
import time

import pytest
from harness import start_engine, write_plugin
from test_governor import RANDOM_TIERS, check_same_tokens, governed, play, prompts, read_rounds

pytestmark = pytest.mark.timeout(900)

# Writes the forward passes of each decode round, and what is free whenever nothing runs.
WITNESS = """
import json, os

def register():
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    passes, folder = [], os.environ["WITNESS_FOLDER"]
    stream = open(folder + "/passes.jsonl", "a", buffering=1)
    free = open(folder + "/free.txt", "a", buffering=1)
    forward = ModelRunner.forward

    def noted(self, forward_batch, *args, **kwargs):
        passes.append(("draft" if self.is_draft_worker else "target",
                       forward_batch.forward_mode.name))
        return forward(self, forward_batch, *args, **kwargs)

    def run_batch(original, scheduler, batch, *args, **kwargs):
        del passes[:]
        decode = batch.forward_mode.is_decode()
        result = original(scheduler, batch, *args, **kwargs)
        if decode:
            stream.write(json.dumps(passes) + "\\n")
        return result

    def on_idle(original, scheduler, *args):
        slots = scheduler.token_to_kv_pool_allocator.available_size()
        free.write(f"{slots + scheduler.tree_cache.evictable_size()}\\n")
        return original(scheduler, *args)

    ModelRunner.forward = noted
    for name, hook in (("run_batch", run_batch), ("on_idle", on_idle)):
        HookRegistry.register(
            f"sglang.srt.managers.scheduler.Scheduler.{name}", hook, HookType.AROUND
        )
"""

# Native rounds and three steps, in turn.
EVERY_ROUND = """
def register():
    from engine_hooks.governor import Governor

    rounds = 0

    def policy_tier(self, *seen):
        nonlocal rounds
        rounds += 1
        return rounds % 2

    Governor.policy_tier = policy_tier
"""

BREAKS_IN_A_ROUND = """
def register():
    from engine_hooks.governor import Governor
    from engine_hooks.native_graph import PlainDecode

    run, rounds = PlainDecode.run, 0

    def broken(self, batch):
        nonlocal rounds
        rounds += 1
        if rounds == 20:
            raise RuntimeError("planted")
        return run(self, batch)

    PlainDecode.run = broken
    Governor.policy_tier = lambda self, *seen: 0
"""

BREAKS_AT_THE_START = """
def register():
    from engine_hooks import symbols
    from engine_hooks.governor import Governor

    def broken(runner):
        raise MemoryError("planted")

    symbols.new_attention_backend = broken
    Governor.policy_tier = lambda self, *seen: 0
"""

RENAMED_SYMBOL = """
def register():
    from engine_hooks import symbols
    from engine_hooks.governor import Governor

    renamed = symbols.Symbol(f"{symbols.SCHEDULER}.run_batch_renamed", ("self", "batch"))
    symbols.NATIVE_SYMBOLS = (*symbols.NATIVE_SYMBOLS, renamed)
    Governor.policy_tier = lambda self, *seen: 0
"""

LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}
FORWARDS = {
    "native": [["target", "DECODE"]],
    "cold": [["target", "TARGET_VERIFY"]],
    "warm": [["target", "TARGET_VERIFY"], ["draft", "DRAFT_EXTEND_V2"]],
}


def scored(engine):
    return engine.generate(prompts(3, seed=4), 40, options=LOGPROBS)


@pytest.fixture(scope="module")
def plain():
    with start_engine(speculative_algorithm=None) as engine:
        tokens, _, _ = play(engine)
        uncut = engine.generate(prompts(1, seed=2), 1000)[0].token_ids
        return (tokens, uncut), scored(engine)


def test_a_native_round_is_one_plain_decode_of_the_target_and_nothing_else(tmp_path, plain):
    decisions, env = governed(tmp_path, "native,cold,warm,1,3", WITNESS_FOLDER=str(tmp_path))
    plugins = [
        write_plugin(tmp_path / "plugin", RANDOM_TIERS),
        write_plugin(tmp_path / "witness", WITNESS, "witness"),
    ]
    with start_engine(env=env, plugins=plugins) as engine:
        check_same_tokens(play(engine), plain[0])
        assert "an error in" not in engine.log()
        rounds = read_rounds(decisions)
    lines = (tmp_path / "passes.jsonl").read_text().splitlines()
    passes = [json.loads(line) for line in lines]
    assert [row["asked"] for row in rounds] == [
        str(row["off"] or row["num_steps"]) for row in rounds
    ]
    assert len(passes) == len(rounds)
    seen = set()
    for row, ran in zip(rounds, passes, strict=True):
        if row["off"] is not None:
            assert ran == FORWARDS[row["off"]]
            seen.add(row["off"])
        else:
            assert ran[-2:] == [["target", "TARGET_VERIFY"], ["draft", "DRAFT_EXTEND_V2"]]
    assert seen == set(FORWARDS)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
def test_flips_every_round_leave_tokens_logprobs_and_kv_as_they_are(tmp_path, plain, overlap):
    decisions, env = governed(tmp_path, "native,3", WITNESS_FOLDER=str(tmp_path))
    plugins = [
        write_plugin(tmp_path / "plugin", EVERY_ROUND),
        write_plugin(tmp_path / "witness", WITNESS, "witness"),
    ]
    changed = {"disable_overlap_schedule": not overlap, "disable_radix_cache": False}
    with start_engine(env=env, plugins=plugins, **changed) as engine:
        for _ in range(2):  # the second time with the prefix cache full
            check_same_tokens(play(engine), plain[0])
        found = scored(engine)
        assert "an error in" not in engine.log()
        time.sleep(1.0)  # until it has been idle
        rounds = read_rounds(decisions)
    asked = [row["asked"] for row in rounds]
    assert asked == [str(row["off"] or row["num_steps"]) for row in rounds]
    assert asked.count("native") > 200
    assert set(asked) == {"native", "3"}
    free = (tmp_path / "free.txt").read_text().split()
    assert free[0] == free[-1]
    for ours, theirs in zip(found, plain[1], strict=True):
        assert ours.token_ids == theirs.token_ids
        for name in ("output_token_logprobs", "output_top_logprobs"):
            check_alike(ours.meta_info[name], theirs.meta_info[name])


def check_alike(ours, theirs):
    """Compare logprobs, or lists of them: (logprob, token, None)."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one[0], list):
            check_alike(one, other)
        else:
            assert one[0] == pytest.approx(other[0], abs=1e-3)
            assert one[1] == other[1]


def test_an_error_in_a_native_round_runs_it_and_all_others_cold(tmp_path, plain):
    decisions, env = governed(tmp_path, "native,3")
    plugin = write_plugin(tmp_path / "plugin", BREAKS_IN_A_ROUND)
    with start_engine(env=env, plugins=[plugin], disable_overlap_schedule=False) as engine:
        check_same_tokens(play(engine), plain[0])
        log = engine.log()
        rounds = read_rounds(decisions)
    off = [row["off"] for row in rounds]
    assert off[:19] == ["native"] * 19
    assert set(off[19:]) == {"cold"}
    assert {row["asked"] for row in rounds} == {"native"}
    assert log.count("an error in a native round") == 1
    assert "RuntimeError: planted" in log
    assert "an error in the governor" not in log


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (BREAKS_AT_THE_START, "MemoryError: planted"),
        (RENAMED_SYMBOL, "Scheduler.run_batch_renamed is missing"),
    ],
    ids=["start", "symbol"],
)
def test_where_native_cannot_run_it_runs_cold_and_the_log_says_why(tmp_path, plain, source, reason):
    decisions, env = governed(tmp_path, "native,3")
    plugin = write_plugin(tmp_path / "plugin", source)
    with start_engine(env=env, plugins=[plugin]) as engine:
        check_same_tokens(play(engine), plain[0])
        log = engine.log()
        rounds = read_rounds(decisions)
    assert {(row["asked"], row["off"]) for row in rounds} == {("cold", "cold")}
    assert log.count("'native' cannot run here and runs as 'cold'") == 1
    assert reason in log
    assert "hooks verified" in log
