"""Train the policy with PPO in the simulator: ``python -m training.ppo``.

From top to bottom: the settings, the callback that evaluates and saves, and the run. The update is
Stable-Baselines3's; the discount per generated token is in ``training/semi_markov.py``.
"""

import training.process  # noqa: F401, I001  (first: it sets up threads before PyTorch starts them)

import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stable_baselines3.common.callbacks import BaseCallback

from controller.calibration import Calibration
from controller.checkpoint import load_checkpoint, load_training_state, save_checkpoint
from controller.errors import ConfigError, SpecGovernorError, TierError
from controller.policy import NumpyPolicy
from controller.tiers import DEFAULT_TIERS, resolve_tiers
from env.deployment import Deployment
from env.vector_env import GovernorVecEnv
from training.cli import print_error
from training.controllers import LearnedPolicy, Oracle
from training.evaluation import evaluate
from training.family import training_cells
from training.network import GovernorPolicy
from training.semi_markov import SemiMarkovPPO
from training.starting_rule import DEFAULT_PRIOR
from training.suite import default_cells
from training.tracking import open_run

DEFAULT_CALIBRATION = Path("checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")
DEFAULT_OUTPUT = Path("checkpoints/trained")
EVALUATION_SEEDS = (900_001, 900_002)
"""Seeds of the evaluations that choose the best checkpoint; the comparison uses others."""
NUM_DRAWN = 64
"""Cells of the family in those evaluations."""


BOUNDS = {
    "max_running_requests": (1, 8192),
    "seed": (0, 2**32 - 1),
    "total_steps": (1, 1e12),
    "num_envs": (1, 65_536),
    "rollout_steps": (1, 1e6),
    "minibatch_size": (2, 1e9),
    "epochs": (1, 1000),
    "learning_rate": (1e-9, 1.0),
    "entropy_coefficient": (0.0, 1.0),
    "clip_range": (1e-6, 10.0),
    "gae_lambda": (0.0, 1.0),
    "horizon_tokens": (1.0, 1e9),
    "randomised_share": (0.0, 1.0),
    "averaging": (0.0, 1.0),
    "critic_warmup": (0, 1e12),
    "slo_weight": (0.0, 1e6),
    "prior": (0.0, 1e4),
    "hidden": (1, 4096),
    "evaluations": (1, 1e6),
    "threads": (1, 1024),
}
"""Smallest and largest value of every number among the settings."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run."""

    calibration: Path = DEFAULT_CALIBRATION
    """Calibration file of the system to train for."""
    output: Path = DEFAULT_OUTPUT
    """Checkpoint directory. A checkpoint already there is kept as OUTPUT.previous."""
    tiers: str = DEFAULT_TIERS
    """Tiers to choose from, such as "off,1,3"; "off,3" is a plain on/off controller."""
    off: Literal["auto", "native", "cold", "warm"] = "auto"
    """What "off" means; auto takes cold if it is calibrated, else native."""
    max_running_requests: int = 256
    """Largest batch of the server. SGLang's default with speculation is 48."""
    seed: int = 0
    """Seed of everything that is random."""
    total_steps: int = 2_000_000
    """Decode rounds to learn from, over all servers."""
    num_envs: int = 256
    """Servers that run side by side."""
    rollout_steps: int = 128
    """Rounds of each server between two updates."""
    minibatch_size: int = 4096
    """Rounds in a gradient step."""
    epochs: int = 4
    """Passes over the rounds of an update."""
    learning_rate: float = 1e-4
    """Adam's step size at the start; falls linearly to a hundredth."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus at the start; falls linearly to zero."""
    clip_range: float = 0.2
    """PPO's clip range."""
    gae_lambda: float = 0.9
    """Decay of the policy's advantage trace, a round; the critic's targets use 0.95."""
    horizon_tokens: float = 1024.0
    """Discount horizon, in output tokens of each request."""
    randomised_share: float = 0.8
    """Share of the servers that are drawn around the calibration, see training/family.py."""
    critic_warmup: int = 300_000
    """Rounds from which only the critic learns, so that the policy does not follow a blind one."""
    averaging: float = 0.9
    """Share of the averaged policy, which is the one that is saved, that an update keeps."""
    slo_weight: float = 0.0
    """Seconds that a request outside its SLO (TTFT 2 s, TPOT 50 ms) adds to the cost."""
    prior: float = DEFAULT_PRIOR
    """Starting weight of the cost model's gain, ln(tokens/s), in a logit."""
    hidden: int = 64
    """Width of both hidden layers of the policy."""
    evaluations: int = 12
    """Evaluations of the policy, evenly spread; the best is kept."""
    init: Path | None = None
    """Checkpoint whose policy is the start instead of the cost model's, such as a shipped one."""
    resume: Path | None = None
    """Checkpoint to go on from, with its critic and optimizer, up to total_steps."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Where metrics go: files under wandb/, the W&B service, or nowhere."""
    threads: int = 2
    """CPU threads for PyTorch."""

    def check(self) -> None:
        """Refuse settings that cannot work.

        Not in ``__post_init__``, where the command line's parser would catch and frame the error.

        Raises:
            ConfigError: Naming the setting, what it is and what is expected.
        """
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}: expected {least:g} to {most:g}")
        if self.init is not None and self.resume is not None:
            raise ConfigError(
                "--init and --resume: expected one of them; --init starts anew from a policy, "
                "--resume goes on with a training"
            )
        if self.num_envs * self.rollout_steps < 2:
            raise ConfigError(
                "num_envs * rollout_steps is 1: PPO needs at least 2 rounds an update"
            )

    @property
    def update_size(self) -> int:
        """Rounds between two updates."""
        return self.num_envs * self.rollout_steps

    def as_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items()}


