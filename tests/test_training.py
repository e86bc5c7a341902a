"""Training: it learns toys, resumes, stops cleanly, and refuses bad settings before it starts."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from controller.checkpoint import load_checkpoint, load_training_state
from controller.errors import ConfigError
from controller.policy import NumpyPolicy
from env.vector_env import GovernorVecEnv
from tests.synthetic import calibration, cell
from training.controllers import LearnedPolicy
from training.evaluation import evaluate
from training.ppo import TrainConfig, build_model, keep_previous, train

SMALL = dict(num_envs=8, rollout_steps=32, minibatch_size=128, hidden=16, wandb="disabled")


@pytest.fixture(autouse=True)
def short_evaluations(monkeypatch):
    """Score on two small cells; the default ones take a minute where many train."""
    names = ("closed 8, shared", "closed 8, per-request")
    cells = [cell(0.012, 0.7), cell(0.012, 0.3)]
    pairs = list(zip(cells, names, strict=True))

    def small(deployment):
        return [
            replace(c, deployment=deployment, workload=replace(c.workload, name=name))
            for c, name in pairs
        ]

    monkeypatch.setattr("training.ppo.default_cells", small)
    monkeypatch.setattr("training.ppo.NUM_DRAWN", 2)


@pytest.fixture
def calibration_file(tmp_path):
    path = tmp_path / "calibration.json"
    calibration().save(path)
    return path


def config_of(tmp_path, calibration_file, **changes):
    settings = SMALL | dict(
        calibration=calibration_file,
        output=tmp_path / "out",
        tiers="off,3",
        total_steps=512,
        evaluations=1,
        critic_warmup=0,
    )
    return TrainConfig(**(settings | changes))


@pytest.mark.parametrize(
    ("deep_s", "rate", "best"), [(0.012, 0.8, 1), (0.030, 0.2, 0)], ids=["speculate", "stay off"]
)
def test_learns_from_rewards_alone(tmp_path, calibration_file, deep_s, rate, best):
    """Without the cost model's prior, PPO finds out which of two tiers is better."""
    config = config_of(tmp_path, calibration_file, prior=0.0, learning_rate=3e-3, rollout_steps=64)
    env = GovernorVecEnv([cell(deep_s, rate)] * 8, clairvoyant=True, privileged=True)
    model = build_model(config, env)
    model.learn(15 * config.update_size)
    policy = NumpyPolicy(model.policy.actor.arrays())
    outcome = evaluate(LearnedPolicy(policy), [cell(deep_s, rate)], [5])
    assert outcome.tier_share[0, best] > 0.95


def test_plain_reward_teaches_the_same_as_the_clairvoyant_one(tmp_path, calibration_file):
    config = config_of(tmp_path, calibration_file, prior=0.0, learning_rate=3e-3, rollout_steps=64)
    env = GovernorVecEnv([cell(0.012, 0.8)] * 8, horizon_tokens=32.0)
    model = build_model(config, env)
    model.learn(20 * config.update_size)
    policy = NumpyPolicy(model.policy.actor.arrays())
    assert evaluate(LearnedPolicy(policy), [cell(0.012, 0.8)], [5]).tier_share[0, 1] > 0.9


def test_train_leaves_a_checkpoint_that_loads_and_resumes(tmp_path, calibration_file):
    config = config_of(tmp_path, calibration_file)
    train(config)
    first = load_checkpoint(config.output)
    assert [tier.name for tier in first.tiers] == ["cold", "3"]
    assert 0 < first.evaluation["steps"] <= 512
    assert first.training_config["seed"] == 0
    state = load_training_state(config.output)
    assert any(name.startswith("optimizer.") for name in state) or first.evaluation["steps"] == 256

    resumed = replace(config, resume=config.output, output=tmp_path / "more", total_steps=1024)
    train(resumed)
    second = load_checkpoint(tmp_path / "more")
    assert second.evaluation["steps"] > first.evaluation["steps"]
    with pytest.raises(ConfigError, match="larger --total-steps"):
        train(replace(resumed, total_steps=1))


