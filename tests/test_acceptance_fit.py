"""Acceptance fitted to data of known acceptance, and the presets."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.acceptance_profile import AcceptanceProfile, DepthAcceptance
from controller.calibration import Calibration
from controller.errors import CalibrationError
from controller.trace import TraceRow, read_trace
from training.acceptance_fit import (
    MAX_OBSERVATIONS,
    Observation,
    Series,
    drift_of,
    fit_depth,
    profile,
    rates_of,
    request_spread,
    trace_series,
)
from training.acceptance_presets import load_preset, presets
from training.acceptance_sources import acceptance_of
from training.log_rounds import read_log
from training.sources import Sources
from training.tables import read_table

ROOT = Path(__file__).parents[1]
H200 = "h200_llama3-8b-shape_eagle3_fa3"


# -- accept rates ----------------------------------------------------------------------------------


@given(rates=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=7))
@settings(max_examples=50, deadline=None)
def test_rates_reproduce_the_accept_lengths_of_every_depth(rates: list[float]) -> None:
    lengths = {k: 1 + float(np.sum(np.cumprod(rates[:k]))) for k in range(1, len(rates) + 1)}
    assert rates_of(lengths) == pytest.approx(rates, abs=1e-6)


def test_rates_between_measured_depths_and_of_a_single_one() -> None:
    (first, *rest) = rates_of({1: 1.8, 3: 1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.25})
    assert first == pytest.approx(0.8) and rest == pytest.approx([0.5, 0.5])
    assert rates_of({3: 1 + 0.6 + 0.36 + 0.216}) == pytest.approx([0.6] * 3)
    assert rates_of({2: 3.0}) == [1.0, 1.0] and rates_of({2: 1.0}) == [0.0, 0.0]


def test_accept_lengths_that_rise_too_much_by_chance_are_smoothed() -> None:
    """Position 3 cannot be accepted more often than position 2; together they gain 0.8."""
    rates = rates_of({1: 1.8, 2: 2.1, 3: 2.6})
    reached = np.cumprod(rates)
    assert reached.tolist() == pytest.approx([0.8, 0.4, 0.4], abs=1e-6)


# -- spread and drift ------------------------------------------------------------------------------


def series(
    spread: float, drift: float, time_s: float, noise: float, batch: int, seed: int
) -> list[list[Observation]]:
    """Return 60 stretches of 200 rounds, 10 ms each, of new requests in each stretch."""
    rng = np.random.default_rng(seed)
    keep = np.exp(-0.01 / time_s)
    level, out = 0.0, []
    for stretch in range(60):
        own = spread * rng.standard_normal(batch).mean()
        group = []
        for index in range(200):
            level = keep * level + drift * np.sqrt(1 - keep**2) * rng.standard_normal()
            value = 2.5 + own + level + noise * rng.standard_normal(batch).mean()
            time = 2.0 * stretch + 0.01 * index
            group.append(Observation(str(stretch), time, batch, 1, float(value)))
        out.append(group)
    return out


@pytest.mark.parametrize("batch", [1, 16])
def test_spread_between_requests_is_recovered(batch: int) -> None:
    found = request_spread(series(0.5, 0.0, 1.0, 1.0, batch, seed=3))
    assert found == pytest.approx(0.5, rel=0.2)


def test_drift_is_recovered() -> None:
    found = drift_of(series(0.3, 0.4, 0.1, 0.5, 8, seed=4))
    assert found is not None
    assert found[0] == pytest.approx(0.4, rel=0.25) and found[1] == pytest.approx(0.1, rel=0.5)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_found_in_noise(seed: int) -> None:
    stretches = series(0.0, 0.0, 1.0, 1.0, 8, seed)
    assert request_spread(stretches) is None and drift_of(stretches) is None
    assert request_spread(stretches[:5]) is None, "too few stretches"
    assert drift_of([group[:3] for group in stretches]) is None, "too short"


def test_series_weighs_requests_and_is_bounded() -> None:
    items = [Observation("a", 0.0, 1, 10, 2.0), Observation("b", 0.0, 3, 10, 4.0)]
    assert Series(items).mean == pytest.approx(3.5)
    ragged = Series([*items, Observation("c", None, 4, 10, 1.0, steady=False)])
    assert ragged.mean == pytest.approx(2.25) and len(ragged.stretches) == 2
    long = Series(Observation(str(i // 7), float(i), 1, 1, 2.0 + i % 2) for i in range(30_000))
    assert long.count == 30_000 and long.mean == pytest.approx(2.5)
    assert MAX_OBSERVATIONS // 4 < sum(map(len, long.stretches)) <= MAX_OBSERVATIONS
    whole = [len(group) for group in long.stretches]
    assert whole.count(7) >= len(whole) - 1, "stretches stay whole"
    one = Series(Observation("x", float(i), 1, 1, 2.0) for i in range(20_000))
    times = [item.time_s for item in one.stretches[0]]
    assert times[-1] == 19_999.0 and np.all(np.diff(times) == 1.0)


def test_trace_rounds_by_depth() -> None:
    rows = [TraceRow("prefill", None, 2, 100, step_s=0.5)]
    for num_steps, correct in ((3, 2.0), (1, 0.5), (0, 0.0), (3, 1.0)):
        rows += [
            TraceRow("decode", num_steps, 2, 100, step_s=0.01, mean_correct_drafts=correct)
        ] * 4
    found = trace_series(rows)
    assert set(found) == {1, 3} and found[3].count == 4 and found[1].count == 2
    assert found[3].mean == pytest.approx(2.5) and found[1].mean == pytest.approx(1.5)
    assert len(found[3].stretches) == 1, "the depth changed, the requests did not"
    times = [item.time_s for item in found[3].stretches[0]]
    assert times == pytest.approx([0.53, 0.54, 0.65, 0.66])


# -- sources ---------------------------------------------------------------------------------------


def test_acceptance_of_a_log_and_a_table() -> None:
    log = read_log(ROOT / "training/data/logs/sglang_issue_11948_2025-10_eagle3.log", 3)
    found = acceptance_of(Sources(logs=(log,)))
    assert found is not None and found.source == "log" and not found.simulated
    assert found.depths[0].accept_len == pytest.approx(np.mean([2.17, 1.95, 1.8, 2.05, 1.8]))
    table = read_table(ROOT / "training/data/tables/sglang_pr23336_glm-4.7-fp8_accept_len.csv")
    both = acceptance_of(Sources(logs=(log,), tables=(table,)))
    assert both is not None and both.source == "log+table"
    assert [(d.num_steps, d.accept_len) for d in both.depths] == [
        (1, 1.85),
        (3, found.depths[0].accept_len),
        (7, 4.52),
    ]
    assert acceptance_of(Sources()) is None
    told = acceptance_of(Sources(logs=(log,)), simulated=True)
    assert told is not None and told.simulated
    trace = read_trace(ROOT / f"training/data/traces/{H200}_zero-step-skips-draft-extend.jsonl.gz")
    beside = acceptance_of(Sources(traces=(trace,), logs=(log,)))
    assert beside is not None and beside.simulated and beside.source == "log"


def test_measured_positions_count_as_they_are() -> None:
    found = profile("table", False, [DepthAcceptance(4, 3.099, 1)], (0.844, 0.599, 0.385, 0.271))
    assert found.accept_rate_by_position == pytest.approx(
        (0.844, 0.599 / 0.844, 0.385 / 0.599, 0.271 / 0.385), abs=2e-4
    )
    assert found.accept_len(4) == pytest.approx(3.099, abs=2e-3)


def test_simulated_acceptance_has_no_accept_rates() -> None:
    """Accept lengths that were set depth by depth would give rates of 1.00 after 0.00."""
    lengths = {1: 1.99, 2: 2.999, 3: 3.0, 5: 3.0001, 7: 3.0002}
    depths = [DepthAcceptance(steps, length, 9) for steps, length in lengths.items()]
    found = profile("trace", True, depths)
    assert found.accept_rate_by_position == () and found.depths == tuple(depths)
    with pytest.raises(CalibrationError, match="--acceptance PRESET"):
        found.accept_len(3)
    with pytest.raises(CalibrationError, match="expected 7 accept rates"):
        replace(found, simulated=False)
    real = profile("trace", False, depths).accept_rate_by_position
    assert len(real) == 7 and real[1] > 0.99
    assert max(real[2:]) < 0.005, "what is hardly ever reached says nothing"


# -- presets ---------------------------------------------------------------------------------------


def test_presets_are_the_golden_accept_lengths() -> None:
    assert len(presets()) == 14
    kimi = load_preset("kimik2.5_eagle3/thinking_on")
    golden = [1.83, 2.43, 2.88, 3.24, 3.46, 3.62, 3.71]
    assert [depth.accept_len for depth in kimi.depths] == golden
    assert [kimi.accept_len(k) for k in range(1, 8)] == pytest.approx(golden, abs=0.002)
    assert kimi.accept_rate_by_position[0] == pytest.approx(0.83)
    for name, found in presets().items():
        assert found.source == f"preset {name}"
        assert found.accept_len(7) <= max(depth.accept_len for depth in found.depths) + 0.01
    with pytest.raises(CalibrationError, match="kimik3_dspark/thinking_on"):
        load_preset("kimi")


# -- the block of a calibration --------------------------------------------------------------------


def test_the_block_survives_a_file_and_is_checked(tmp_path: Path) -> None:
    plain = Calibration.load(ROOT / "checkpoints/calibrations/kimi-k2.5-8gpu-table.json")
    assert plain.acceptance is None and "acceptance" not in plain.to_json()
    depth = DepthAcceptance(3, 2.5, 40, request_spread=0.3, drift_spread=0.2, drift_time_s=1.5)
    block = AcceptanceProfile("log", False, (0.7, 0.6, 0.5), (depth,))
    value = {**plain.to_json(), "acceptance": json.loads(json.dumps(_plain(block)))}
    found = Calibration.from_json(value)
    assert found.acceptance == block and found.sha256 != plain.sha256
    found.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == found
    for change, expected in (
        ({"depths": []}, "ascending num_steps"),
        ({"depths": 3}, "expected a list"),
        ({"accept_rate_by_position": [0.5]}, "expected 3 accept rates"),
        ({"accept_rate_by_position": [0.5, 0.5, 1.5]}, "from 0 to 1"),
        ({"simulated": 1}, "true or false"),
        ({"source": ""}, "expected a text"),
        ({"more": 1}, "expected keys"),
        ({"depths": [{**_plain(block)["depths"][0], "accept_len": 9.0}]}, "from 1 to 4"),
        ({"depths": [{**_plain(block)["depths"][0], "num_steps": 8}]}, "from 1 to 7"),
        ({"depths": [{**_plain(block)["depths"][0], "drift_time_s": "1"}]}, "drift_time_s"),
    ):
        with pytest.raises(CalibrationError, match=expected):
            Calibration.from_json({**value, "acceptance": {**value["acceptance"], **change}})


def _plain(block: AcceptanceProfile) -> dict:
    return {
        "source": block.source,
        "simulated": block.simulated,
        "accept_rate_by_position": list(block.accept_rate_by_position),
        "depths": [vars(depth) for depth in block.depths],
    }


def test_fit_depth_keeps_the_accept_length_in_range() -> None:
    found = fit_depth(1, Series([Observation("a", 0.0, 1, 1, 2.004)]))
    assert (found.accept_len, found.request_spread, found.drift_time_s) == (2.0, None, None)
