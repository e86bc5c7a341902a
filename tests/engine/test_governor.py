"""The governor in the real engine: what it asks for is what runs, and no token changes.

Greedy output is compared with that of an engine without speculation, for the same work: batches of
one, three and eight, and requests that join, leave and are aborted while others decode.
"""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import texts
from harness import start_engine, write_plugin

from controller.calibration import Calibration
from controller.checkpoint import save_checkpoint
from controller.features import NUM_GLOBAL, NUM_PER_TIER, TIER_FEATURES
from controller.policy import parameter_shapes
from controller.tiers import tier_of
from controller.trace import read_trace

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[2]
CALIBRATION = ROOT / "checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json"
SHIPPED = ROOT / "checkpoints/h200-llama3-8b-eagle3-fa3"
ALL_KINDS = "native,cold,warm,1,2,3,5,7"

RANDOM_TIERS = """
import random

def register():
    from engine_hooks.governor import Governor

    generator = random.Random(11)  # the same on every rank
    Governor.policy_tier = lambda self, *seen: generator.randrange(len(self.tiers.tiers))
"""

# The tier that a file names.
TIER_OF_FILE = """
import os, pathlib

def register():
    from engine_hooks.governor import Governor

    file = pathlib.Path(os.environ["TIER_FILE"])

    def policy_tier(self, *seen):
        return [tier.name for tier in self.tiers.tiers].index(file.read_text())

    Governor.policy_tier = policy_tier
"""


def make_checkpoint(folder, tiers):
    """Save a policy that looks at everything a little, and likes tiers that it has not used."""
    rng = np.random.default_rng(0)
    shapes = parameter_shapes(NUM_GLOBAL, NUM_PER_TIER, 16, 16)
    weights = {n: rng.normal(0.0, 0.1, s).astype(np.float32) for n, s in shapes.items()}
    weights["skip.weight"][[f.name for f in TIER_FEATURES].index("since_used")] = 8.0
    save_checkpoint(
        folder,
        parameters=weights,
        tiers=[tier_of(name) for name in tiers.split(",")],
        calibration=Calibration.load(CALIBRATION),
        training_config={},
        evaluation={},
    )
    return folder


def governed(tmp_path, tiers, **more):
    """Return the environment of an engine under a policy with these tiers, and its log's path.

    Without the guard, which would overrule such a policy, and with a decision on every round,
    unless `more` says otherwise.
    """
    checkpoint = make_checkpoint(tmp_path / "checkpoint", tiers)
    decisions = tmp_path / "decisions.jsonl"
    return decisions, {
        "SPECGOVERNOR_POLICY": str(checkpoint),
        "SPECGOVERNOR_DECISIONS": str(decisions),
        "SPECGOVERNOR_GUARD": "0",
        "SPECGOVERNOR_REPEAT": "1",
        **more,
    }


def prompts(count, seed=7):
    return texts.prompts(count, seed)


def play(engine):
    """Give the engine its work; return the tokens of every request, and SGLang's accounts."""
    outputs = [out for size in (1, 3, 8) for out in engine.generate(prompts(size), 48)]
    long = engine.submit(prompts(1, seed=1)[0], 160)
    aborted = engine.submit(prompts(1, seed=2)[0], 1000)
    long.wait_for_tokens(8)
    joined = [engine.submit(prompt, 24) for prompt in prompts(3, seed=3)]
    aborted.wait_for_tokens(30)
    aborted.abort()
    whole = [request.output() for request in (*joined, long)]
    cut = aborted.output()
    return [out.token_ids for out in (*outputs, *whole)], cut.token_ids, [*outputs, *whole, cut]


@pytest.fixture(scope="module")
def plain():
    """Play without speculation; the request that is aborted runs on for as long as it might."""
    with start_engine(speculative_algorithm=None) as engine:
        tokens, _, _ = play(engine)
        return tokens, engine.generate(prompts(1, seed=2), 1000)[0].token_ids


def check_same_tokens(played, plain):
    tokens, cut, _ = played
    whole, uncut = plain
    assert tokens == whole
    assert len(cut) >= 30
    assert cut == uncut[: len(cut)]


def read_rounds(path):
    time.sleep(1.5)  # the log is written once a second
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ran(row):
    return row["off"] or row["num_steps"]


def check_accounts(rounds, outputs):
    """Compare the sums of the log with SGLang's own account of each request."""
    correct, verified = {}, {}
    for row in rounds:
        rows = zip(row["requests"], row["num_correct"], row["finished_before"], strict=True)
        for request, count, finished in rows:
            if not finished:
                correct[request] = correct.get(request, 0) + count
                verified[request] = verified.get(request, 0) + 1
    for output in outputs:
        request = output.meta_info["id"]
        assert correct[request] == output.meta_info["spec_num_correct_drafts"]
        assert verified[request] == output.meta_info["spec_verify_ct"]


def test_a_tier_drawn_anew_every_round_runs_as_asked_and_changes_no_token(tmp_path, plain):
    decisions, env = governed(tmp_path, ALL_KINDS)
    plugin = write_plugin(tmp_path / "plugin", RANDOM_TIERS)
    with start_engine(env=env, plugins=[plugin]) as engine:
        played = play(engine)
        log = engine.log()
        rounds = read_rounds(decisions)
    check_same_tokens(played, plain)
    assert [row["asked"] for row in rounds] == [str(ran(row)) for row in rounds]
    assert {row["asked"] for row in rounds} == set(ALL_KINDS.split(","))
    assert not any(row["repeats"] for row in rounds)
    check_accounts(rounds, played[2])
    assert "governs SGLang 0.5.23: 5 hooks verified, policy checkpoint sha256 " in log
    assert "candidate steps [0, 1, 2, 3, 5, 7]" in log
    assert "an error in the governor" not in log
    assert "Switch adaptive runtime state" not in log


