"""Train the tiny target and its EAGLE-3 draft on the sources of Python's standard library.

    python tests/engine/tiny/train_pair.py FOLDER

Writes FOLDER/target and FOLDER/draft, each a config.json and a model.safetensors, and
FOLDER/held_out.json, the prompts of the tests. README.md says what it printed for the pair that is
here. The same seed, number of threads, versions and processor give the same weights.

The target learns the next byte. The draft then learns the target's distribution at every depth at
once: its steps are unrolled, so a deep one sees what its shallower ones left it, as in the engine
(training-time test, EAGLE-3, https://arxiv.org/abs/2503.01840).
"""

import argparse
import functools
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import excerpts, is_held_out, join, read_library, windows, write_excerpts
from pair import HERE, Draft, Target
from safetensors.torch import save_file
from torch import Tensor, nn

DEPTH = 5  # of the draft's unrolling
DEPTH_DISCOUNT = 0.9  # a step's weight in the loss, against the step before
EVAL_WINDOWS = 32
PROMPT, NEW_TOKENS = 96, 64  # of the greedy texts that the accept length is estimated on
EVAL_DEPTH = 3


@dataclass(frozen=True)
class Schedule:
    """How one of the two models is trained."""

    steps: int
    batch: int  # windows a step
    length: int  # tokens a window
    peak_lr: float
    warmup: float = 0.05  # of the steps; then down to 0 in a straight line


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for what is left."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            inner = parameter.ndim == 2 and not name.startswith(("embed_tokens", "lm_head"))
            (matrices if inner else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    name: str,
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    text: Tensor,
    schedule: Schedule,
    rng: torch.Generator,
) -> None:
    """Lower `loss_of` pieces of a text."""
    begin, recent = time.monotonic(), []
    chosen = optimizers(model)
    for step in range(schedule.steps):
        done = step / schedule.steps
        rising = (done + 1 / schedule.steps) / schedule.warmup
        falling = (1 - done) / (1 - schedule.warmup)
        rate = min(rising, falling)
        loss = loss_of(windows(text, schedule.batch, schedule.length, rng))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule.peak_lr
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.item())
        if (step + 1) % 100 == 0 or step + 1 == schedule.steps:
            mean = sum(recent) / len(recent)
            seconds = time.monotonic() - begin
            print(f"{name} step {step + 1} loss {mean:.3f} after {seconds:.0f} s", flush=True)
            recent.clear()


