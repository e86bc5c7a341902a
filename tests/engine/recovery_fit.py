"""What rounds after an off stretch say about how a stale draft recovers.

The model is that of `env.acceptance_process`: after a gap of `g` tokens each draft is accepted as
often as a warm one's times `1 - worst_loss * g / (g + gap_scale) * 2 ** (-t / recovery)`, where `t`
counts the tokens drafted over since. A round whose warm draft would have had `w` correct drafts
then has `f + f ** 2 + ... + f ** w` in the mean.
"""

import itertools

import numpy as np

BINS = (1, 4, 8, 16, 32, 64, 200)
"""Tokens drafted over since the first round, at which shares are given."""
LOSSES = np.linspace(0.05, 1.0, 20)
SCALES = np.geomspace(10, 3000, 24)
RECOVERIES = np.geomspace(2, 100, 20)


def rows_of(cases):
    """Return ``(rows, 4)``: gap, tokens drafted over since, correct drafts, those of a warm draft.

    Args:
        cases: What `measure_recovery.follow` found, by gap; the first round is left out.
    """
    rows = []
    for gap, rounds in cases:
        for request in range(len(rounds[0])):
            drafted = 0
            for number, entries in enumerate(rounds):
                if request >= len(entries):
                    break
                _, correct, warm = entries[request]
                if number > 0:
                    rows.append((gap, drafted, correct, warm))
                drafted += correct + 1
    return np.array(rows, float)


def expected_correct(rows, worst_loss, gap_scale, recovery):
    """Return the model's mean correct drafts of each row."""
    gap, drafted, _, warm = rows.T
    kept = 1.0 - worst_loss * gap / (gap + gap_scale) * 0.5 ** ((drafted - 1.0) / recovery)
    return sum(np.where(warm >= j, kept**j, 0.0) for j in range(1, int(warm.max()) + 1))


def fit(rows):
    """Return worst_loss, gap_scale and recovery with the least squared error, from a grid."""
    return min(
        itertools.product(LOSSES, SCALES, RECOVERIES),
        key=lambda point: float(((expected_correct(rows, *point) - rows[:, 2]) ** 2).sum()),
    )


def shares(rows, point):
    """Return by gap and bin of drafted tokens: rounds, share of the warm draft's, error, model."""
    found = []
    model = expected_correct(rows, *point)
    for gap in sorted(set(rows[:, 0])):
        for low, high in itertools.pairwise(BINS):
            chosen = (rows[:, 0] == gap) & (rows[:, 1] >= low) & (rows[:, 1] < high)
            if rows[chosen, 3].sum() < 1:
                continue
            correct, warm = rows[chosen, 2], rows[chosen, 3]
            error = (correct - warm).std() / len(warm) ** 0.5 / warm.mean()
            found.append(
                {
                    "gap_tokens": int(gap),
                    "drafted_tokens": [low, high],
                    "rounds": int(chosen.sum()),
                    "share": round(correct.sum() / warm.sum(), 3),
                    "standard_error": round(error, 3),
                    "model": round(model[chosen].sum() / warm.sum(), 3),
                }
            )
    return found