def test_every_fixed_tier_changes_no_token(tmp_path, plain):
    decisions, env = governed(tmp_path, ALL_KINDS)
    file = tmp_path / "tier"
    plugin = write_plugin(tmp_path / "plugin", TIER_OF_FILE)
    with start_engine(env={**env, "TIER_FILE": str(file)}, plugins=[plugin]) as engine:
        known = 0
        for tier in ALL_KINDS.split(","):
            file.write_text(tier)
            played = play(engine)
            check_same_tokens(played, plain)
            rounds = read_rounds(decisions)[known:]
            known += len(rounds)
            assert {str(ran(row)) for row in rounds} == {tier}
            check_accounts(rounds, played[2])


def test_the_shipped_policy_decides_and_changes_no_token(tmp_path, plain):
    decisions = tmp_path / "decisions.jsonl"
    env = {"SPECGOVERNOR_POLICY": str(SHIPPED), "SPECGOVERNOR_DECISIONS": str(decisions)}
    with start_engine(env=env, disable_radix_cache=False) as engine:
        played = play(engine)
        log = engine.log()
        rounds = read_rounds(decisions)
    check_same_tokens(played, plain)
    assert [row["asked"] for row in rounds] == [str(ran(row)) for row in rounds]
    assert len({row["asked"] for row in rounds}) > 1
    # Few requests repeat a decision, more do not.
    assert {row["repeats"] for row in rounds if row["batch_size"] <= 4} == {True, False}
    assert {row["repeats"] for row in rounds if row["batch_size"] > 4} == {False}
    check_accounts(rounds, played[2])
    assert f"policy {SHIPPED.name} sha256 " in log
    assert "an error in the governor" not in log
    assert "Numba" not in log


def test_a_policy_decides_and_is_traced_with_the_prefix_cache_on(tmp_path, plain):
    trace_file = tmp_path / "trace.jsonl.gz"
    decisions, env = governed(
        tmp_path, "native,1,3,5", SPECGOVERNOR_TRACE=str(trace_file), SPECGOVERNOR_REPEAT="2"
    )
    with start_engine(env=env, disable_radix_cache=False) as engine:
        first, again = play(engine), play(engine)
        log = engine.log()
        rounds = read_rounds(decisions)
        trace = read_trace(trace_file)
    check_same_tokens(first, plain)
    check_same_tokens(again, plain)
    assert "native rounds: eager" in log
    assert "'native' runs as 'cold'" not in log
    assert [row["asked"] for row in rounds] == [str(ran(row)) for row in rounds]
    assert len({row["asked"] for row in rounds}) > 1
    check_accounts(rounds, [*first[2], *again[2]])
    decoded = [row for row in trace.rows if row.phase == "decode"]
    assert [(row.num_steps, row.batch_size) for row in decoded] == [
        (row["num_steps"] or None, row["batch_size"]) for row in rounds
    ]
    assert sum(row.new_tokens for row in trace.rows if row.phase == "prefill") > 0
    assert trace.header.zero_step == "cold"
    assert trace.header.acceptance == "real"


def test_shadow_decides_and_changes_nothing(tmp_path, plain):
    decisions, env = governed(tmp_path, "cold,1,2,3,5,7", SPECGOVERNOR_MODE="shadow")
    plugin = write_plugin(tmp_path / "plugin", RANDOM_TIERS)
    with start_engine(env=env, plugins=[plugin]) as engine:
        played = play(engine)
        log = engine.log()
        rounds = read_rounds(decisions)
        arguments = engine.server_info()
    check_same_tokens(played, plain)
    assert {row["num_steps"] for row in rounds} == {3}
    assert len({row["asked"] for row in rounds}) == 6
    check_accounts(rounds, played[2])
    # It could be switched on.
    assert arguments["speculative_adaptive"]
    assert "shadows SGLang 0.5.23: 5 hooks verified" in log


def test_without_a_policy_the_plugin_does_nothing():
    with start_engine(env={"SPECGOVERNOR_MODE": "on"}) as engine:
        engine.generate(prompts(1), 8)
        log = engine.log()
    assert "specgovernor:" not in log
    assert "govern SGLang" not in log
    assert "Applied" not in log  # SGLang's word for a hook


@pytest.mark.parametrize("algorithm", [None, "EAGLE3"], ids=["native", "static"])
def test_a_server_without_a_policy_is_recorded(tmp_path, plain, algorithm):
    trace_file = tmp_path / "trace.jsonl"
    env = {"SPECGOVERNOR_TRACE": str(trace_file)}
    with start_engine(env=env, speculative_algorithm=algorithm) as engine:
        played = play(engine)
        time.sleep(1.5)  # the trace is written once a second
    check_same_tokens(played, plain)
    trace = read_trace(trace_file)
    decoded = [row for row in trace.rows if row.phase == "decode"]
    assert trace.header.speculative == (algorithm is not None)
    assert {row.num_steps for row in decoded} == {None if algorithm is None else 3}
    assert {1, 3, 8} <= {row.batch_size for row in decoded}
    assert all(row.step_s is None or row.step_s < 5 for row in decoded)
    accepted = [row.mean_correct_drafts for row in decoded]
    assert all((value is None) == (algorithm is None) for value in accepted)