def next_byte_loss(target: Target, tokens: Tensor) -> Tensor:
    """Return the target's mean cross entropy, in nats a byte."""
    logits, _ = target(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def draft_losses(target: Target, draft: Draft, tokens: Tensor, depth: int) -> list[Tensor]:
    """Return the mean cross entropy of every step with the target's distribution."""
    with torch.no_grad():
        logits, tapped = target(tokens)
    rows = tokens.shape[1] - depth
    return [
        F.cross_entropy(
            drafted.flatten(0, 1), logits[:, 1 + j : 1 + j + rows].softmax(-1).flatten(0, 1)
        )
        for j, drafted in enumerate(draft(tapped, tokens, depth))
    ]


def discounted(losses: Iterable[Tensor]) -> Tensor:
    """Return the weighted mean of the losses of the steps."""
    weights = [DEPTH_DISCOUNT**j for j in range(DEPTH)]
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    return total / sum(weights)


@torch.no_grad()
def continue_greedily(target: Target, prompts: Tensor, count: int) -> Tensor:
    """Return the prompts (B, S) with the target's `count` choices after them."""
    for _ in range(count):
        choice = target(prompts)[0][:, -1].argmax(-1)
        prompts = torch.cat((prompts, choice[:, None]), dim=1)
    return prompts


@torch.no_grad()
def correct_drafts(target: Target, draft: Draft, text: Tensor, depth: int) -> Tensor:
    """Return whether each step's greedy draft is the text's token: (B, rows, depth)."""
    _, tapped = target(text)
    rows = text.shape[1] - depth - 1
    drafted = [step[:, :rows].argmax(-1) for step in draft(tapped, text, depth)]
    return torch.stack([d == text[:, 2 + j : 2 + j + rows] for j, d in enumerate(drafted)], dim=-1)


def walk(correct: Tensor) -> list[list[int]]:
    """Return each text's correct drafts, round by round, as an engine goes through it.

    Args:
        correct: of `correct_drafts`, from the row of the first round on.
    """
    num_correct = correct.long().cumprod(-1).sum(-1)
    walks = []
    for row in num_correct.tolist():
        at, rounds = 0, []
        while at < len(row):
            rounds.append(row[at])
            at += 1 + row[at]
        walks.append(rounds)
    return walks


def report(target: Target, draft: Draft, held_out: Tensor, seed: int) -> None:
    """Print losses and accept lengths on text that neither model has seen."""
    rng = torch.Generator().manual_seed(seed)
    tokens = windows(held_out, EVAL_WINDOWS, 256, rng)
    with torch.no_grad():
        print(f"held-out target loss {next_byte_loss(target, tokens):.3f}")
        losses = draft_losses(target, draft, tokens, DEPTH)
    print("held-out draft loss by depth", *(f"{loss:.3f}" for loss in losses))
    text = continue_greedily(target, tokens[:, :PROMPT], NEW_TOKENS)
    correct = correct_drafts(target, draft, text, DEPTH)[:, PROMPT - 1 :]
    reached = torch.ones(correct.shape[:2], dtype=torch.bool)
    rates = []
    for j in range(DEPTH):
        rates.append(correct[..., j][reached].float().mean().item())
        reached = reached & correct[..., j]
    print("accept rate by depth, if reached", *(f"{rate:.3f}" for rate in rates))
    for depth in (1, EVAL_DEPTH, DEPTH):
        lengths = torch.tensor([1 + sum(w) / len(w) for w in walk(correct[..., :depth])])
        print(
            f"accept length at {depth} steps: mean {lengths.mean():.2f}, of a text "
            f"{lengths.min():.2f} to {lengths.max():.2f}"
        )


def save(folder: Path, name: str, weights: dict[str, Tensor]) -> None:
    """Write a model; the weights are rounded to bfloat16."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    if folder.resolve() != HERE:
        shutil.copy(HERE / name / "config.json", folder / name)
    stored = {key: value.to(torch.bfloat16).contiguous() for key, value in weights.items()}
    save_file(stored, folder / name / "model.safetensors")


def round_to_bfloat16(model: nn.Module) -> None:
    """Give a model the weights that its file has."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.copy_(parameter.to(torch.bfloat16))


def positive(word: str) -> int:
    """Return a number of the command line."""
    if (number := int(word)) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {word}")
    return number


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the pair")
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--threads", type=positive, default=2, help="of PyTorch (default: 2)")
    parser.add_argument("--target-steps", type=positive, default=1200, metavar="N")
    parser.add_argument("--draft-steps", type=positive, default=800, metavar="N")
    parser.add_argument(
        "--excerpts", type=positive, default=24, metavar="N", help="held-out prompts"
    )
    return parser.parse_args()


def main() -> None:
    """Train both, report and save."""
    args = parse_arguments()
    begin = time.monotonic()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = torch.Generator().manual_seed(args.seed)
    library = read_library()
    text = join([source for name, source in library.items() if not is_held_out(name)])
    held_out = join([source for name, source in library.items() if is_held_out(name)])
    try:
        prompts = excerpts(library, args.excerpts, args.seed)
    except ValueError as error:
        print(f"train_pair.py: {error}; lower --excerpts", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{len(text)} bytes to train on, {len(held_out)} held out")

    target = Target()
    schedule = Schedule(args.target_steps, batch=16, length=257, peak_lr=4e-3)
    train("target", target, lambda t: next_byte_loss(target, t), text, schedule, rng)
    round_to_bfloat16(target)
    save(args.folder, "target", target.weights())

    draft = Draft(target)
    schedule = Schedule(args.draft_steps, batch=4, length=384 + DEPTH, peak_lr=4e-3)
    unrolled = functools.partial(draft_losses, target, draft, depth=DEPTH)
    train("draft", draft, lambda t: discounted(unrolled(t)), text, schedule, rng)
    round_to_bfloat16(draft)
    save(args.folder, "draft", draft.weights())

    write_excerpts(args.folder / "held_out.json", prompts)
    report(target, draft, held_out, args.seed)
    wall_s, processor_s = time.monotonic() - begin, time.process_time()
    print(f"{wall_s:.0f} s, {processor_s:.0f} s of processor time, on {args.threads} threads")


if __name__ == "__main__":
    main()
