"""The real engine boots in every mode that the governor meets, and says the same in all of them.

Each mode is one engine, started once for the file; all of them do the same work, `play`.
"""

import functools
import time
from dataclasses import dataclass

import psutil
import pytest
import texts
from harness import Engine, EngineFailed, Output, alive, start_engine, start_server, write_plugin

pytestmark = pytest.mark.timeout(900)

BATCHES = (1, 3, 8)
NUM_TOKENS = 64
LONG = 400  # tokens
HISTOGRAM = "spec_correct_drafts_histogram"
# SGLang's own ladder, at batch sizes that a small machine reaches, and quick to move.
LADDER = {
    "1": {"candidate_steps": [1, 3, 5]},
    "3": {"candidate_steps": [1, 3]},
    "8": {"candidate_steps": [0]},
    "ema_alpha": 0.5,
    "update_interval": 2,
    "warmup_batches": 2,
}
MODES = {
    "plain": {"speculative_algorithm": None},
    "fixed": {"speculative_num_steps": 3, "disable_radix_cache": False},
    "ladder": {"speculative_num_steps": 3, "candidate_steps": LADDER},
    "two ranks": {"speculative_num_steps": 3, "tp_size": 2},
}


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    """Return pieces of text of 4 to 40 tokens; the first ones are the same for every count."""
    return texts.prompts(count, seed)


@dataclass(frozen=True)
class Play:
    """What one engine did with the eight prompts."""

    batches: dict[int, list[Output]]  # the first 1, 3 and 8 of them at once
    alone: list[Output]  # one after the other
    joined: list[Output]  # coming and going, beside a long request
    aborted: Output  # the long request, ended early
    long: Output  # the long request, to its end
    info: dict
    log: str


def play(engine: Engine) -> Play:
    """Generate in batches; let requests join and leave, and abort one; generate one by one."""
    batches = {size: engine.generate(prompts(size), NUM_TOKENS) for size in BATCHES}
    (long_prompt,) = prompts(1, seed=6)
    long = engine.submit(long_prompt, LONG)
    long.wait_for_tokens(4)
    joining = []
    for i, prompt in enumerate(prompts(8)):
        joining.append(engine.submit(prompt, NUM_TOKENS))
        if i % 3 == 2:  # some of these are done before the others come
            joining[i - 2].wait_for_tokens(8 * i)
    long.abort()
    joined = [request.output() for request in joining]
    alone = [engine.generate([prompt], NUM_TOKENS)[0] for prompt in prompts(8)]
    to_the_end = engine.generate([long_prompt], LONG)[0]
    return Play(
        batches, alone, joined, long.output(), to_the_end, engine.server_info(), engine.log()
    )


@functools.cache
def play_of(mode: str) -> Play:
    """Return what the engine of a mode did; it runs once for the whole file."""
    with start_engine(**MODES[mode]) as engine:
        return play(engine)


def said(outputs: list[Output]) -> list[tuple[int, ...]]:
    """Return the tokens of some outputs."""
    return [output.token_ids for output in outputs]


def meta(outputs: list[Output], name: str) -> list:
    """Return one number of SGLang's account of some outputs."""
    return [output.meta_info[name] for output in outputs]


@pytest.mark.parametrize("mode", MODES)
def test_greedy_output_is_the_same_token_for_token(mode):
    played, expected = play_of(mode), said(play_of("plain").alone)
    assert said(played.alone) == expected
    for size in BATCHES:
        assert said(played.batches[size]) == expected[:size]
    assert {len(tokens) for tokens in expected} == {NUM_TOKENS}
    assert len({token for tokens in expected for token in tokens}) > 40  # no short loop


@pytest.mark.parametrize("mode", MODES)
def test_joining_leaving_and_aborting_change_no_token(mode):
    played, plain = play_of(mode), play_of("plain")
    assert said(played.joined) == said(plain.alone)
    assert said([played.long]) == said([plain.long])
    assert played.aborted.meta_info["finish_reason"]["type"] == "abort"
    tokens = played.aborted.token_ids
    assert 4 <= len(tokens) < LONG
    assert tokens == plain.long.token_ids[: len(tokens)]


