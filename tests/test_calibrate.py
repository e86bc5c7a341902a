"""Fitting calibrations from traces and tables."""

import csv
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.calibration import Calibration
from controller.errors import CalibrationError
from controller.trace import Trace, TraceHeader, TraceRow, write_trace
from training.calibrate import main
from training.fit import fit_surfaces
from training.fitting import Fitted, calibrate
from training.isotonic import pool_adjacent_violators, project_monotone
from training.prefill import Burst, find_bursts, fit_prefill
from training.samples import Samples, collect
from training.sources import Sources, read_sources
from training.tables import TableOptions, expected_accept_len

ROOT = Path(__file__).parents[1]
H200 = Calibration.load(ROOT / "checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")
TRACES = [ROOT / "training/data/traces" / file["name"] for file in H200.source["files"]]
"""The traces of the shipped calibration; the folder may hold more."""
KIMI = ROOT / "training/data/tables/kimi_k2.5_8gpu_throughput.csv"
HEADER = TraceHeader(
    engine_version="0.5.17",
    hardware="H200",
    model="m",
    draft="d",
    attention_backend="fa3",
    speculative=True,
    zero_step="warm",
    cuda_graph_batch_sizes=(1, 2, 4, 8, 16),
)
BATCHES = (1, 4, 7, 16)
TRUE_S = {"warm": (0.004, 1e-4, 2e-8), "1": (0.005, 2e-4, 2.5e-8), "3": (0.006, 5e-4, 3e-8)}
"""Seconds of a round, a padded request, and a context token, by tier."""

KEPT = '{"schema": "specgovernor.calibration", "note": "kept"}'


def true_s(tier: str, batch: int, context: int) -> float:
    fixed, request, token = TRUE_S[tier]
    return fixed + request * padded(batch) + token * context


def padded(batch: int) -> int:
    return next(size for size in (1, 2, 4, 8, 16) if size >= batch)


def synthetic(
    noise: float = 0.0, rounds: int = 24, batches: tuple[int, ...] = BATCHES, prompt: int = 512
) -> list[TraceRow]:
    """Return rows of a known surface: bursts of prefill, then every tier in turn."""
    random = np.random.default_rng(5)
    rows: list[TraceRow] = []
    for prompt_tokens in (prompt, 12 * prompt):
        for batch in batches:
            tokens = prompt_tokens * batch
            rows.append(
                TraceRow(
                    "prefill", None, batch, tokens, step_s=0.01 + 2e-5 * tokens if rows else None
                )
            )
            for tier in TRUE_S:
                for _ in range(rounds):
                    step_s = true_s(tier, batch, tokens)
                    step_s *= float(np.exp(noise * random.standard_normal()))
                    num_steps = 0 if tier == "warm" else int(tier)
                    rows.append(TraceRow("decode", num_steps, batch, tokens, step_s=step_s))
                    tokens += batch * (1 + num_steps)
    return rows


def fit(rows: list[TraceRow], header: TraceHeader = HEADER) -> Fitted:
    return calibrate(Sources((Trace(header, tuple(rows), KIMI),)), "toy")


@cache
def shipped() -> Fitted:
    return calibrate(read_sources(TRACES, TableOptions()), "h200")


def run(capsys: pytest.CaptureFixture[str], *args: object, code: int = 2) -> str:
    assert main([str(arg) for arg in args]) == code
    captured = capsys.readouterr()
    if code:
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
        assert "Traceback" not in captured.err
        return captured.err
    return captured.out


# -- isotonic regression ---------------------------------------------------------------------------


