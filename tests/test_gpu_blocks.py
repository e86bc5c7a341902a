"""The GPU measurements' alternating blocks of rounds: how they are made, and what they say."""

import json
from types import SimpleNamespace

import pytest

from engine_hooks.background import BackgroundWriter
from engine_hooks.driver import Driver
from tests.gpu_modules import load

blocks, control_plugin = load("blocks"), load("control_plugin")


def made(quads, cost, drift=0.0, batch_size=8):
    """Return blocks of 8 timed rounds of 10 ms, ``cost`` times longer with the hooks."""
    return [
        {
            "block": block,
            "bypassed": block % 4 in (1, 2),
            "batch_size": batch_size,
            "width": 4,
            "rounds": 12,
            "timed_rounds": 8,
            "tokens": 8 * 24,
            "seconds": 0.08
            * (1.0 if block % 4 in (1, 2) else cost[(block - blocks.WARM_UP) // 4 % len(cost)])
            + drift * block,
            "background_s": 0.006,
            "hooks_s": 0.0 if block % 4 in (1, 2) else 0.0006,
        }
        for block in range(blocks.WARM_UP + 4 * quads)
    ]


def test_share_kept_by_hand():
    assert blocks.share_kept(made(5, (1.25,)), 8, 4) == {
        "rounds": 160,
        "blocks": 20,  # The warm-up is out.
        "seconds_a_round_with": 0.0125,
        "seconds_a_round_without": 0.01,
        "tokens_a_round_with": 24,
        "tokens_a_round_without": 24,
        "tokens_per_s_with": 1920,
        "tokens_per_s_without": 2400,
        "share_kept": 0.8,
        "median": 0.8,
        "standard_error": 0,
        "interval_95": [0.8, 0.8],
        "hooks_s_a_round": 0.00005,  # 10 blocks of 0.6 ms
        "hooks_share": 0.004,
        "background_s_a_round": 0.001,  # 20 blocks of 6 ms, over 10 blocks of 12 rounds
        "least_share_kept": round(0.0095 / 0.013, 5),
    }


def test_a_steady_drift_cancels():
    found = blocks.share_kept(made(6, (1.0,), drift=0.01), 8, 4)
    assert found["share_kept"] == 1.0


def test_interval_by_hand():
    found = blocks.share_kept(made(6, (1.0, 1.25)), 8, 4)
    assert found["share_kept"] == pytest.approx(0.9)
    error = (6 * 0.1**2 / 5) ** 0.5 / 6**0.5
    assert found["standard_error"] == pytest.approx(error, abs=1e-5)
    half = 2.571 * error  # Student's t, 5 degrees of freedom
    assert found["interval_95"] == pytest.approx([0.9 - half, 0.9 + half], abs=0.002)


@pytest.mark.parametrize(("degrees", "point"), [(5, 2.571), (12, 2.179), (60, 2.000)])
def test_student(degrees, point):
    assert blocks.student_95(degrees) == pytest.approx(point, rel=0.01)


def test_blocks_of_another_kind_and_quads_with_gaps_do_not_count():
    given = made(3, (1.1,))
    given[5]["batch_size"] = None  # requests left in the middle of it
    assert blocks.share_kept(given, 8, 4)["blocks"] == 8
    del given[-1]
    assert blocks.share_kept(given, 8, 4)["blocks"] == 4
    assert blocks.share_kept(given, 8, 2) == {
        "rounds": 0,
        "blocks": 0,
        "share_kept": None,
        "standard_error": None,
        "interval_95": None,
    }


class Governor:
    """Asks for depth 3 and counts what it is told."""

    def __init__(self):
        self.decided = self.results = 0
        self.tiers = SimpleNamespace(
            tiers=[SimpleNamespace(name="3")],
            num_steps=[3],
            keeps_warm=[True],
            index_of=lambda *_: 0,
        )

    def policy_tier(self, *_):
        self.decided += 1
        return 0

    def joined(self, *_):
        pass

    def launched(self, *_):
        return False

    def result(self, *_):
        self.results += 1


class Request:
    """Something that can be referred to weakly."""


def run(driver, num_rounds, overlap, prefill_at=None):
    """Run rounds of two requests in SGLang's order."""
    scheduler = SimpleNamespace(
        waiting_queue=[],
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 600),
        tree_cache=SimpleNamespace(evictable_size=lambda: 150),
        max_total_num_tokens=1000,
    )
    requests, pending = [Request(), Request()], []

    def process():
        driver.process_batch_result(lambda *_: None, scheduler, *pending.pop(0))

    for index in range(num_rounds):
        decode = index != prefill_at
        batch = SimpleNamespace(
            reqs=requests,
            forward_mode=SimpleNamespace(
                is_decode=lambda decode=decode: decode,
                is_extend=lambda decode=decode: not decode,
                is_idle=lambda: False,
            ),
            seq_lens_sum=20,
            decoding_reqs=None,
            extend_num_tokens=0,
        )
        # In SGLang, too, a result is an object of its own and may lie where an old one lay.
        result = SimpleNamespace(
            speculative_num_draft_tokens=4 if decode else None,
            num_correct_drafts_per_req_cpu=[1, 2] if decode else None,
        )
        pending.append((batch, driver.run_batch(lambda *_, r=result: r, scheduler, batch)))
        del result
        if len(pending) > overlap:
            process()
    while pending:
        process()


@pytest.fixture
def controlled(monkeypatch, tmp_path):
    """Return a driver whose hooks are bypassed in blocks, and the file of these."""
    for owner, name in (
        (Driver, "run_batch"),
        (Driver, "process_batch_result"),
        (BackgroundWriter, "__init__"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    file = tmp_path / "blocks.jsonl"
    control = SimpleNamespace(said={"blocks": str(file), "log": False})
    control_plugin.control_driver(control, control_plugin.time_background())
    driver = Driver()
    driver.governor, driver.mode = Governor(), "shadow"
    return driver, file


@pytest.mark.parametrize("repeat", [1, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_hooks_see_every_other_block_and_no_result_without_its_launch(
    controlled, overlap, repeat
):
    driver, file = controlled
    driver.repeat_rounds = repeat
    rounds = control_plugin.BLOCK_ROUNDS
    run(driver, 8 * rounds + 1, overlap)
    assert driver.fallbacks == 0
    driver._hand_over()
    assert driver.governor.results == 4 * rounds + 1
    assert (driver.governor.decided < driver.governor.results / 3) == (repeat > 1)
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["block"] for row in written] == list(range(8))
    assert [row["bypassed"] for row in written] == [False, True, True, False] * 2
    hooks_s = {
        bypassed: sum(row["hooks_s"] for row in written if row["bypassed"] is bypassed)
        for bypassed in (False, True)
    }
    assert hooks_s[False] > 2 * hooks_s[True]  # Some of the first launch of a block is left.
    for row in written:
        assert (row["batch_size"], row["width"], row["rounds"]) == (2, 4, rounds)
        assert row["timed_rounds"] == rounds - 4
        assert row["tokens"] == 5 * row["timed_rounds"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_block_with_a_prefill_in_it_is_left_out(controlled, overlap):
    driver, file = controlled
    rounds = control_plugin.BLOCK_ROUNDS
    run(driver, 4 * rounds + 2, overlap, prefill_at=rounds + 5)
    assert driver.fallbacks == 0
    written = [json.loads(line)["block"] for line in file.read_text().splitlines()]
    assert written == [0, 2, 3]


def test_the_threads_are_timed(controlled, monkeypatch):
    taken_s = control_plugin.time_background()
    writer = BackgroundWriter(lambda rows: sum(range(200_000)), "test")
    assert taken_s() == 0
    writer.put(1)
    writer.close()
    assert taken_s() > 0