@pytest.mark.parametrize("mode", MODES)
def test_sglangs_account_adds_up(mode):
    played = play_of(mode)
    for output in played.batches[8] + played.joined:
        account = output.meta_info
        assert account["completion_tokens"] == NUM_TOKENS == len(output.token_ids)
        if mode == "plain":
            assert "spec_verify_ct" not in account
            continue
        rounds, correct = account["spec_verify_ct"], account["spec_num_correct_drafts"]
        # The first token is the prefill's; the last round may accept more than was asked for.
        assert 0 <= 1 + rounds + correct - NUM_TOKENS <= 5
        histogram = account[HISTOGRAM]
        assert sum(histogram) == rounds
        assert sum(i * count for i, count in enumerate(histogram)) == correct


def test_acceptance_is_partial_and_varies():
    outputs = play_of("fixed").batches[8]
    lengths = meta(outputs, "spec_accept_length")
    assert all(1.3 < length < 4.0 for length in lengths)
    assert max(lengths) - min(lengths) > 0.5
    assert meta(outputs, "spec_num_proposed_drafts") == [
        3 * rounds for rounds in meta(outputs, "spec_verify_ct")
    ]
    # And within a text: rounds with none, one, two and all three correct.
    assert all(count > 0 for count in play_of("fixed").long.meta_info[HISTOGRAM])


def test_the_ladder_moves_with_batch_size_and_acceptance():
    played = play_of("ladder")
    assert meta(played.batches[8], "spec_num_correct_drafts") == [0] * 8  # its only step is 0
    histogram = played.long.meta_info[HISTOGRAM]
    assert len(histogram) == 6  # up to 5 steps at batch 1
    assert histogram[5] > 0
    assert played.info["speculative_adaptive"] is True


def test_two_ranks_draft_as_one_does():
    played, one = play_of("two ranks"), play_of("fixed")
    assert played.info["tp_size"] == 2
    assert " TP1]" in played.log
    for name in ("spec_verify_ct", HISTOGRAM):
        assert meta(played.batches[8], name) == meta(one.batches[8], name)


def test_the_prefix_cache_was_used():
    assert min(meta(play_of("fixed").alone, "cached_tokens")) > 0
    assert max(meta(play_of("ladder").alone, "cached_tokens")) == 0


# --- the harness ---------------------------------------------------------------------------------

PLUGIN = """
import time
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def register():
    target = "sglang.srt.managers.scheduler.Scheduler.run_batch"
    HookRegistry.register(target, before, HookType.BEFORE)

rounds = 0

def before(scheduler, *args, **kwargs):
    global rounds
    rounds += 1
    if rounds == 1:
        print("the throw-away plugin saw a batch", flush=True)
    if rounds == 30:
        print("the throw-away plugin hangs", flush=True)
        time.sleep(1000)
"""


def test_a_hang_fails_with_the_log_and_leaves_no_process(tmp_path):
    plugin = write_plugin(tmp_path, PLUGIN)
    with start_engine(plugins=[plugin]) as engine:
        family = [psutil.Process(engine.process.pid)]
        family += family[0].children(recursive=True)
        assert len(family) > 2
        request = engine.submit([1, 2, 3], 500)
        request.wait_for_tokens(1)
        engine.wait_for_log("the throw-away plugin hangs")
        assert "the throw-away plugin saw a batch" in engine.log()
        begin = time.monotonic()
        with pytest.raises(EngineFailed, match=r"after 2 s there is no .*\n(.*\n)*.*plugin hangs"):
            request.output(limit_s=2)
        assert time.monotonic() - begin < 10
    assert not [process for process in family if alive(process)]


def test_an_http_server_answers():
    with start_server(candidate_steps=[1, 3], enable_metrics=True) as server:
        output = server.generate(prompts(1)[0], NUM_TOKENS)
        assert output.token_ids == play_of("plain").alone[0].token_ids
        assert "sglang:num_running_reqs" in server.get("/metrics")


def test_an_engine_that_cannot_boot_says_why():
    begin = time.monotonic()
    with (
        pytest.raises(EngineFailed, match=r"(?s)ended before.*no_such_backend"),
        start_engine(attention_backend="no_such_backend"),
    ):
        pass
    assert time.monotonic() - begin < 120
