"""What the GPU measurements make of alternating blocks of rounds."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "gpu/blocks.py"
spec = importlib.util.spec_from_file_location("blocks", FILE)
blocks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks)


def made(groups, cost, drift=0.0, batch_size=8):
    """Return blocks of 12 timed rounds of 10 ms, ``cost`` times longer with the hooks."""
    return [
        {
            "block": 4 * group + i,
            "bypassed": i in (1, 2),
            "batch_size": batch_size,
            "width": 4,
            "timed_rounds": 12,
            "tokens": 12 * 24,
            "seconds": 0.12 * (1.0 if i in (1, 2) else cost[group % len(cost)])
            + drift * (4 * group + i),
        }
        for group in range(groups)
        for i in range(4)
    ]


def test_share_kept_by_hand():
    found = blocks.share_kept(made(6, (1.25,)), 8, 4)
    assert found["groups"] == 5  # The first is the warm-up.
    assert found["share_kept"] == pytest.approx(0.8)
    assert found["interval_95"] == pytest.approx([0.8, 0.8])
    assert found["seconds_a_round_with"] == pytest.approx(0.0125)
    assert found["seconds_a_round_without"] == pytest.approx(0.01)
    assert found["tokens_a_round_with"] == found["tokens_a_round_without"] == 24


def test_a_steady_drift_cancels():
    found = blocks.share_kept(made(6, (1.0,), drift=0.01), 8, 4)
    assert found["share_kept"] == pytest.approx(1.0, abs=1e-9)


def test_interval_by_hand():
    found = blocks.share_kept(made(5, (1.0, 1.25)), 8, 4)
    assert found["share_kept"] == pytest.approx((0.8 + 1.0 + 0.8 + 1.0) / 4)
    half = 1.96 * 0.2 / 12**0.5  # standard deviation 0.2 / sqrt(3), over sqrt(4)
    assert found["interval_95"] == pytest.approx([0.9 - half, 0.9 + half], abs=1e-4)


def test_blocks_of_another_kind_and_groups_with_gaps_do_not_count():
    given = made(4, (1.1,))
    given[5]["batch_size"] = None  # requests left in the middle of it
    assert blocks.share_kept(given, 8, 4)["groups"] == 2
    assert blocks.share_kept(given, 8, 2)["groups"] == 0
    assert blocks.share_kept(given[:8], 8, 4) == {
        "groups": 0,
        "seconds_a_round_with": None,
        "tokens_a_round_with": None,
        "seconds_a_round_without": None,
        "tokens_a_round_without": None,
        "share_kept": None,
        "interval_95": None,
    }
