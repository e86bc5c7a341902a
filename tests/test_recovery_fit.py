"""The fit of how a stale draft recovers finds what made its data."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).parent / "engine/recovery_fit.py"
spec = importlib.util.spec_from_file_location("recovery_fit", FILE)
recovery_fit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recovery_fit)


def test_rows_by_hand():
    rounds = [[(0, 0, 2), (0, 0, 3)], [(1, 1, 2), (1, 3, 3)], [(3, 2, 2)]]
    rows = recovery_fit.rows_of([(10, rounds)])
    assert rows.tolist() == [[10, 1, 1, 2], [10, 3, 2, 2], [10, 1, 3, 3]]


def test_expected_correct_by_hand():
    rows = np.array([[100.0, 1.0, 0.0, 2.0], [100.0, 11.0, 0.0, 1.0], [100.0, 1.0, 0.0, 0.0]])
    expected = recovery_fit.expected_correct(rows, 0.5, 100.0, 10.0)
    assert expected == pytest.approx([0.75 + 0.75**2, 0.875, 0.0])


def test_fit_finds_the_constants_that_made_the_data():
    rng = np.random.default_rng(0)
    point = (0.6, recovery_fit.SCALES[12], recovery_fit.RECOVERIES[10])
    rows = np.stack(
        [
            rng.choice([1.0, 10.0, 100.0, 1000.0], 4_000),
            rng.integers(1, 80, 4_000).astype(float),
            np.zeros(4_000),
            rng.integers(0, 4, 4_000).astype(float),
        ],
        axis=1,
    )
    kept = np.array(recovery_fit.expected_correct(rows * [1, 1, 1, 0] + [0, 0, 0, 1], *point))
    drawn = (rng.random((4_000, 3)) < kept[:, None]).cumprod(axis=1).cumsum(axis=1)
    warm = rows[:, 3].astype(int)
    rows[:, 2] = np.where(warm > 0, drawn[np.arange(4_000), np.maximum(warm, 1) - 1], 0)
    found = recovery_fit.fit(rows)
    assert found[0] == pytest.approx(point[0], abs=0.11)
    assert found[1] == pytest.approx(point[1], rel=0.7)
    assert found[2] == pytest.approx(point[2], rel=0.4)
    for row in recovery_fit.shares(rows, found):
        assert row["share"] == pytest.approx(row["model"], abs=4 * row["standard_error"] + 0.03)
