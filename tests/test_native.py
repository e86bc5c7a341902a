"""Native rounds on fakes: the switch between the kinds of off, set-up on all ranks, one round."""

import os
from types import SimpleNamespace

import pytest

from controller.calibration import Calibration
from controller.tiers import tier_of
from engine_hooks import native_setup, symbols
from engine_hooks.native import NativeDecode
from engine_hooks.symbols import SKIP_DRAFT_EXTEND
from engine_hooks.tiers import OffSwitch, runnable

torch = pytest.importorskip("torch")
CALIBRATION = "checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json"


@pytest.fixture(autouse=True)
def clean_flag(monkeypatch):
    monkeypatch.delenv(SKIP_DRAFT_EXTEND, raising=False)
    yield
    os.environ.pop(SKIP_DRAFT_EXTEND, None)


def test_the_switch_has_three_positions():
    native = NativeDecode()
    switch = OffSwitch(native)
    assert switch.ran == "warm"
    for kind, flag in (("cold", "true"), ("native", "true"), ("warm", "false")):
        switch.ask(kind)
        assert os.environ[SKIP_DRAFT_EXTEND] == flag
        assert native.wanted == (kind == "native")
        native.ran = native.wanted
        assert switch.ran == kind
    switch.ask("native")
    native.ran = False  # It could not.
    assert switch.ran == "cold"
    switch.restore()
    assert SKIP_DRAFT_EXTEND not in os.environ
    assert not native.wanted
    assert switch.ran == "warm"


def test_native_runs_as_itself_where_it_can():
    calibration = Calibration.load(CALIBRATION)
    trained = [tier_of(name) for name in ("native", "cold", "warm", "3")]
    runs = runnable(trained, calibration, native=True)
    assert [tier.name for tier in runs.tiers] == ["native", "cold", "warm", "3"]
    assert runs.kinds == ("native", "cold", "warm", "speculate")
    assert runs.keeps_warm == (False, False, True, True)
    assert runs.notes == ()
    assert [runs.index_of(0, kind == "warm", None, kind) for kind in runs.kinds[:3]] == [0, 1, 2]
    # Asked for and not run is not what ran.
    assert runs.index_of(0, False, 0, "cold") == 1
    assert runs.index_of(0, False, 0, "native") == 0


class Target:
    """Decodes: each next token is ten times the last one."""

    def __init__(self):
        self.seen = []

    def forward(self, batch):
        self.seen.append(batch)
        tokens = batch.input_ids * 10
        logprobs = -tokens.float() if batch.return_logprob else None
        return SimpleNamespace(
            next_token_ids=tokens, logits_output=SimpleNamespace(next_token_logprobs=logprobs)
        )


class DraftInput:
    def __init__(self, bonus_tokens):
        self.bonus_tokens = bonus_tokens


class Worker:
    """SGLang's speculative worker, at the steps that it was told."""

    def __init__(self, steps=0):
        self.speculative_num_steps = None
        self._steps = steps

    def activate_step_by_batch(self, batch_size):
        self.speculative_num_steps = self._steps

    def forward_batch_generation(self, batch, on_publish=None, **more):
        return "SGLang's"

    def _stub_skipped_draft_extend(self, batch, result):
        result.stubbed = len(batch.seq_lens)


def made(monkeypatch, worker):
    target, table = Target(), torch.arange(40).reshape(4, 10)
    plain = SimpleNamespace(
        run=target.forward, slots=lambda pool, lengths: table[pool, lengths], description="fake"
    )
    monkeypatch.setattr("engine_hooks.native.PlainDecode", lambda given: plain)
    native = NativeDecode()
    assert native.prepare(SimpleNamespace(model_worker=worker)) == ""
    native.wanted = True
    return native, target


def decode_batch(**more):
    fields = {
        "forward_mode": SimpleNamespace(is_decode=lambda: True),
        "reqs": ["a", "b"],
        "is_extend_in_batch": False,
        "has_grammar": False,
        "return_hidden_states": False,
        "return_logprob": False,
        "spec_info": DraftInput(torch.tensor([7, 8], dtype=torch.int32)),
        "req_pool_indices": torch.tensor([3, 1]),
        "seq_lens": torch.tensor([5, 2]),
        "seq_lens_cpu": torch.tensor([5, 2]),
        "seq_lens_sum": 7,
        "out_cache_loc": None,
        "input_ids": None,
        **more,
    }
    return SimpleNamespace(**fields)


