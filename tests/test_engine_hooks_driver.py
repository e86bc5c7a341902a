"""The driver on fakes of the scheduler's objects: decisions, joins, results, errors, records."""

import os
import random
from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from controller.calibration import Calibration
from controller.checkpoint import Checkpoint
from controller.decision import ListDecision
from controller.features import NUM_GLOBAL, NUM_PER_TIER
from controller.memory import JOINED
from controller.policy import NumpyPolicy, parameter_shapes
from controller.tiers import tier_of
from engine_hooks.bench_decision import stand_in_checkpoint
from engine_hooks.driver import HAND_OVER_ROUNDS, MAX_LAUNCHES, Driver
from engine_hooks.governor import Governor
from engine_hooks.guard import Guard
from engine_hooks.load import COUNT_EVERY, READ_EVERY, LoadReader
from engine_hooks.params import GovernedParams
from engine_hooks.rounds import Processed
from engine_hooks.symbols import SKIP_DRAFT_EXTEND, context_tokens
from engine_hooks.tiers import costed_tiers, runnable


class Request:
    def __init__(self, rid, prompt=10):
        self.rid = rid
        self.origin_input_ids = array("q", range(prompt))
        self.output_ids = array("q", [1])
        self.done = False

    def finished(self):
        return self.done


class Mode:
    def __init__(self, name):
        self.name = name

    def is_decode(self):
        return self.name == "decode"

    def is_extend(self):
        return self.name == "extend"

    def is_idle(self):
        return self.name == "idle"


def batch(mode, requests, **more):
    fields = {
        "seq_lens_sum": None,
        "seq_lens_cpu": None,
        "decoding_reqs": None,
        "extend_num_tokens": 10,
        **more,
    }
    return SimpleNamespace(reqs=requests, forward_mode=Mode(mode), **fields)


def scheduler():
    return SimpleNamespace(
        waiting_queue=[],
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 600),
        tree_cache=SimpleNamespace(evictable_size=lambda: 150),
        max_total_num_tokens=1000,
    )


class Worker:
    """Runs the steps that it is told, as SGLang's worker does, with made-up results."""

    def __init__(self, params):
        self.params = params
        self.flags = []

    def run(self, scheduler, batch):
        if not batch.forward_mode.is_decode():
            return SimpleNamespace(
                speculative_num_draft_tokens=None, num_correct_drafts_per_req_cpu=None
            )
        steps = self.params.get_steps_for_batch(len(batch.reqs))
        self.flags.append(os.environ.get(SKIP_DRAFT_EXTEND) if steps == 0 else steps)
        return SimpleNamespace(
            speculative_num_draft_tokens=steps + 1,
            num_correct_drafts_per_req_cpu=[min(steps, 1)] * len(batch.reqs),
        )


def keep(scheduler, batch, result):
    return "returned"


