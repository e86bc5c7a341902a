"""Calibrations: evaluation, checks, files, and the two that are shipped."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.calibration import Calibration, PrefillCost, TierCost
from controller.errors import CalibrationError
from controller.tiers import tier_of

FOLDER = Path(__file__).parents[1] / "checkpoints/calibrations"
H200 = Calibration.load(FOLDER / "h200-llama3-8b-eagle3-fa3.json")
KIMI = Calibration.load(FOLDER / "kimi-k2.5-8gpu-table.json")
ORDERED = ("cold", "warm", "1", "2", "3", "5", "7")


def cost(tier: str = "3", **changes: object) -> TierCost:
    base = TierCost(
        tier=tier,
        batch_sizes=(1, 4, 8),
        base_s=(0.004, 0.005, 0.009),
        context_s_per_token=1e-7,
        relative_noise=(0.0, 0.1, 0.2),
        max_context_tokens=1000,
        num_rows=90,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def calibration(**changes: object) -> Calibration:
    base = Calibration(
        name="toy",
        costs=(cost("native"), cost("3")),
        prefill_native=PrefillCost(0.0, 1e-5),
        prefill_speculative=PrefillCost(0.001, 1e-5),
        cuda_graph_batch_sizes=(1, 2, 4, 8),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_step_time_by_hand() -> None:
    toy = calibration()
    assert toy.step_s("3", 1, 0) == 0.004
    assert toy.step_s(3, 2, 0) == pytest.approx(0.004 + 0.001 / 3)
    assert toy.step_s(tier_of("3"), 3, 100) == pytest.approx(0.005 + 1e-5), "3 is padded to 4"
    assert toy.step_s("3", 5, 0) == 0.009, "5 is padded to 8"
    assert toy.step_s("3", 12, 0) == pytest.approx(0.009 + 4 * 0.001), "no graph above 8"
    assert calibration(cuda_graph_batch_sizes=None).step_s("3", 6, 0) == pytest.approx(0.007)


def test_extrapolates_with_the_steeper_of_last_segment_and_secant() -> None:
    flat = cost(base_s=(0.001, 0.008, 0.008))
    assert flat.base_at(15) == pytest.approx(0.008 + 7 * 0.001)
    single = cost(batch_sizes=(4,), base_s=(0.005,), relative_noise=(0.0,))
    assert single.base_at(1) == single.base_at(100) == 0.005


def test_table_equals_step_s() -> None:
    tiers = [tier_of(name) for name in H200.tier_names]
    table = H200.table(tiers, 300)
    assert table.base_s.shape == (len(tiers), 301)
    for row, tier in enumerate(tiers):
        for batch in (1, 3, 57, 256, 300):
            whole = table.base_s[row, batch] + table.context_s_per_token[row] * 1234
            assert whole == pytest.approx(H200.step_s(tier, batch, 1234), rel=1e-12)
    assert np.array_equal(table.base_s[:, 0], table.base_s[:, 1])


def test_says_where_it_extrapolates() -> None:
    toy = calibration()
    assert toy.extrapolation("3", 8, 1000) is None
    assert "batch size 9" in str(toy.extrapolation("3", 9, 10))
    assert "1001 context tokens" in str(toy.extrapolation("3", 8, 1001))
    with pytest.raises(CalibrationError, match="has no tier '7'"):
        toy.step_s("7", 1, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_sizes": (4, 1, 8)},
        {"batch_sizes": (0, 4, 8)},
        {"batch_sizes": (1, 4)},
        {"base_s": (0.004, 0.003, 0.009)},
        {"base_s": (0.0, 0.003, 0.009)},
        {"base_s": (0.004, math.nan, 0.009)},
        {"context_s_per_token": -1e-9},
        {"context_s_per_token": math.inf},
        {"relative_noise": (0.0, -0.1, 0.0)},
    ],
)
def test_bad_costs(changes: dict[str, object]) -> None:
    with pytest.raises(CalibrationError):
        cost(**changes)


def test_bad_calibrations() -> None:
    for changes in (
        {"costs": ()},
        {"costs": (cost(), cost())},
        {"cuda_graph_batch_sizes": ()},
        {"kv_capacity_tokens": 0},
    ):
        with pytest.raises(CalibrationError):
            calibration(**changes)
    with pytest.raises(CalibrationError):
        PrefillCost(-1.0, 0.0)


@pytest.mark.parametrize("item", [H200, KIMI, calibration()], ids=lambda item: item.name)
def test_file_round_trip(tmp_path: Path, item: Calibration) -> None:
    path = tmp_path / "c.json"
    item.save(path)
    again = Calibration.load(path)
    assert again == item and again.sha256 == item.sha256
    again.save(tmp_path / "d.json")
    assert (tmp_path / "d.json").read_bytes() == path.read_bytes()


def test_bad_files(tmp_path: Path) -> None:
    good = calibration().to_json()
    path = tmp_path / "c.json"
    for content in (
        "",
        "{",
        "[]",
        json.dumps({**good, "schema": "x"}),
        json.dumps({**good, "schema_version": 2}),
        json.dumps({**good, "extra": 1}),
        json.dumps({key: value for key, value in good.items() if key != "costs"}),
        json.dumps({**good, "costs": [3]}),
        json.dumps({**good, "prefill_native": None}),
        json.dumps(good).replace("0.009", "NaN"),
        "[" * 100_000,
    ):
        path.write_text(content)
        with pytest.raises(CalibrationError, match=str(path)) as caught:
            Calibration.load(path)
        assert "\n" not in str(caught.value)
    for absent in (tmp_path / "absent", tmp_path):
        with pytest.raises(CalibrationError):
            Calibration.load(absent)


ODD = [None, True, -1, 0, 2.5, 10**400, 1e308, "", "x", [], [None], ["x"], [0], {}, {"x": []}]


def places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Return the path of every value inside parsed JSON."""
    if isinstance(value, dict):
        found = [places(item, (*path, key)) for key, item in value.items()]
    elif isinstance(value, list):
        found = [places(item, (*path, index)) for index, item in enumerate(value)]
    else:
        found = []
    return [path, *(place for part in found for place in part)]