def test_a_native_round_decodes_one_token_and_hands_on_a_zero_step_result(monkeypatch):
    worker, published = Worker(), []
    native, target = made(monkeypatch, worker)
    batch = decode_batch()
    result = worker.forward_batch_generation(batch, on_publish=published.append)
    assert native.ran
    (seen,) = target.seen
    assert seen.spec_info is None
    assert seen.input_ids.tolist() == [7, 8]
    assert seen.out_cache_loc.tolist() == [35, 12]
    assert (seen.seq_lens.tolist(), seen.seq_lens_cpu.tolist(), seen.seq_lens_sum) == (
        [6, 3],
        [6, 3],
        9,
    )
    assert [lengths.tolist() for lengths in published] == [[6, 3]]
    assert result.next_token_ids.tolist() == [70, 80]
    assert result.accept_lens.tolist() == [1, 1]
    assert result.new_seq_lens.tolist() == [6, 3]
    assert result.speculative_num_draft_tokens == 1
    assert result.next_draft_input.bonus_tokens.tolist() == [70, 80]
    assert result.next_draft_input.bonus_tokens.dtype == torch.int32
    assert result.stubbed == 2
    # The scheduler's batch is as it was but for the slots that were written.
    assert (batch.seq_lens.tolist(), batch.seq_lens_sum) == ([5, 2], 7)
    assert batch.spec_info.bonus_tokens.tolist() == [7, 8]


def test_logprobs_are_of_the_verify_paths_shape_and_lengths_may_be_on_the_gpu_only(monkeypatch):
    worker = Worker()
    made(monkeypatch, worker)
    batch = decode_batch(return_logprob=True, seq_lens_cpu=None, seq_lens_sum=None)
    result = worker.forward_batch_generation(batch)
    assert result.logits_output.next_token_logprobs.tolist() == [[-70.0], [-80.0]]


@pytest.mark.parametrize(
    ("steps", "wanted", "more"),
    [
        (0, False, {}),
        (3, True, {}),
        (0, True, {"has_grammar": True}),
        (0, True, {"return_hidden_states": True}),
        (0, True, {"is_extend_in_batch": True}),
        (0, True, {"spec_info": None}),
        (0, True, {"forward_mode": SimpleNamespace(is_decode=lambda: False)}),
    ],
)
def test_any_other_round_is_sglangs(monkeypatch, steps, wanted, more):
    worker = Worker(steps)
    native, target = made(monkeypatch, worker)
    native.wanted = wanted
    assert worker.forward_batch_generation(decode_batch(**more)) == "SGLang's"
    assert not native.ran
    assert target.seen == []


def test_an_error_leaves_the_round_and_all_later_ones_to_sglang(monkeypatch, caplog):
    worker = Worker()
    native, target = made(monkeypatch, worker)
    batch = decode_batch(spec_info=DraftInput("no tensor"))
    assert worker.forward_batch_generation(batch) == "SGLang's"
    assert worker.forward_batch_generation(decode_batch()) == "SGLang's"
    assert (native.failures, native.available, target.seen) == (1, False, [])
    assert caplog.text.count("an error in a native round") == 1


@pytest.mark.parametrize(
    ("refusals", "faults", "works"),
    [
        (("", ""), ("", ""), True),
        (("", "no memory"), ("", ""), False),
        (("", ""), ("", "broken"), False),
    ],
)
def test_all_ranks_run_native_rounds_or_none(monkeypatch, caplog, refusals, faults, works):
    # What the other rank says, in the order in which both are asked.
    others = iter((refusals[1], faults[1]))
    monkeypatch.setattr(native_setup, "first_reason", lambda reason, group: reason or next(others))
    native = NativeDecode()
    steps = []
    native.refusal = lambda scheduler: steps.append("asked") or refusals[0]
    native.prepare = lambda scheduler: steps.append("prepared") or faults[0]
    native.remove = lambda: steps.append("removed")
    scheduler = SimpleNamespace(tp_cpu_group=None)
    assert native_setup.set_up(native, scheduler, lambda scheduler: True) == works
    assert steps == ["asked"] + ["prepared"] * (not refusals[1]) + ["removed"] * bool(faults[1])
    assert ("'native' cannot run here" in caplog.text) != works


def test_a_policy_without_a_native_tier_captures_nothing_and_says_nothing(monkeypatch, caplog):
    monkeypatch.setattr(native_setup, "first_reason", lambda reason, group: reason)
    native = NativeDecode()
    scheduler = SimpleNamespace(tp_cpu_group=None)
    assert not native_setup.set_up(native, scheduler, lambda scheduler: False)
    assert caplog.text == ""


def obstacle(pool="MHATokenToKVPool", speculates=True, swa=False, free=8 << 30, **args):
    kv_pool = type(pool, (), {})()
    runner = SimpleNamespace(
        token_to_kv_pool=kv_pool,
        is_hybrid_swa=swa,
        model_config=SimpleNamespace(is_encoder_decoder=False, model_is_mrope=False),
    )
    return symbols.native_obstacle(
        SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=runner),
            server_args=SimpleNamespace(**args),
            spec_algorithm=SimpleNamespace(is_none=lambda: not speculates),
        )
    )


def test_what_it_was_not_made_for_is_named():
    assert obstacle() == ""
    assert "SWAKVPool" in obstacle(pool="SWAKVPool")
    assert "KV pool" in obstacle(swa=True)
    assert obstacle(enable_lora=True) == "enable_lora is on"
    assert "does not speculate" in obstacle(speculates=False)
