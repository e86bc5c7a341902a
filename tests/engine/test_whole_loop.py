"""The whole loop: a trace of the engine calibrates, trains, and the policy drives the engine."""

import subprocess
import sys

import pytest
from harness import start_engine, write_plugin
from test_governor import governed, play, prompts, ran, read_rounds

from controller.checkpoint import load_checkpoint

pytestmark = pytest.mark.timeout(900)

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


def test_a_trace_calibrates_trains_and_the_policy_drives_the_engine(tmp_path):
    trace, calibration = tmp_path / "trace.jsonl.gz", tmp_path / "calibration.json"
    _, env = governed(tmp_path, "cold,1,2,3,5", SPECGOVERNOR_TRACE=str(trace))
    plugin = write_plugin(tmp_path / "plugin", STRETCHES)
    with start_engine(env=env, plugins=[plugin]) as engine:
        played = play(engine)
        for size in (1, 4, 8):
            engine.generate(prompts(size), 500)
        read_rounds(tmp_path / "decisions.jsonl")  # waits for the writer

    assert "5" in command("training.calibrate", trace, "-o", calibration)
    trained = tmp_path / "trained"
    command(
        "training.ppo", "--calibration", calibration, "--output", trained, "--off", "cold",
        "--max-running-requests", 16, "--total-steps", 20_000, "--num-envs", 8,
        "--tiers", "off,1,2,3,5", "--critic-warmup", 0, "--evaluations", 1, "--threads", 1,
        "--wandb", "disabled",
    )  # fmt: skip
    checkpoint = load_checkpoint(trained)
    assert [tier.name for tier in checkpoint.tiers] == ["cold", "1", "2", "3", "5"]

    decisions = tmp_path / "again.jsonl"
    env = {"SPECGOVERNOR_POLICY": str(trained), "SPECGOVERNOR_DECISIONS": str(decisions)}
    with start_engine(env=env) as engine:
        again = play(engine)
        log = engine.log()
        rounds = read_rounds(decisions)
    assert again[0] == played[0]
    assert [row["asked"] for row in rounds] == [str(ran(row)) for row in rounds]
    assert f"policy trained sha256 {checkpoint.sha256[:12]}" in log
    assert "an error in the governor" not in log