def test_resuming_with_other_widths_names_the_cause(tmp_path, calibration_file):
    config = config_of(tmp_path, calibration_file)
    train(config)
    with pytest.raises(ConfigError, match="training_config"):
        train(replace(config, resume=config.output, hidden=32, total_steps=1024))
    load_checkpoint(config.output)  # still there


def test_init_starts_from_the_policy_of_a_checkpoint(tmp_path, calibration_file):
    config = config_of(tmp_path, calibration_file)
    train(config)
    before = load_checkpoint(config.output)
    tuned = replace(config, init=config.output, output=tmp_path / "tuned", critic_warmup=10**9)
    train(tuned)  # Only the critic learns: what is saved is what it started from.
    after = load_checkpoint(tmp_path / "tuned")
    for name, value in before.policy.parameters.items():
        # Averaging it with itself rounds.
        np.testing.assert_allclose(after.policy.parameters[name], value, rtol=1e-5, atol=1e-8)
    with pytest.raises(ConfigError, match=r"\(16, 16\) wide, these settings give \(8, 8\)"):
        train(replace(tuned, hidden=8, output=tmp_path / "narrow"))
    assert not (tmp_path / "narrow").exists()
    with pytest.raises(ConfigError, match="expected one of them"):
        train(replace(tuned, resume=config.output))


def test_same_seed_same_policy(tmp_path, calibration_file):
    parameters = []
    for name in ("a", "b"):
        config = config_of(tmp_path, calibration_file, output=tmp_path / name, threads=1)
        train(config)
        parameters.append(load_checkpoint(config.output).policy.parameters)
    for name in parameters[0]:
        assert np.array_equal(parameters[0][name], parameters[1][name])


def test_an_older_checkpoint_is_kept(tmp_path, calibration_file):
    config = config_of(tmp_path, calibration_file)
    train(config)
    before = load_checkpoint(config.output).sha256
    train(replace(config, seed=1))
    assert load_checkpoint(tmp_path / "out.previous").sha256 == before
    (tmp_path / "thesis").mkdir()
    with pytest.raises(ConfigError, match="not a checkpoint"):
        keep_previous(tmp_path / "thesis", None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_envs", 0),
        ("learning_rate", -1.0),
        ("learning_rate", float("nan")),
        ("gae_lambda", 1.5),
        ("horizon_tokens", 0.0),
        ("total_steps", -5),
        ("averaging", 2.0),
    ],
)
def test_bad_settings_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        TrainConfig(**{name: value}).check()


def run_cli(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=240, **kwargs
    )


def test_command_line_errors_are_one_line(tmp_path):
    for arguments in (
        ("training.ppo", "--calibration", str(tmp_path / "none.json")),
        ("training.ppo", "--total-steps", "-3"),
        ("training.compare", str(tmp_path / "none")),
    ):
        result = run_cli(*arguments)
        assert result.returncode == 2
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert "Traceback" not in result.stderr


def test_interrupt_keeps_the_best_checkpoint(tmp_path, calibration_file):
    output = tmp_path / "out"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "training.ppo", "--calibration", str(calibration_file)),
            *("--output", str(output), "--tiers", "off,3"),
            *("--num-envs", "8", "--rollout-steps", "32", "--total-steps", "100000000"),
            *("--wandb", "disabled", "--hidden", "16", "--threads", "1"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has them ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 200
    while not (output / "policy.json").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "stopped after" in err
    assert "best score" in out
    load_checkpoint(output)


def test_wandb_offline_writes_files(tmp_path, calibration_file):
    environment = os.environ | {"WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    environment.pop("WANDB_MODE", None)
    result = run_cli(
        *("training.ppo", "--calibration", str(calibration_file)),
        *("--output", str(tmp_path / "out"), "--tiers", "off,3"),
        *("--num-envs", "8", "--rollout-steps", "32", "--total-steps", "512", "--hidden", "16"),
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert (
        json.loads((tmp_path / "out" / "policy.json").read_text())["training_config"]["seed"] == 0
    )
