"""The trained pair: what the engine accepts of its drafts, and the script that trains it."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from corpus import is_held_out, read_library, windows
from harness import TINY, start_engine
from pair import Draft, Target, load_pair
from texts import EXCERPTS
from train_pair import (
    Schedule,
    continue_greedily,
    correct_drafts,
    draft_losses,
    next_byte_loss,
    train,
    walk,
)

pytestmark = pytest.mark.timeout(900)

PROMPT, NUM_TOKENS, NUM_STEPS = 128, 128, 3
PROMPTS = [list(excerpt["text"].encode()[:PROMPT]) for excerpt in EXCERPTS]


@pytest.fixture(scope="module")
def outputs():
    """Continue every held-out excerpt in the real engine, at three draft steps."""
    with start_engine(speculative_num_steps=NUM_STEPS) as engine:
        return engine.generate(PROMPTS, NUM_TOKENS)


def histograms(outputs):
    """Return how many rounds had 0, 1, 2 and 3 correct drafts, (texts, 4)."""
    counts = [output.meta_info["spec_correct_drafts_histogram"] for output in outputs]
    return torch.tensor(counts, dtype=torch.float64)


def test_mean_accept_length_at_three_steps_on_held_out_text(outputs):
    total = histograms(outputs).sum(0)
    accept_length = 1 + (total * torch.arange(4)).sum() / total.sum()
    assert 1.8 <= accept_length < 3.8


def test_acceptance_depends_on_the_text(outputs):
    counts = histograms(outputs)
    lengths = 1 + (counts * torch.arange(4)).sum(1) / counts.sum(1)
    assert lengths.max() - lengths.min() > 0.8
    # More than chance does: Pearson's chi-squared of texts by correct drafts, five deviations out.
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    freedom = (counts.shape[0] - 1) * (counts.shape[1] - 1)
    assert chi_squared > freedom + 5 * math.sqrt(2 * freedom)


def test_the_engine_drafts_and_accepts_as_the_models_in_pytorch(outputs):
    target, draft = load_pair(TINY)
    said = torch.tensor([output.token_ids for output in outputs])
    text = torch.cat((torch.tensor(PROMPTS), said), dim=1)
    with torch.no_grad():
        choices = target(text)[0].argmax(-1)
    assert torch.equal(choices[:, PROMPT - 1 : -1], said)
    text = continue_greedily(target, text, NUM_STEPS)  # the last round may go beyond the end
    correct = correct_drafts(target, draft, text, NUM_STEPS)
    for output, rounds in zip(outputs, walk(correct[:, PROMPT - 1 :]), strict=True):
        needed, tokens = 0, 1  # the prefill gave the first
        while tokens < NUM_TOKENS:
            tokens += 1 + rounds[needed]
            needed += 1
        seen = Counter(rounds[:needed])
        assert output.meta_info["spec_correct_drafts_histogram"] == [seen[n] for n in range(4)]


def test_no_excerpt_was_trained_on():
    assert len({excerpt["file"] for excerpt in EXCERPTS}) == len(EXCERPTS) >= 16
    assert all(is_held_out(excerpt["file"]) for excerpt in EXCERPTS)
    library = read_library()
    share = sum(map(is_held_out, library)) / len(library)
    assert 0.02 < share < 0.12


@pytest.mark.parametrize("model", ["target", "draft"])
def test_a_short_training_lowers_the_loss_and_repeats(model):
    text = torch.tensor(list(Path(__file__).read_bytes()))

    def run():
        torch.manual_seed(1)
        rng = torch.Generator().manual_seed(2)
        trained = target = Target()

        def loss(tokens):
            return next_byte_loss(target, tokens)

        if model == "draft":
            target.requires_grad_(False)
            trained = draft = Draft(target)

            def loss(tokens):
                return sum(draft_losses(target, draft, tokens, depth=2))

        seen = windows(text, 4, 32, torch.Generator().manual_seed(3))
        before = loss(seen).item()
        train(model, trained, loss, text, Schedule(20, batch=4, length=32, peak_lr=4e-3), rng)
        return trained.weights(), before - loss(seen).item()

    (weights, gain), (again, _) = run(), run()
    assert gain > 0.2
    assert all(torch.equal(weights[name], again[name]) for name in weights)