class TrainingMonitor(BaseCallback):
    """Shows progress, logs each update, and keeps the checkpoint that evaluates best.

    The score is the mean of the policy's objective over the oracle's, over the default cells and
    as many as ``NUM_DRAWN`` that are drawn as those it trains on are.
    """

    def __init__(self, config: TrainConfig, deployment: Deployment, run: Any, best: float) -> None:
        super().__init__()
        self.config = config
        self.deployment = deployment
        self.run = run
        self.best = best
        self.cells = default_cells(deployment)
        if config.randomised_share > 0.0:
            rng = np.random.default_rng(EVALUATION_SEEDS)
            noiseless = replace(deployment, noise=False)
            share = config.randomised_share
            self.cells += training_cells(noiseless, NUM_DRAWN, share, rng)
        self.reference = evaluate(Oracle(), self.cells, EVALUATION_SEEDS).objective
        self.started = time.monotonic()
        self.next_evaluation = 0
        self.average: dict[str, NDArray[np.float32]] | None = None
        self.bar: Progress | None = None

    def _on_training_start(self) -> None:
        self.next_evaluation = self.num_timesteps
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TextColumn("reward {task.fields[reward]:.3f}"),
            TextColumn("score {task.fields[score]:.4f} (best {task.fields[best]:.4f})"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.bar.start()
        self.task = self.bar.add_task(
            "", total=self.config.total_steps, reward=0.0, score=0.0, best=max(self.best, 0.0)
        )

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        buffer: Any = self.model.rollout_buffer  # type: ignore[attr-defined]
        # Reward per unit of discounted time: about -1 for a server that never speculates.
        reward = float(buffer.rewards.mean() / np.maximum(1.0 - buffer.discounts, 1e-9).mean())
        self.follow()
        if self.num_timesteps >= self.next_evaluation:
            self.next_evaluation += max(self.config.total_steps // self.config.evaluations, 1)
            self.evaluate_and_save()
        warm = self.num_timesteps > self.config.critic_warmup
        for parameter in self.model.policy.actor.parameters():  # type: ignore[union-attr]
            parameter.requires_grad_(warm)
        left = 1.0 - min(self.num_timesteps / self.config.total_steps, 1.0)
        self.model.ent_coef = self.config.entropy_coefficient * left  # type: ignore[attr-defined]
        if self.bar is not None:
            self.bar.update(self.task, completed=self.num_timesteps, reward=reward)
        logged = {
            key.removeprefix("train/"): value
            for key, value in self.logger.name_to_value.items()
            if key.startswith("train/") and isinstance(value, (int, float, np.floating))
        }
        rate = (self.num_timesteps - self.model._num_timesteps_at_start) / max(
            time.monotonic() - self.started, 1e-9
        )
        self.run.log({"reward": reward, "steps_per_s": rate, **logged}, step=self.num_timesteps)

    def follow(self) -> None:
        """Move the averaged policy, which is what is evaluated and saved, towards the current one.

        Averaged weights of an iterate that wanders around an optimum are nearer to it than the
        iterate (Polyak and Juditsky, SIAM J. Control Optim. 1992).
        """
        policy: Any = self.model.policy
        current = policy.actor.arrays()
        if self.average is None:
            self.average = current
        keep = self.config.averaging
        for name, value in current.items():
            self.average[name] = (keep * self.average[name] + (1.0 - keep) * value).astype(
                np.float32
            )

    def evaluate_and_save(self) -> None:
        """Score the policy as it is now; save it if it is the best so far."""
        policy: Any = self.model.policy
        parameters = self.average or policy.actor.arrays()
        outcome = evaluate(LearnedPolicy(NumpyPolicy(parameters)), self.cells, EVALUATION_SEEDS)
        shares = (outcome.objective / self.reference).mean(axis=1)
        score = float(shares.mean())
        self.run.log({"score": score, "worst_cell": float(shares.min())}, step=self.num_timesteps)
        if score > self.best:
            self.best = score
            self.save(parameters, shares)
        line = f"{self.num_timesteps:>10,} steps: score {score:.4f}, worst cell {shares.min():.4f}"
        if self.bar is not None:
            self.bar.update(self.task, score=score, best=self.best)
            self.bar.console.print(line)

    def save(self, parameters: dict[str, NDArray[np.float32]], shares: NDArray[np.float64]) -> None:
        """Write the checkpoint with what resuming needs."""
        state = {
            f"policy.{name}": value.numpy().copy()
            for name, value in self.model.policy.state_dict().items()
        }
        optimizer = self.model.policy.optimizer.state_dict()["state"]
        for index, entry in optimizer.items():
            for name, value in entry.items():
                state[f"optimizer.{index}.{name}"] = np.array(value.numpy())
        save_checkpoint(
            self.config.output,
            parameters=parameters,
            tiers=self.deployment.resolved_tiers(),
            calibration=self.deployment.calibration,
            training_config=self.config.as_json(),
            evaluation={
                "score": self.best,
                "share_of_oracle": {
                    cell.name: round(float(share), 4)
                    for cell, share in zip(self.cells, shares, strict=True)
                },
                "seeds": list(EVALUATION_SEEDS),
                "steps": int(self.num_timesteps),
            },
            training_state=state,
        )

    def _on_training_end(self) -> None:
        self.evaluate_and_save()
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            self.bar.update(self.task, completed=min(self.num_timesteps, self.config.total_steps))
            self.bar.stop()
            self.bar = None


def build_model(config: TrainConfig, env: GovernorVecEnv) -> SemiMarkovPPO:
    """Return an untrained model."""
    return SemiMarkovPPO(
        GovernorPolicy,
        env,
        learning_rate=lambda left: config.learning_rate * max(left, 0.01),
        n_steps=config.rollout_steps,
        batch_size=min(config.minibatch_size, config.update_size),
        n_epochs=config.epochs,
        gamma=1.0,  # the env's own discounts count, see training/semi_markov.py
        gae_lambda=config.gae_lambda,
        clip_range=config.clip_range,
        ent_coef=config.entropy_coefficient,
        vf_coef=0.5,
        max_grad_norm=0.5,
        policy_kwargs={"hidden": config.hidden, "second": config.hidden, "prior": config.prior},
        device="cpu",
        seed=config.seed,
    )


def restore(model: SemiMarkovPPO, checkpoint: Path) -> float:
    """Load policy, critic and optimizer into a model; return the checkpoint's score."""
    loaded = load_checkpoint(checkpoint)
    arrays = load_training_state(checkpoint)
    policy_state = {
        name.removeprefix("policy."): torch.from_numpy(np.array(value))
        for name, value in arrays.items()
        if name.startswith("policy.")
    }
    expected = {name: tuple(value.shape) for name, value in model.policy.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in policy_state.items()}
    if expected != found:
        raise ConfigError(
            f"{checkpoint}: its networks have other shapes than these settings give; resume with "
            "the tiers and widths that its policy.json lists under training_config"
        )
    model.policy.load_state_dict(policy_state)
    entries: dict[int, dict[str, Any]] = {}
    for name, value in arrays.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            entries.setdefault(int(index), {})[key] = torch.from_numpy(np.array(value))
    optimizer = model.policy.optimizer
    optimizer.load_state_dict(
        {"state": entries, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    model.num_timesteps = int(loaded.evaluation["steps"])
    return float(loaded.evaluation["score"])


def start_from(model: SemiMarkovPPO, checkpoint: Path) -> None:
    """Give a model the policy of a checkpoint, which may have been trained for another system.

    Raises:
        ConfigError: If its widths are others than the model's.
        CheckpointError: If it cannot be used.
    """
    policy = load_checkpoint(checkpoint).policy
    actor: Any = model.policy.actor
    expected = tuple(actor.shapes["second.weight"])[::-1]
    if policy.hidden_sizes != expected:
        raise ConfigError(
            f"--init {checkpoint}: its hidden layers are {policy.hidden_sizes} wide, these "
            f"settings give {expected}; give its --hidden"
        )
    actor.load_arrays(policy.parameters)


def keep_previous(output: Path, resume: Path | None) -> None:
    """Move a checkpoint that the run would replace out of its way."""
    if not output.exists() or (resume is not None and resume.resolve() == output.resolve()):
        return
    if not (output / "policy.json").exists():
        raise ConfigError(
            f"{output} exists and is not a checkpoint; give another --output, or move it away"
        )
    previous = output.with_name(output.name + ".previous")
    number = 1
    while previous.exists():
        number += 1
        previous = output.with_name(f"{output.name}.previous-{number}")
    output.rename(previous)


def train(config: TrainConfig) -> float:
    """Run the training; return the best score. Ctrl-C ends it and keeps the best checkpoint.

    Raises:
        ConfigError: If a setting cannot work or the output cannot be written; before anything is.
        CalibrationError: If the calibration cannot be used.
        CheckpointError: If the checkpoint to resume from cannot be used.
    """
    config.check()
    try:
        config.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output {config.output}: its folder cannot be made ({error})") from error
    calibration = Calibration.load(config.calibration)
    try:
        resolve_tiers(config.tiers, calibration.tier_names, config.off)
    except TierError as error:
        raise ConfigError(
            f"--tiers {config.tiers} on {config.calibration}: {error}; or give the --tiers to "
            f"train on, such as {','.join(calibration.tier_names)}"
        ) from error
    deployment = Deployment(
        calibration,
        tiers=config.tiers,
        off=config.off,
        max_running_requests=config.max_running_requests,
    )
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)
    env = GovernorVecEnv(
        training_cells(
            replace(deployment, noise=False), config.num_envs, config.randomised_share, rng
        ),
        seed=1 + config.seed * 10_000_000_000,
        horizon_tokens=config.horizon_tokens,
        clairvoyant=True,
        privileged=True,
        slo_weight=config.slo_weight,
    )
    model = build_model(config, env)
    best = -math.inf
    if config.init is not None:
        start_from(model, config.init)
    if config.resume is not None:
        best = restore(model, config.resume)
        if model.num_timesteps >= config.total_steps:
            raise ConfigError(
                f"{config.resume} has seen {model.num_timesteps} steps already; "
                "give a larger --total-steps"
            )
    keep_previous(config.output, config.resume)
    if config.resume is not None and config.resume.resolve() != config.output.resolve():
        best = -math.inf  # the new directory needs a checkpoint of its own
    run = open_run(config.wandb, config.as_json())
    monitor = TrainingMonitor(config, deployment, run, best)
    try:
        model.learn(
            config.total_steps - model.num_timesteps,
            callback=monitor,
            reset_num_timesteps=config.resume is None,
        )
    except KeyboardInterrupt:
        monitor.evaluate_and_save()
        monitor.close()
        print(f"stopped after {model.num_timesteps} steps", file=sys.stderr)
    finally:
        monitor.close()
        run.finish()
    print(f"best score {monitor.best:.4f} (mean share of the oracle); saved to {config.output}")
    return monitor.best


def main() -> int:
    """Run from the command line."""
    try:
        config = tyro.cli(TrainConfig, description=__doc__)
        train(config)
    except (SpecGovernorError, OSError) as error:
        return print_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