def governor_on_lists():
    """Return a governor that compiles nothing; tests/test_decision.py compares the two forms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine_hooks.governor.make_decision", ListDecision)
        return Governor(stand_in_checkpoint(), 16, 3)


@pytest.fixture(autouse=True)
def clean_flag(monkeypatch):
    monkeypatch.delenv(SKIP_DRAFT_EXTEND, raising=False)
    yield
    os.environ.pop(SKIP_DRAFT_EXTEND, None)


@pytest.fixture
def params(monkeypatch):
    monkeypatch.setattr("engine_hooks.params.candidate_steps_of", lambda config: [0, 1, 2, 3, 5, 7])
    return GovernedParams(3, None)


@pytest.fixture
def driver(params):
    made = Driver()
    made.governor = governor_on_lists()
    made.params = params
    made.mode = "on"
    return made


def script(driver, tiers):
    """Have the policy choose these tiers, one after the other."""
    rest = iter(tiers)

    def choose(*seen):
        tier = next(rest)
        if isinstance(tier, Exception):
            raise tier
        return tier

    driver.governor.policy_tier = choose


def play(driver, params, rounds, overlap=False):
    """Run decode rounds of two requests; return what the worker ran."""
    worker, here = Worker(params), scheduler()
    running = batch("decode", [Request("a"), Request("b")])
    pending = None
    for _ in range(rounds):
        result = driver.run_batch(worker.run, here, running)
        if pending is not None:
            driver.process_batch_result(keep, here, running, pending)
        pending = result
        if not overlap:
            driver.process_batch_result(keep, here, running, pending)
            pending = None
    return worker.flags


def test_what_is_asked_for_runs(driver, params):
    script(driver, [1, 0, 4, 0, 5])
    assert play(driver, params, 5) == [1, "true", 5, "true", 7]
    assert driver.fallbacks == 0


def test_an_error_leaves_the_round_static_and_is_logged_once(driver, params, caplog):
    script(driver, [1, 0, ValueError("planted"), float("nan"), -1, 99, 1])
    assert play(driver, params, 7) == [1, "true", 3, 3, 3, 3, 1]
    assert driver.fallbacks == 4
    assert SKIP_DRAFT_EXTEND not in os.environ
    (record,) = caplog.records
    assert "an error in the governor" in record.message
    assert "planted" in record.exc_text


def test_errors_of_sglang_pass_through(driver):
    def fails(*_):
        raise RuntimeError("SGLang's own")

    for call in (
        lambda: driver.run_batch(fails, scheduler(), batch("decode", [Request("a")])),
        lambda: driver.process_batch_result(fails, scheduler(), batch("decode", []), None),
    ):
        with pytest.raises(RuntimeError, match="SGLang's own"):
            call()
    assert driver.fallbacks == 0


def test_arguments_and_results_are_handed_through(driver):
    seen = []
    done = driver.process_batch_result(
        lambda *args, **kwargs: seen.append((args[2:], kwargs)) or "out",
        scheduler(),
        batch("decode", []),
        "result",
        1,
        two=2,
    )
    assert done == "out"
    assert seen == [(("result", 1), {"two": 2})]


def test_a_result_counts_for_the_round_it_belongs_to_under_overlap(driver, params):
    calls = []
    driver.governor.result = lambda *args: calls.append(args)
    script(driver, [1, 3, 4, 0, 2])
    play(driver, params, 5, overlap=True)
    # (tier, steps, cold start, correct); the last round's result is still to come.
    assert calls == [
        (1, 1, False, [1, 1]),
        (3, 3, False, [1, 1]),
        (4, 5, False, [1, 1]),
    ]


def test_a_result_of_no_launch_is_an_error(driver, params, caplog):
    ran = batch("decode", [Request("a")])
    assert driver.process_batch_result(keep, scheduler(), ran, result(4, [1])) == "returned"
    assert driver.fallbacks == 1
    assert "belongs to no launch" in caplog.text
    driver.process_batch_result(keep, scheduler(), batch("extend", []), result(None, None))
    assert driver.fallbacks == 1


def test_a_cold_start_is_noted_after_a_round_that_left_the_draft_behind(driver, params):
    calls = []
    driver.governor.result = lambda *args: calls.append(args[2])
    script(driver, [1, 0, 1, 1])
    play(driver, params, 4)
    assert calls == [False, True, False]


def test_requests_join_when_they_first_decode(driver, params):
    script(driver, [0] * 9)
    worker, here = Worker(params), scheduler()
    a, b, c, d = (Request(name) for name in "abcd")

    def decode(*requests):
        driver.run_batch(worker.run, here, batch("decode", list(requests)))
        return driver.governor.decision._memory[JOINED]

    driver.run_batch(worker.run, here, batch("extend", [a, b]))
    assert decode(a, b) == 2
    assert decode(a, b) == 2
    driver.run_batch(worker.run, here, batch("extend", [c]))  # one chunk of two
    assert decode(a, b) == 2
    driver.run_batch(worker.run, here, batch("extend", [c, d, a], decoding_reqs=[a]))
    d.done = True  # its first token was its last
    assert decode(a, b, c) == 3
    assert list(driver._prefilled) == [d]
    driver.run_batch(worker.run, here, batch("extend", [b]))  # was retracted and comes again
    assert decode(a, c, b) == 4


def test_a_server_that_never_decodes_keeps_no_requests(driver, params):
    worker, here = Worker(params), scheduler()
    for index in range(200):
        ran = batch("extend", [Request(str(index))])
        driver.process_batch_result(keep, here, ran, driver.run_batch(worker.run, here, ran))
    del ran
    assert len(driver._prefilled) <= MAX_LAUNCHES
    assert driver.fallbacks == 0


def test_requests_that_join_have_their_context_counted(driver, params):
    seen = []
    driver.governor.policy_tier = lambda *what: seen.append(what[2]) or 1
    worker, here = Worker(params), scheduler()
    old = [Request(str(i), prompt=10) for i in range(40)]
    new = [Request(f"new {i}", prompt=8000) for i in range(20)]
    driver.run_batch(worker.run, here, batch("decode", old))
    driver.run_batch(worker.run, here, batch("extend", new))
    driver.run_batch(worker.run, here, batch("decode", old[20:] + new))
    assert seen == [40 * 11, 20 * 11 + 20 * 8001]


def test_an_unreadable_batch_is_sglangs_own_trouble(driver, params):
    driver.decisions = SimpleNamespace(put=lambda row: None)
    broken = SimpleNamespace(reqs=None, forward_mode=SimpleNamespace(is_decode=lambda: False))
    assert driver.process_batch_result(keep, scheduler(), broken, None) == "returned"
    assert driver.fallbacks == 1


def test_a_guard_that_cannot_reach_the_others_is_given_up(driver, params):
    def fails(collect):
        raise RuntimeError("no connection")

    driver.guard = SimpleNamespace(begin_round=fails)
    script(driver, [1, 1])
    assert play(driver, params, 2) == [1, 1]
    assert driver.guard is None
    assert driver.fallbacks == 1


def test_the_mode_changes_with_a_request_to_sglang(driver, params, monkeypatch, caplog):
    monkeypatch.setattr("engine_hooks.driver.settings_reply", lambda updated: updated)

    def change(**values):
        request = SimpleNamespace(server_args=values)
        return driver.set_internal_state(lambda *_: "SGLang's", scheduler(), request)

    script(driver, [1, 5, 1, 1])
    assert play(driver, params, 2) == [1, 7]
    assert change(specgovernor_mode=1) is True
    assert play(driver, params, 1) == [3]
    assert change(specgovernor_mode=0) is True
    assert play(driver, params, 1) == [3]
    assert change(specgovernor_mode=2) is True
    assert play(driver, params, 1) == [1]
    assert change(pp_max_micro_batch_size=3) == "SGLang's"
    for values in (
        {"specgovernor_mode": 3},
        {"specgovernor_mode": -1},
        {"specgovernor_mode": 1.5},
        {"specgovernor_mode": 1, "pp_max_micro_batch_size": 3},
    ):
        assert change(**values) is False
        assert driver.mode == "on"
    driver.params = None
    driver.mode = "off"
    assert change(specgovernor_mode=2) is False
    assert change(specgovernor_mode=1) is True
    assert "adaptive speculation is off" in caplog.text
    driver.governor = None
    assert change(specgovernor_mode=1) is False


def test_rounds_are_summed_up_in_the_log(driver, params, caplog, monkeypatch):
    monkeypatch.setattr("engine_hooks.summary.SUMMARY_ROUNDS", 4)
    caplog.set_level("INFO")
    script(driver, [1, 0, 0, 1] * 2)
    driver.summary.speaks = True
    play(driver, params, 8)
    assert not caplog.records
    driver.on_idle(lambda scheduler: None, scheduler())
    assert [record.getMessage() for record in caplog.records] == [
        "specgovernor: last 4 rounds by tier: 1: 2, cold: 2; 2 switches; 4 as decided; "
        "0 fallbacks since the start"
    ] * 2


@pytest.mark.parametrize("overlap", [False, True])
def test_guard_and_metrics_learn_of_every_round_once(driver, params, overlap):
    counted, measured = [], []
    driver.metrics = SimpleNamespace(put=counted.append)
    guard = Guard(
        driver.governor.tiers.num_steps, [""] * 6, 3, driver.governor.accept_len, lambda o: o, True
    )
    guard.measured = lambda *row: measured.append(row)
    driver.guard = guard
    rounds = 2 * HAND_OVER_ROUNDS + 7
    tiers = [1 + index // 5 % 4 for index in range(rounds)]
    script(driver, tiers)
    play(driver, params, rounds, overlap)
    assert len(counted) < rounds
    driver.on_idle(lambda scheduler: None, scheduler())
    results = rounds - overlap
    names = [driver.governor.tiers.tiers[tier].name for tier in tiers]
    assert [count.tier for count in counted] == names[:results]
    assert [(row[0], row[5], row[6]) for row in measured] == [
        # Of five rounds of a tier the last three have times of their own.
        (tiers[index], True, index % 5 >= 2)
        for index in range(1, results)
    ]
    assert driver.fallbacks == 0


def decide_as(driver, choose):
    """Have the policy choose what a function of the number of the decision says; return a count."""
    asked = []
    driver.governor.policy_tier = lambda *seen: asked.append(seen[0]) or choose(len(asked))
    return asked


@pytest.mark.parametrize("overlap", [False, True])
def test_few_requests_repeat_a_decision(driver, params, overlap, monkeypatch):
    driver.repeat_rounds = 3
    now = iter(range(10_000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    counted, measured, traced, learned = [], [], [], []
    driver.metrics = SimpleNamespace(put=counted.append)
    driver.recorder = SimpleNamespace(put=traced.append)
    guard = Guard(
        driver.governor.tiers.num_steps, [""] * 6, 3, driver.governor.accept_len, lambda o: o, True
    )
    guard.measured = lambda *row: measured.append(row)
    driver.guard = guard
    learn = driver.governor.result
    driver.governor.result = lambda *row: learned.append(row) or learn(*row)
    # Once depth 1 was chosen for three rounds, every third round is decided on, until it changes.
    asked = decide_as(driver, lambda decision: 1 if decision <= 5 else 4)
    ran = [1] * 9 + [5] * 6
    assert play(driver, params, 15, overlap) == ran
    assert len(asked) == 9
    driver.on_idle(lambda scheduler: None, scheduler())
    ran = ran[: 15 - overlap]
    assert [(count.tier, count.tokens) for count in counted] == [(str(n), 4) for n in ran]
    # Only rounds that were decided on have a time of decision.
    decided = [count.decision_s is not None for count in counted]
    assert decided == [i not in (4, 5, 7, 8, 13, 14) for i in range(len(ran))]
    # Every round makes 4 tokens, which are added to the context that was read.
    contexts = [22] * 4 + [26, 30, 22, 26, 30] + [22] * 4 + [26, 30]
    assert [row[1:5] for row in traced] == [
        (n, 2, context, 0) for n, context in zip(ran, contexts, strict=False)
    ]
    assert all(row[5] > 0 and row[7] > 0 for row in traced)
    assert [row[1] for row in learned] == ran
    assert [row[2:4] for row in measured] == [(4, row[5]) for row in traced[1:]]
    assert driver.fallbacks == 0
    assert not driver._repeats


@pytest.mark.parametrize("at", range(1, 20))
@pytest.mark.parametrize("what", ["recorder", "metrics", "guard"])
def test_an_error_beside_the_decisions_changes_no_round(driver, params, what, at):
    """Only the first rank records and measures: the others would go on as if nothing had been."""
    driver.repeat_rounds = 4
    calls, verdicts = [], []

    def fails_once(*_):
        calls.append(None)
        if len(calls) == at:
            raise OSError("no space left")

    driver.guard = Guard(
        driver.governor.tiers.num_steps,
        [""] * 6,
        3,
        driver.governor.accept_len,
        lambda order: verdicts.append(driver.guard._round) or order,
        True,
    )
    driver.guard._judge = lambda: (0, 0, 0, 0)
    driver.guard.measured = fails_once if what == "guard" else lambda *_: None
    if what == "metrics":
        driver.metrics = SimpleNamespace(put=fails_once, count_fallback=lambda: None)
    if what == "recorder":
        driver.recorder = SimpleNamespace(put=fails_once)
    asked = decide_as(driver, lambda decision: 1)
    assert play(driver, params, 60, overlap=True) == [1] * 60
    assert len(asked) == 5 + 13
    assert verdicts == [25, 53]
    assert len(calls) >= at


def test_processed_results_of_repeated_rounds_are_let_go(driver, params):
    driver.repeat_rounds = 8
    decide_as(driver, lambda decision: 1)
    play(driver, params, 15)
    assert len(driver._repeats) == 6
    assert all(isinstance(repeat[0], Processed) for repeat in driver._repeats)
    assert driver._decided.result is None


def test_a_tier_that_changes_is_decided_on_round_by_round(driver, params):
    driver.repeat_rounds = 8
    tiers = [1, 3, 3, 3, 3, 3, 3, 3, 3, 1, 0, 0]
    script(driver, tiers)
    play(driver, params, 12)
    with pytest.raises(StopIteration):
        next(driver.governor.policy_tier.__closure__[0].cell_contents)
    assert driver.fallbacks == 0


def test_a_repeated_decision_ends_when_requests_join_or_leave(driver, params):
    driver.repeat_rounds = 2
    asked = decide_as(driver, lambda decision: 1)
    worker, here = Worker(params), scheduler()
    a, b, c = (Request(name) for name in "abc")

    def run(mode, *requests):
        before = len(asked)
        ran = batch(mode, list(requests))
        driver.process_batch_result(keep, here, ran, driver.run_batch(worker.run, here, ran))
        return len(asked) > before

    assert [run("decode", a, b) for _ in range(6)] == [True, True, True, False, True, False]
    assert run("decode", a, b)
    assert run("decode", a)  # b has left.
    assert not run("decode", a)
    assert run("decode", a)
    run("extend", c)
    assert run("decode", a, c)
    run("extend", b)  # Takes the place of c.
    assert run("decode", a, b)
    many = [Request(str(i)) for i in range(5)]
    assert [run("decode", *many) for _ in range(4)] == [True] * 4
    assert set(worker.flags) == {1}
    assert driver.fallbacks == 0


def test_the_guard_counts_repeated_rounds_and_stops_them_while_it_acts(driver, params, monkeypatch):
    driver.repeat_rounds = 4
    orders = iter([(1, 2, 1, 12)])  # Try tier 2 for 12 rounds.
    driver.guard = Guard(
        driver.governor.tiers.num_steps,
        [""] * 6,
        3,
        driver.governor.accept_len,
        lambda order: next(orders, (0, 0, 0, 0)),
        True,
    )
    monkeypatch.setattr(driver.guard, "_judge", lambda: (0, 0, 0, 0))
    asked = decide_as(driver, lambda decision: 1)
    flags = play(driver, params, 60, overlap=True)
    # Decisions on rounds 1 to 5, then on every fourth: the first after the 25th verdict is due is
    # that of round 25. While the guard acts, and for four rounds after it, every round has one.
    assert flags == [1] * 24 + [2] * 12 + [1] * 24
    assert len(asked) == 5 + 4 + 12 + 5 + 4
    assert driver.guard._round == 57  # The last three repeat.


@pytest.mark.parametrize("overlap", [False, True])
def test_repeated_rounds_are_in_the_decision_log(driver, params, overlap):
    rows = []
    driver.repeat_rounds = 2
    driver.decisions = SimpleNamespace(put=rows.append)
    decide_as(driver, lambda decision: 3)
    play(driver, params, 7, overlap)
    driver.on_idle(lambda scheduler: None, scheduler())
    results = 7 - overlap
    repeats = [False, False, False, True, False, True, False][:results]
    assert [(row["num_steps"], row["asked"]) for row in rows] == [(3, "3")] * results
    assert [row["repeats"] for row in rows] == repeats
    assert [row["decision_us"] is None for row in rows] == repeats
    for row in rows:
        assert (row["requests"], row["finished_before"]) == (["a", "b"], [False, False])
        assert row["num_correct"] == [1, 1]


def test_two_ranks_decide_alike_whatever_their_timing(monkeypatch, params):
    """The same events at other times, with other addresses and hash seeds, give the same tiers."""
    asked = []
    for rank in range(2):
        generator = random.Random(3)
        made = Driver()
        made.governor = governor_on_lists()
        made.params = GovernedParams(3, None)
        made.mode = "on"
        worker, here = Worker(made.params), scheduler()
        clock = iter(range(10**6)) if rank else None
        if clock is not None:
            monkeypatch.setattr("time.perf_counter", lambda clock=clock: next(clock) * 7.0)
        running = [Request(str(i), prompt=generator.randrange(5, 50)) for i in range(4)]
        for _ in range(120):
            if generator.random() < 0.3:
                new = Request("x", prompt=generator.randrange(5, 50))
                made.run_batch(worker.run, here, batch("extend", [new]))
                running = [*running, new][-9:]
            here.waiting_queue = [None] * generator.randrange(5)
            ran = batch("decode", running)
            made.process_batch_result(keep, here, ran, made.run_batch(worker.run, here, ran))
        assert made.fallbacks == 0
        asked.append(worker.flags)
    assert asked[0] == asked[1]
    assert len(set(asked[0])) > 1


def result(width, correct):
    return SimpleNamespace(
        speculative_num_draft_tokens=width, num_correct_drafts_per_req_cpu=correct
    )


def test_a_server_without_a_policy_can_be_recorded(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    driver, here, rows = Driver(), scheduler(), []
    driver.recorder = SimpleNamespace(put=rows.append)
    requests = [Request("a"), Request("b", prompt=20)]
    for mode, outcome in [
        ("extend", result(None, None)),
        ("decode", result(4, [3, 2])),
        ("decode", result(None, None)),
        ("idle", result(None, None)),
    ]:
        ran = batch(mode, requests)
        driver.run_batch(lambda *_, out=outcome: out, here, ran)
        driver.process_batch_result(keep, here, ran, outcome)
    assert [row[:5] for row in rows] == [
        ("prefill", None, 2, 32, 0),
        ("decode", 3, 2, 32, 0),
        ("decode", None, 2, 32, 0),
    ]
    assert [row[6] for row in rows] == [10, None, None]
    assert [row[8] for row in rows] == [None, 2.5, None]
    # The clock is read before and after a launch and at a result: the first batch is timed from its
    # launch, the others from the result before.
    assert [row[5] for row in rows] == [3, 4, 4]
    driver.on_idle(lambda scheduler: None, here)
    for _ in range(50):
        next(now)  # idle
    ran = batch("decode", requests)
    driver.run_batch(lambda *_: outcome, here, ran)
    driver.process_batch_result(keep, here, ran, outcome)
    assert rows[-1][5] == 3


def test_native_runs_as_cold_and_is_costed_so_where_it_can_be():
    with_cold = Calibration.load("checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")
    trained = [tier_of(name) for name in ("native", "1", "3")]
    runs = runnable(trained, with_cold)
    assert [tier.name for tier in runs.tiers] == ["cold", "1", "3"]
    assert runs.num_steps == (0, 1, 3)
    assert runs.keeps_warm == (False, True, True)
    assert "'native' runs as 'cold'" in runs.notes[0]
    costed = costed_tiers(trained, runs.tiers, with_cold)
    assert [tier.name for tier in costed] == ["cold", "1", "3"]
    assert [runs.index_of(steps, True) for steps in range(8)] == [0, 1, 1, 2, 2, 2, 2, 2]


def test_of_tiers_that_run_alike_the_one_asked_for_counts():
    calibration = Calibration.load("checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")
    runs = runnable([tier_of(name) for name in ("native", "cold", "3")], calibration)
    assert runs.index_of(0, False) == 0
    assert runs.index_of(0, False, 1) == 1
    assert runs.index_of(3, True, 1) == 2


def test_a_tier_of_the_same_steps_is_told_apart_by_what_it_does_to_the_draft():
    calibration = Calibration.load("checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")
    runs = runnable([tier_of(name) for name in ("cold", "warm", "3")], calibration)
    assert (runs.index_of(0, False), runs.index_of(0, True), runs.index_of(3, True)) == (0, 1, 2)


def test_params_keep_sglangs_interface_and_take_what_newer_versions_add(params):
    params.set_cuda_graph_bs([8, 1, 4], something=1)
    assert params.cuda_graph_bs_for_step(5, something=1) == [1, 4, 8]
    assert params.on_verify_complete([1, 2], batch_size=2, something=1) is None
    assert params.get_steps_for_batch(4, something=1) == 3
    params.set_cuda_graph_bs(None)
    assert params.cuda_graph_bs_for_step(5) is None
    assert params.candidate_steps == [0, 1, 2, 3, 5, 7]


def test_a_governor_takes_a_batch_beyond_its_table():
    weights = parameter_shapes(NUM_GLOBAL, NUM_PER_TIER, 4, 4)
    stand_in = stand_in_checkpoint()
    zeros = {name: np.zeros(shape, np.float32) for name, shape in weights.items()}
    checkpoint = Checkpoint(
        NumpyPolicy(zeros), stand_in.tiers, stand_in.calibration, {}, {}, "", stand_in.directory
    )
    governor = Governor(checkpoint, 4, 3)
    assert governor.static_tier == 3
    assert governor.policy_tier(9, 0, 100, 0.5) == 0


def test_the_load_is_read_now_and_then_and_grows_in_between():
    reader, here = LoadReader(), scheduler()
    free = iter(range(750, 0, -50))
    here.token_to_kv_pool_allocator.available_size = lambda: next(free)
    here.tree_cache.evictable_size = lambda: 0

    def read(*requests, **more):
        reader.update(here, batch("decode", list(requests), **more), len(requests))
        return reader.context_tokens, reader.kv_use

    large = [Request(str(i), prompt=10) for i in range(40)]
    seen = []
    for _ in range(READ_EVERY + 1):
        seen.append(read(*large))
        reader.add(40)
        large[0].output_ids.append(1)  # Not looked at.
    grown = [40 * (11 + i) for i in range(READ_EVERY + 1)]
    assert seen == list(zip(grown, [0.25] * READ_EVERY + [pytest.approx(0.3)], strict=True))
    now = grown[-1] + 40
    # A few requests less have the mean; with many less it is read again.
    assert read(*large[:36]) == (now * 36 // 40, pytest.approx(0.3))
    assert read(*large[:34]) == (34 * 11 + READ_EVERY + 1, pytest.approx(0.35))
    # One of few is many.
    assert read(*large[:3]) == (3 * 11 + READ_EVERY + 1, pytest.approx(0.4))
    assert read(*large[:2]) == (2 * 11 + READ_EVERY + 1, pytest.approx(0.45))
    # Few are read every time.
    large[0].output_ids.append(1)
    assert read(*large[:2]) == (2 * 11 + READ_EVERY + 2, pytest.approx(0.5))
    assert read(*large[:8]) == (8 * 11 + READ_EVERY + 2, pytest.approx(0.55))
    large[0].output_ids.append(1)
    assert read(*large[:8]) == (8 * 11 + READ_EVERY + 2, pytest.approx(0.55))
    reader.forget()
    assert read(*large[:8]) == (8 * 11 + READ_EVERY + 3, pytest.approx(0.6))
    # What SGLang keeps goes first.
    reader.forget()
    assert read(*large[:2], seq_lens_cpu=SimpleNamespace(numpy=lambda: np.array([70, 7])))[0] == 77
    reader.forget()
    assert read(*large[:2], seq_lens_sum=78)[0] == 78


def test_what_the_load_grew_by_is_replaced_by_a_count_in_time():
    reader = LoadReader()
    large = [Request(str(i), prompt=10) for i in range(40)]
    for _ in range(COUNT_EVERY):
        reader.update(None, batch("decode", large), 40)
        reader.add(1)
    assert reader.context_tokens == 40 * 11 + COUNT_EVERY
    reader.update(None, batch("decode", large), 40)
    assert reader.context_tokens == 40 * 11


@pytest.mark.parametrize("overlap", [False, True])
def test_the_context_of_a_large_batch_follows_its_results(params, overlap):
    """Between two counts it is what a count would have given at every decision."""
    driver = Driver()
    driver.governor, driver.params, driver.mode = governor_on_lists(), params, "on"
    seen = []
    driver.governor.policy_tier = lambda *what: seen.append(what[2]) or 1
    worker, here = Worker(params), scheduler()
    running = [Request(str(i), prompt=10) for i in range(40)]
    counted, waiting = [], []
    for _ in range(20):
        ran = batch("decode", running)
        counted.append(context_tokens(ran))
        waiting.append((ran, driver.run_batch(worker.run, here, ran)))
        if len(waiting) > overlap:
            ran, result = waiting.pop(0)
            driver.process_batch_result(keep, here, ran, result)
            for request, correct in zip(
                running, result.num_correct_drafts_per_req_cpu, strict=True
            ):
                request.output_ids.extend([1] * (1 + correct))
    assert driver.fallbacks == 0
    assert seen == counted


def test_for_a_trace_the_load_is_read_at_every_round():
    reader, here = LoadReader(), scheduler()
    reader.exact = True
    large = [Request(str(i), prompt=10) for i in range(40)]
    for round_index in range(4):
        reader.update(here, batch("decode", large), 40)
        assert reader.context_tokens == 40 * (11 + round_index)
        for request in large:
            request.output_ids.append(1)


def test_a_rank_that_records_sees_what_the_others_see(params):
    """Only the first rank has a recorder; prefill batches must not change what it counts."""
    seen = []
    for records in (True, False):
        driver = Driver()
        driver.governor = governor_on_lists()
        driver.params = GovernedParams(3, None)
        driver.mode = "on"
        if records:
            driver.recorder = SimpleNamespace(put=lambda row: None)
        contexts = []
        driver.governor.policy_tier = lambda *what, seen=contexts: seen.append(what) or 1
        worker, here = Worker(driver.params), scheduler()
        running = [Request(str(i), prompt=10) for i in range(40)]
        for _ in range(5):
            for mode, requests in (
                ("decode", running),
                ("extend", [Request("long", prompt=900) for _ in range(40)]),
            ):
                ran = batch(mode, requests)
                driver.process_batch_result(
                    keep, here, ran, driver.run_batch(worker.run, here, ran)
                )
        assert driver.fallbacks == 0
        seen.append(contexts)
    assert seen[0] == seen[1]
