"""The GPU measurement of the kinds of off: how rounds become blocks, and what blocks say."""

import json
import sys
from types import SimpleNamespace

import pytest

from tests.gpu_modules import GPU, load


@pytest.fixture(scope="module")
def ratios():
    sys.path.insert(0, str(GPU))
    try:
        return load("off_ratios")
    finally:
        sys.path.remove(str(GPU))


off_plugin = load("off_plugin")
PATTERN = ("warm", "cold", "cold", "warm")


def block(index, kind, seconds, size=8, ran=None):
    """Return a block of 12 rounds; those that do not count take a second."""
    times = [1.0] * 3 + [seconds] * 8 + [1.0]
    ran = [ran or kind] * 12
    return {"block": index, "kind": kind, "batch_size": [size] * 12, "ran": ran, "round_s": times}


def runs(factor, groups=3, drift=0.0):
    """Return a run without speculation, and one whose kinds take `factor` times as long."""
    indices = range(2 + 4 * groups)
    plain = [block(i, "plain", 0.010 + drift * i) for i in indices]
    kinds = [PATTERN[(i - 2) % 4] for i in indices]
    governed = [block(i, kind, factor[kind] * (0.010 + drift * i)) for i, kind in enumerate(kinds)]
    return plain, governed


def test_ratios_by_hand(ratios):
    plain, governed = runs({"warm": 1.2, "cold": 1.05}, drift=0.001)
    found = ratios.ratios([plain, plain], [governed, governed], 8, PATTERN)
    assert found["warm"]["ratio"] == {"mean": 1.2, "interval_95": [1.2, 1.2], "count": 6}
    assert found["cold"]["ratio"]["mean"] == 1.05
    assert found["cold"]["blocks"] == 12
    assert found["cold"]["ms_a_round_plain"] == pytest.approx(17.5)  # blocks 2 to 13
    assert found["warm"]["ms_a_round"] == pytest.approx(21.0)


def test_blocks_that_are_not_all_of_one_kind_do_not_count(ratios):
    plain, governed = runs({"warm": 1.2, "cold": 1.05})
    governed[3]["ran"][5] = "warm"
    governed[4] = block(4, "cold", 0.01, ran="warm")
    governed[7]["batch_size"][11] = 7
    plain[11]["round_s"][5] = None
    found = ratios.ratios([plain], [governed], 8, PATTERN)
    assert found["cold"]["ratio"]["count"] == 0
    assert found["cold"]["ratio"]["mean"] is None
    assert found["warm"]["ratio"] == {"mean": 1.2, "interval_95": [1.2, 1.2], "count": 3}


def test_the_interval_is_over_groups(ratios):
    found = ratios.mean_interval([1.0, 1.2] * 5)
    error = (10 * 0.1**2 / 9) ** 0.5 / 10**0.5
    assert found["interval_95"] == pytest.approx(
        [1.1 - 2.262 * error, 1.1 + 2.262 * error], abs=1e-3
    )
    assert ratios.mean_interval([])["mean"] is None


def test_a_switch_costs_what_its_first_rounds_took_more(ratios):
    blocks = []
    for index in range(12):
        kind = ("native", "3")[index % 2]
        steady = {"native": 0.010, "3": 0.020}[kind]
        row = block(index, kind, steady)
        # The first result is still of the block before; going native takes 2 ms more, once.
        before = 0.030 - steady
        row["round_s"] = [before, steady + 0.002 * (kind == "native"), *[steady] * 10]
        blocks.append(row)
    # Shifted by a round, as under the overlap schedule.
    costs = ratios.switch_cost(blocks, 8)
    assert costs["3->native"]["mean"] == pytest.approx(2.0 + 10.0)
    assert costs["native->3"]["mean"] == pytest.approx(-10.0)


def test_rounds_become_blocks_and_each_new_file_begins_the_pattern(tmp_path):
    blocks, said = off_plugin.Blocks(), {"pattern": ["a", "b"], "block_rounds": 2}
    results = [SimpleNamespace() for _ in range(7)]
    said["blocks"] = str(tmp_path / "one")
    kinds = []
    for result in results[:5]:
        kinds.append(blocks.kind(said))
        blocks.launched(result, *kinds[-1], ran=kinds[-1][1])
    assert kinds == [(0, "a"), (0, "a"), (1, "b"), (1, "b"), (2, "a")]
    assert blocks.knows(results[0])
    for result in results[:5]:
        blocks.processed(result, 3, 2)
    rows = [json.loads(line) for line in (tmp_path / "one").read_text().splitlines()]
    assert [(row["block"], row["kind"], row["ran"]) for row in rows] == [
        (0, "a", ["a", "a"]),
        (1, "b", ["b", "b"]),
    ]
    assert rows[0]["round_s"][0] is None  # Nothing ran before it.
    assert all(seconds > 0 for seconds in rows[1]["round_s"])
    said["blocks"] = str(tmp_path / "two")
    assert blocks.kind(said) == (0, "a")
    said["blocks"] = None
    assert blocks.kind(said) is None
