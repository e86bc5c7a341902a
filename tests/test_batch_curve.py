"""Round times between measured batch sizes."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training import batch_curve
from training.batch_curve import curve, knots


def times(peak: float, latency_s: float, sizes: list[float]) -> np.ndarray:
    """Solve ``batch / t = peak * exp(-latency / t)`` by Newton's method on ``log t``."""
    log_t = np.log(np.array(sizes) / peak + latency_s)
    for _ in range(100):
        t = np.exp(log_t)
        log_t -= (log_t - np.log(np.array(sizes) / peak) - latency_s / t) / (1.0 + latency_s / t)
    return np.exp(log_t)


def test_doctests_pass() -> None:
    result = doctest.testmod(batch_curve)
    assert result.attempted
    assert not result.failed


def test_a_curve_of_the_family_is_recovered_between_and_below_its_points() -> None:
    sizes = np.array([4.0, 32.0])
    at = [1.0, 2.0, 4.0, 9.0, 20.0, 32.0]
    found = curve(sizes, times(2000.0, 0.01, [4.0, 32.0]), np.array(at))
    assert found == pytest.approx(times(2000.0, 0.01, at), rel=1e-9)


def test_above_the_largest_size_the_last_chord_goes_on() -> None:
    found = curve(np.array([1.0, 8.0, 16.0]), np.array([1.0, 2.0, 3.0]), np.array([24.0, 80.0]))
    assert found.tolist() == pytest.approx([4.0, 11.0])


def test_below_a_quarter_of_the_smallest_size_rounds_are_constant() -> None:
    sizes, step_s = np.array([16.0, 64.0]), np.array([1.0, 3.0])
    found = curve(sizes, step_s, np.array([1.0, 3.0, 4.0, 8.0]))
    assert found[0] == found[1] == found[2] < found[3] < 1.0


def test_where_a_larger_batch_yields_less_in_all_a_power_law_joins_the_points() -> None:
    found = curve(np.array([2.0, 8.0]), np.array([1.0, 16.0]), np.array([1.0, 4.0]))
    # Quadratic between them; below, a smaller batch is at best in proportion faster.
    assert found.tolist() == pytest.approx([0.5, 4.0])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 512), st.floats(1e-3, 1.0)), min_size=1, max_size=6),
)
def test_curves_never_fall_and_pass_through_every_point(points: list[tuple[int, float]]) -> None:
    sizes = np.array(sorted({float(size) for size, _ in points}))
    step_s = np.sort([value for _, value in points])[: len(sizes)]
    at = knots(sizes)
    found = curve(sizes, step_s, at.astype(np.float64))
    assert (np.diff(found) >= -1e-12).all()
    assert found[np.isin(at, sizes)].tolist() == step_s.tolist()
    assert (found > 0.0).all()


def test_knots_reach_from_a_quarter_of_the_smallest_to_twice_the_largest_size() -> None:
    assert knots(np.array([5.0, 30.0])).tolist() == [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 30, 60]
    assert knots(np.array([17.0, 20.0])).tolist() == [4, 6, 8, 12, 16, 17, 20, 40]
    assert knots(np.array([5.0])).tolist() == [5]