def test_pool_adjacent_violators_by_hand() -> None:
    values, weights = np.array([2.0, 1.0, 3.0, 0.0]), np.array([1.0, 3.0, 1.0, 1.0])
    assert pool_adjacent_violators(values, weights).tolist() == [1.25, 1.25, 1.5, 1.5]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_projection_is_monotone_and_nearest(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.standard_normal((4, 5)) + np.arange(5)
    weights = np.exp(random.standard_normal((4, 5)))
    fitted = project_monotone(values, weights)
    assert np.all(np.diff(fitted, axis=0) >= 0) and np.all(np.diff(fitted, axis=1) >= 0)
    # Nearest point of a convex set: no feasible direction improves the distance.
    for _ in range(10):
        other = np.sort(np.sort(random.standard_normal((4, 5)) * 3, axis=0), axis=1)
        inner = np.sum(weights * (fitted - values) * (other - fitted))
        assert inner >= -1e-6


def test_projection_leaves_gaps_alone() -> None:
    values = np.array([[1.0, np.nan, 3.0], [0.5, 2.0, np.nan]])
    fitted = project_monotone(values, np.ones((2, 3)))
    assert np.array_equal(np.isnan(fitted), np.isnan(values))
    assert fitted[0, 0] == fitted[1, 0] == pytest.approx(0.75)


# -- traces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-5), (0.02, 0.02)])
def test_recovers_a_known_surface(noise: float, tolerance: float) -> None:
    fitted = fit(synthetic(noise)).calibration
    assert fitted.tier_names == ("warm", "1", "3")
    for tier in TRUE_S:
        cost = fitted.cost(tier)
        assert cost.batch_sizes == (1, 4, 8, 16), "7 runs as 8"
        for batch in BATCHES:
            for context in (500, 90_000):
                found, expected = fitted.step_s(tier, batch, context), true_s(tier, batch, context)
                assert found == pytest.approx(expected, rel=tolerance)
        if noise:
            assert 0.01 < np.median(cost.relative_noise) < 0.03
            assert cost.median_error is not None and cost.median_error < 0.03


def test_stalls_and_rounds_after_a_change_do_not_matter() -> None:
    rows = synthetic()
    previous = None
    for index, row in enumerate(rows):
        key = (row.phase, row.num_steps, row.batch_size)
        if row.phase == "decode" and key != previous:
            for at in (index, index + 1):
                rows[at] = replace(rows[at], step_s=0.0021)
            rows[index + 7] = replace(rows[index + 7], step_s=0.3)
        previous = key
    result = fit(rows)
    assert result.dropped["stall"] == 24 and result.dropped["after a change"] == 48
    found = result.calibration.step_s("3", 16, 20_000)
    assert found == pytest.approx(true_s("3", 16, 20_000), rel=1e-4)


def test_quiet_cells_decide_over_noisy_ones() -> None:
    """Jitter that only ever adds time at short context must not lift the fit."""
    random = np.random.default_rng(1)
    rows = [
        replace(row, step_s=row.step_s * float(1 + random.exponential(0.3)))
        if row.step_s and row.phase == "decode" and row.context_tokens < 2048 * row.batch_size
        else row
        for row in synthetic()
    ]
    fitted = fit(rows).calibration
    for batch in (4, 16):
        context = 6500 * batch
        expected = true_s("3", batch, context)
        assert fitted.step_s("3", batch, context) == pytest.approx(expected, rel=0.01)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_any_data_gives_an_ordered_finite_fit(seed: int) -> None:
    random = np.random.default_rng(seed)
    samples = {}
    for tier in ("native", "warm", "1", "3", "7"):
        count = int(random.integers(30, 60))
        batch = random.choice(np.array([1, 2, 8, 32]), count)
        context = batch * random.integers(1, 9000, count).astype(float)
        cell = batch.copy()
        held_out = np.zeros(count, dtype=bool)
        samples[tier] = Samples(batch, context, np.exp(random.normal(-5, 1, count)), cell, held_out)
    surfaces = fit_surfaces(samples)
    for surface in surfaces.values():
        assert np.all(surface.base_s > 0) and np.all(np.isfinite(surface.base_s))
        assert np.all(np.diff(surface.base_s) >= 0) and surface.slope_s >= 0
    ordered = [surfaces[tier] for tier in ("warm", "1", "3", "7")]
    low = max(item.batch_sizes[0] for item in ordered)
    high = min(item.batch_sizes[-1] for item in ordered)
    for batch in range(int(low), int(high) + 1):
        for tokens in (0.0, 1e5):
            times = [item.predict(np.array([batch]), np.array([tokens]))[0] for item in ordered]
            assert all(b >= a * (1 - 1e-12) for a, b in pairwise(times))


def test_missing_batch_size_of_one_tier_is_interpolated() -> None:
    rows = [row for row in synthetic() if not (row.num_steps == 1 and row.batch_size == 4)]
    fitted = fit(rows).calibration
    assert fitted.cost("1").batch_sizes == (1, 4, 8, 16)
    assert fitted.cost("1").base_at(4) == pytest.approx(true_s("1", 4, 0), rel=1e-4)


def test_too_little_data_is_refused() -> None:
    few = [r for i, r in enumerate(synthetic()) if r.num_steps != 3 or i < 120]
    with pytest.raises(CalibrationError, match=r"tier 3: expected at least 30 .* got 22; record 8"):
        fit(few)
    single = [r for r in synthetic() if r.num_steps != 3 or r.batch_size == 16]
    with pytest.raises(CalibrationError, match=r"tier 3: .*2 batch sizes, got only 16 \(44 rou"):
        fit(single)
    with pytest.raises(CalibrationError, match="no usable decode rounds"):
        fit([row for row in synthetic() if row.phase == "prefill"])
    with pytest.raises(CalibrationError, match="prefill: expected at least 3 bursts"):
        fit([row for row in synthetic() if row.phase == "decode"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hardware", "B200"),
        ("model", "other"),
        ("engine_version", "0.5.23"),
        ("attention_backend", "triton"),
        ("cuda_graph_batch_sizes", None),
        ("overlap_schedule", False),
        ("draft", "another"),
    ],
)
def test_different_systems_are_not_merged(tmp_path: Path, field: str, value: object) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_trace(first, HEADER, synthetic())
    write_trace(second, replace(HEADER, **{field: value}), synthetic(noise=0.1))
    with pytest.raises(CalibrationError, match=field) as caught:
        read_sources([first, second], TableOptions())
    assert "b.jsonl" in str(caught.value)


def test_cells_and_held_out_rows() -> None:
    samples, dropped = collect([(HEADER, synthetic())], padded)
    warm = samples["warm"]
    assert len(np.unique(warm.cell)) == 8, "4 batch sizes at 2 context levels"
    assert np.mean(warm.held_out) == pytest.approx(0.18, abs=0.03)
    assert dropped["no time"] == 0 and dropped["prefill"] == 8


# -- prefill ---------------------------------------------------------------------------------------


def test_bursts() -> None:
    rows = [
        TraceRow("prefill", None, 1, 10),
        TraceRow("decode", None, 1, 11, step_s=1.0),
        TraceRow("prefill", None, 1, 10, step_s=9.0),
        TraceRow("decode", None, 1, 11, step_s=1.0),
        TraceRow("prefill", None, 3, 100, step_s=0.5),
        TraceRow("prefill", None, 2, 50, step_s=0.25),
        TraceRow("decode", None, 4, 124, step_s=1.0),
        TraceRow("prefill", None, 1, 10, step_s=0.5),
        TraceRow("decode", None, 5, 139, step_s=1.0),
        TraceRow("prefill", None, 1, 10, step_s=0.5, new_tokens=7),
        TraceRow("decode", None, 6, 156, step_s=1.0),
    ]
    assert find_bursts(rows, native=True) == [Burst(2, 120, 0.75), Burst(1, 7, 0.5)], (
        "the first two are warm-up; the third joins a running batch"
    )


def test_prefill_fit_ignores_late_bursts() -> None:
    tokens = [500, 1000, 4000, 16_000, 32_000, 64_000, 8000]
    bursts = [Burst(1 + n // 16_385, n, 0.01 * (1 + n // 16_385) + 2e-5 * n) for n in tokens]
    late = [Burst(1, 700, 0.9), Burst(1, 3000, 0.6)]
    found = fit_prefill([*late, *bursts])
    assert found.cost.base_s == pytest.approx(0.01, rel=0.01)
    assert found.cost.s_per_token == pytest.approx(2e-5, rel=0.01)
    assert found.num_outliers == 2


# -- the shipped traces ----------------------------------------------------------------------------


def test_shipped_calibration_is_what_the_traces_give() -> None:
    saved = Calibration.load(ROOT / "checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")
    now = shipped().calibration
    assert saved.source["files"] == now.source["files"]
    assert saved.tier_names == now.tier_names
    for old, new in zip(saved.costs, now.costs, strict=True):
        assert old.batch_sizes == new.batch_sizes and old.num_rows == new.num_rows
        assert new.base_s == pytest.approx(old.base_s, rel=1e-4)
        assert new.context_s_per_token == pytest.approx(old.context_s_per_token, rel=1e-4)


def test_shipped_held_out_errors() -> None:
    reports = {report.cost.tier: report for report in shipped().tiers}
    assert set(reports) == {"native", "cold", "warm", "1", "2", "3", "5", "7"}
    for tier, report in reports.items():
        assert report.cost.num_rows > 350
        assert report.cost.median_error is not None and report.cost.p95_error is not None
        assert report.cost.median_error < (0.05 if tier == "3" else 0.03), tier
        assert report.quiet_median_error is not None
        assert report.quiet_median_error < (0.04 if tier == "3" else 0.02), tier
        assert report.cost.p95_error < 0.40, tier
    assert reports["native"].cost.p95_error < 0.08  # type: ignore[operator]
    noisy = {(c[0], r.cost.tier) for r in reports.values() for c in r.cells if c[3] > 0.12}
    assert {(16, "5"), (4, "7")} <= noisy
    assert not any(batch in (32, 96, 256) for batch, _ in noisy)


# -- tables ----------------------------------------------------------------------------------------


def test_kimi_table_alone_reproduces_its_throughputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "kimi.json"
    out = run(capsys, KIMI, "-o", output, "--accept-len", 2.88, code=0)
    assert "2.88" in out and "assumed" in out
    found = Calibration.load(output)
    assert found.assumed_accept_len == {"3": 2.88}
    assert found.cuda_graph_batch_sizes is None
    with open(KIMI, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    for row in rows:
        on = row["num_steps"] == "on"
        batch = min(int(row["concurrency"]), 48) if on else int(row["concurrency"])
        step_s = found.step_s("3" if on else "native", batch, 0)
        throughput = (2.88 if on else 1.0) * batch / step_s
        assert throughput == pytest.approx(float(row["throughput_tok_s"]), rel=0.05)
    shipped_file = Calibration.load(ROOT / "checkpoints/calibrations/kimi-k2.5-8gpu-table.json")
    assert found.costs == shipped_file.costs
    assert found.cost("native").measured_batch_sizes == (1, 5, 30, 100, 250)
    assert found.cost("3").measured_batch_sizes == (1, 5, 30, 48)
    assert found.trust("native", 48, 0) == "interpolated"
    assert found.trust("3", 96, 0) == "extrapolated"


def test_table_options(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "concurrency,num_steps,throughput_tok_s,accept_len\n"
        "1,off,100,\n64,off,3200,\n1,2,150,2\n64,2,3000,2.0\n1,5,160,\n64,5,2000,\n"
    )
    sources = read_sources([path], TableOptions(speculative_max_running=64))
    found = calibrate(sources, "t").calibration
    assert found.step_s("2", 64, 0) == pytest.approx(2 * 64 / 3000)
    assert found.step_s("native", 64, 10**6) == pytest.approx(0.02)
    assert found.assumed_accept_len == {"5": pytest.approx(expected_accept_len(5))}
    assert expected_accept_len(2, 0.5) == 1.75


def test_rows_at_one_batch_size_are_averaged_and_ordered(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "num_steps,concurrency,throughput_tok_s\noff,1,100\noff,1,50\noff,4,800\noff,8,400\n"
    )
    cost = calibrate(read_sources([path], TableOptions()), "t").calibration.cost("native")
    assert cost.measured_batch_sizes == (1, 4, 8)
    assert cost.batch_sizes[-1] == 16
    assert list(cost.base_s) == sorted(cost.base_s)
    # 15 ms at batch size 1 and 5 ms at 4 are pooled, each weighted by its relative precision.
    pooled_s = (15e-3 / 15**2 + 5e-3 / 5**2) / (1 / 15**2 + 1 / 5**2)
    assert [cost.base_at(1), cost.base_at(4)] == pytest.approx([pooled_s, pooled_s])
    assert cost.base_at(8) == pytest.approx(0.02)
    assert cost.num_rows == 4


TABLE = "num_steps,concurrency,throughput_tok_s\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty file"),
        ("  \n", "empty file"),
        (TABLE, "rows below the column names"),
        ("num_steps,concurrency\noff,1\n", "add throughput_tok_s"),
        ("a,b\n1,2\n", "add num_steps"),
        (TABLE + "off,100,1\noff,400,4\n", "not swapped"),
        (TABLE + "off,92.6,1\n", "concurrency: expected an integer"),
        (TABLE + "1,off,92.6\n", "column concurrency"),
        (TABLE + "off,1,nan\n", "column throughput_tok_s"),
        (TABLE + "off,1,inf\n", "column throughput_tok_s"),
        (TABLE + "off,1,-5\n", "column throughput_tok_s"),
        (TABLE + "off,0,5\n", "column concurrency"),
        (TABLE + "off,1,\n", "got 'nothing'"),
        (TABLE + "off,1\n", "column throughput_tok_s"),
        (TABLE + "adaptive,1,5\n", "column num_steps"),
        (TABLE + "0,1,5\n", "--zero-steps"),
        (TABLE + "8,1,5\n", "column num_steps"),
        (TABLE + "1,1,90\n" + "\xff", "column num_steps"),
        (TABLE.strip() + ",accept_len\n1,1,90,2.5\n", "accept length: expected 1 to 2"),
        (TABLE.strip() + ",accept_len\n1,1,90,1.5\n1,2,90,\n", "as in the other rows"),
    ],
)
def test_bad_tables(
    tmp_path: Path, text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "t.csv", tmp_path / "out.json"
    source.write_text(text)
    output.write_text(KEPT)
    error = run(capsys, source, "-o", output)
    assert expected in error and str(source) in error
    assert output.read_text() == KEPT


# -- the command -----------------------------------------------------------------------------------


def test_command_on_traces_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, table, output = tmp_path / "a.jsonl.gz", tmp_path / "b.csv", tmp_path / "deep/c.json"
    write_trace(trace, HEADER, synthetic(noise=0.01))
    table.write_text(TABLE + "off,1,250\noff,16,3000\n3,1,1000\n")
    flags = ["--kv-capacity-tokens", 5000, "--chunk-tokens", 2048, "--notes", "toy"]
    out = run(capsys, trace, table, "-o", output, "--name", "mix", *flags, code=0)
    assert "held-out" in out and "Prefill" in out and "extrapolates" in out and "M measured" in out
    assert "adds" not in out and "tiers native come from the table" in " ".join(out.split())
    found = Calibration.load(output)
    assert found.name == "mix" and found.tier_names == ("native", "warm", "1", "3")
    assert (found.kv_capacity_tokens, found.chunk_tokens) == (5000, 2048)
    assert found.step_s("3", 1, 0) == pytest.approx(0.0065, rel=0.02), "traces come first"
    assert [item["name"] for item in found.source["files"]] == ["a.jsonl.gz", "b.csv"]
    assert found.source["notes"] == "toy" and str(tmp_path) not in output.read_text()
    first = output.read_bytes()
    run(capsys, trace, table, "-o", output, "--name", "mix", *flags, code=0)
    assert output.read_bytes() == first


def test_command_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, output = tmp_path / "a.jsonl", tmp_path / "out.json"
    write_trace(trace, HEADER, synthetic())
    run(capsys, tmp_path, "-o", output)
    run(capsys, tmp_path / "absent", "-o", output)
    assert "given twice" in run(capsys, trace, trace, "-o", output)
    assert "given twice" in run(capsys, KIMI, KIMI, "-o", output)
    bare = tmp_path / "bare.jsonl"
    bare.write_text("\n".join(trace.read_text().splitlines()[1:]) + "\n")
    assert "convert_trace" in run(capsys, bare, "-o", output)
    assert "hardware" in run(capsys, trace, KIMI, "-o", output)
    assert "expected at least 9999" in run(capsys, trace, "-o", output, "--min-rows", 9999)
    (tmp_path / "file").write_text("x")
    run(capsys, trace, "-o", tmp_path / "file" / "out.json")
    for flags in ([], ["-o", output, "--chunk-tokens", "0"], ["-o", output, "--num-steps", "9"]):
        with pytest.raises(SystemExit) as caught:
            main([str(KIMI), *map(str, flags)])
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    assert "accept length" in run(
        capsys, KIMI, "-o", output, "--num-steps", 1, "--accept-len", 2.88
    )
    assert not output.exists()
