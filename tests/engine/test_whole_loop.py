"""The whole loop: a trace of the engine calibrates, trains, and the policy drives the engine."""

import random
import subprocess
import sys
import time

import pytest
from harness import start_engine, write_plugin
from test_governor import governed, play, ran, read_rounds

from controller.checkpoint import load_checkpoint

pytestmark = pytest.mark.timeout(1500)

# Each tier for ten rounds: the first rounds after a switch are not typical, and are not fitted.
STRETCHES = """
def register():
    from engine_hooks.governor import Governor

    calls = 0

    def policy_tier(self, *seen):
        nonlocal calls
        calls += 1
        return calls // 10 % len(self.tiers.tiers)

    Governor.policy_tier = policy_tier
"""


def command(*words):
    """Run one of the project's commands; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def work(engine):
    """Decode at several batch sizes, after prompts of several lengths."""
    rng = random.Random(0)
    for size, length in ((1, 500), (4, 30), (8, 100), (2, 300), (8, 40), (4, 200)):
        words = [[rng.randrange(256) for _ in range(length)] for _ in range(size)]
        engine.generate(words, 240)


def test_traces_calibrate_train_and_the_policy_drives_the_engine(tmp_path):
    native, governed_trace = tmp_path / "native.jsonl.gz", tmp_path / "governed.jsonl.gz"
    calibration = tmp_path / "calibration.json"
    with start_engine(
        env={"SPECGOVERNOR_TRACE": str(native)}, speculative_algorithm=None
    ) as engine:
        expected = play(engine)[0]
        work(engine)
        time.sleep(1.5)  # the trace is written once a second
    _, env = governed(tmp_path, "cold,1,2,3,5", SPECGOVERNOR_TRACE=str(governed_trace))
    plugin = write_plugin(tmp_path / "plugin", STRETCHES)
    with start_engine(env=env, plugins=[plugin]) as engine:
        work(engine)
        time.sleep(1.5)

    report = command("training.calibrate", native, governed_trace, "-o", calibration)
    assert {"native", "cold", "1", "2", "3", "5"} <= set(report.split())
    trained = tmp_path / "trained"
    command(
        "training.ppo", "--calibration", calibration, "--output", trained, "--off", "cold",
        "--max-running-requests", 16, "--total-steps", 20_000, "--num-envs", 8,
        "--tiers", "off,1,2,3,5", "--critic-warmup", 0, "--randomised-share", 0,
        "--evaluations", 1, "--threads", 1, "--wandb", "disabled",
    )  # fmt: skip
    checkpoint = load_checkpoint(trained)
    assert [tier.name for tier in checkpoint.tiers] == ["cold", "1", "2", "3", "5"]

    decisions = tmp_path / "again.jsonl"
    env = {"SPECGOVERNOR_POLICY": str(trained), "SPECGOVERNOR_DECISIONS": str(decisions)}
    with start_engine(env=env) as engine:
        again = play(engine)
        log = engine.log()
        rounds = read_rounds(decisions)
    assert again[0] == expected
    assert [row["asked"] for row in rounds] == [str(ran(row)) for row in rounds]
    assert f"policy trained sha256 {checkpoint.sha256[:12]}" in log
    assert "an error in the governor" not in log