def test_any_odd_value_is_refused_or_usable() -> None:
    text = json.dumps(calibration().to_json())
    for place in places(json.loads(text))[1:]:
        for odd in ODD:
            value = json.loads(text)
            target = value
            for key in place[:-1]:
                target = target[key]
            target[place[-1]] = odd
            try:
                found = Calibration.from_json(value, "file.json")
            except CalibrationError as error:
                assert "file.json" in str(error) and "\n" not in str(error)
            else:
                for tier in found.tier_names:
                    assert math.isfinite(found.step_s(tier, 3, 10))
                assert len(found.sha256) == 64


@given(
    batch=st.integers(1, 512),
    more=st.integers(0, 64),
    context=st.integers(0, 2_000_000),
    extra=st.integers(0, 100_000),
)
def test_shipped_h200_is_finite_and_monotone(
    batch: int, more: int, context: int, extra: int
) -> None:
    for tier in H200.tier_names:
        here = H200.step_s(tier, batch, context)
        assert math.isfinite(here) and here > 0
        assert H200.step_s(tier, batch + more, context) >= here
        assert H200.step_s(tier, batch, context + extra) >= here
    measured = [H200.step_s(tier, min(batch, 256), context) for tier in ORDERED]
    assert measured == sorted(measured)
    drafting = [H200.step_s(tier, batch, context) for tier in ORDERED[1:]]
    assert drafting == sorted(drafting)


@pytest.mark.parametrize(
    ("batch", "context", "expected_ms"),
    [
        (8, 5_500, {"native": 5.03, "warm": 5.66, "1": 5.80, "2": 6.04, "5": 6.94, "7": 7.56}),
        (32, 24_000, {"warm": 6.66, "1": 6.54, "2": 7.20, "3": 7.68, "5": 9.28, "7": 10.48}),
        (128, 100_000, {"warm": 9.61, "1": 12.04, "2": 15.79, "5": 26.31, "7": 30.93}),
        (256, 190_000, {"1": 21.70, "2": 28.38, "3": 33.79, "5": 49.39, "7": 59.35}),
        (256, 150_000, {"native": 13.12, "cold": 13.19}),
        (32, 204_000, {"native": 10.70, "warm": 11.73, "1": 11.94, "3": 13.48, "7": 16.92}),
        (1, 6_400, {"warm": 5.45, "1": 5.56, "3": 6.13, "7": 7.17}),
    ],
)
def test_shipped_h200_meets_measured_medians(
    batch: int, context: int, expected_ms: dict[str, float]
) -> None:
    for tier, expected in expected_ms.items():
        assert 1e3 * H200.step_s(tier, batch, context) == pytest.approx(expected, rel=0.06), tier


def test_shipped_h200_costs_of_off() -> None:
    assert set(H200.tier_names) == {"native", *ORDERED}
    for batch in (8, 32, 64, 128):
        native = H200.step_s("native", batch, 600 * batch)
        assert 1.03 < H200.step_s("warm", batch, 600 * batch) / native < 1.20
        assert 0.97 < H200.step_s("cold", batch, 600 * batch) / native < 1.06
    assert H200.kv_capacity_tokens == 695_000 and H200.chunk_tokens == 16_384
    for prefill in (H200.prefill_native, H200.prefill_speculative):
        assert 0.0 <= prefill.base_s < 0.02
        assert prefill.s_per_token == pytest.approx(2.4e-5, rel=0.05)


def test_shipped_files_name_no_machine_path() -> None:
    for path in FOLDER.glob("*.json"):
        text = path.read_text()
        assert '"/' not in text and "traces/" not in text
