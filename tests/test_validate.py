"""What ``python -m training.validate`` measures, on shipped data and on data of known truth."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controller.calibration import Calibration
from controller.errors import CalibrationError
from controller.trace import TraceHeader, TraceRow, write_trace
from training import validate
from training.points import Point
from training.samples import Samples, context_cells
from training.validation import bounds
from training.validation.bounds import Check
from training.validation.cells import check_cells, hold_out_cells, summary
from training.validation.closed_loop import accept_rate_of
from training.validation.halves import judge_tables, predict_halves
from training.validation.logs import check_logs, compare_log, find_pairs
from training.validation.other_run import check_other_runs, find_other_runs, judge_other_runs

ROOT = Path(__file__).parents[1]
DATA = ROOT / "training/data"
SHIPPED = ROOT / "checkpoints/validation.json"
CALIBRATION = ROOT / validate.DEFAULT_CALIBRATION
BATCHES = (1, 8, 16, 32, 64)


def samples_of(slope_s: float, noise: float = 0.0, rounds: int = 20) -> Samples:
    """Return rounds of ``4 ms + 0.1 ms a request``, at two context levels from batch size 8 on."""
    random = np.random.default_rng(3)
    rows = [
        (size, size * (prompt + i), 0.004 + 1e-4 * size + slope_s * size * (prompt + i))
        for size in BATCHES
        for prompt in ((512,) if size == 1 else (512, 4096))
        for i in range(rounds)
    ]
    batch, context, step_s = (np.array(column) for column in zip(*rows, strict=True))
    step_s = step_s * np.where(batch == 16, 1.0 + noise * random.standard_normal(len(batch)), 1.0)
    none = np.zeros(len(batch), dtype=bool)
    return Samples(batch, context.astype(float), step_s, context_cells(batch, context), none)


def test_cells_of_a_known_surface_are_predicted_from_the_others() -> None:
    cells = hold_out_cells({"native": samples_of(2e-8)})
    assert len(cells) == 9
    inner = [cell for cell in cells if not cell.edge]
    assert {cell.batch_size for cell in inner} == {8, 16, 32}
    for cell in inner:
        assert cell.error == pytest.approx(0.0, abs=2e-3)
        assert cell.error_without_batch_size == pytest.approx(0.0, abs=2e-3)
        assert cell.quiet
    alone = next(cell for cell in cells if cell.batch_size == 1)
    # Nothing is known below batch size 8 then, and a calibration is constant there.
    assert alone.edge
    assert alone.predicted_s == pytest.approx(0.004 + 8e-4 + 2e-8 * alone.context_tokens, rel=1e-2)
    assert alone.predicted_s == alone.without_batch_size_s


def test_noisy_cells_are_not_judged() -> None:
    cells = hold_out_cells({"native": samples_of(2e-8, noise=0.2)})
    assert {cell.batch_size for cell in cells if not cell.quiet} == {16}
    median, p95 = check_cells([cell for cell in cells if not cell.quiet])
    assert not median.passed
    assert not p95.passed
    quiet = [cell for cell in cells if cell.quiet]
    wrong = replace(quiet[0], predicted_s=9.0 * quiet[0].measured_s)
    assert check_cells([*quiet, wrong])[1].value > 0.1


def test_a_tier_of_one_batch_size_cannot_be_held_out() -> None:
    whole = samples_of(2e-8)
    with pytest.raises(CalibrationError, match="got 0"):
        hold_out_cells({"native": whole.where(whole.batch_size == 8)})


def point_of(concurrency: int, step_s: float) -> Point:
    return Point("t:1", "table", "3", concurrency, concurrency, None, step_s, 2.5, False, None)


def test_each_half_of_a_table_predicts_the_other() -> None:
    points = [point_of(size, 0.02 + 0.001 * size) for size in (1, 4, 8, 16, 32)]
    rows = predict_halves("t", points)
    assert [(row.concurrency, row.extrapolated) for row in rows] == [
        (1, True),
        (4, False),
        (8, False),
        (16, False),
        (32, True),
    ]
    assert [row.measured for row in rows] == pytest.approx(
        [2.5 * size / (0.02 + 0.001 * size) for size in (1, 4, 8, 16, 32)]
    )
    # The chord of 4 and 16 goes on to 32 exactly, and between points the curve is nearly one.
    assert rows[-1].error == pytest.approx(0.0, abs=1e-6)
    assert max(abs(row.error) for row in rows[1:]) < 0.05
    # Below them it bends: a straight line of this steepness is not what small batches do.
    assert 0.1 < rows[0].error < 0.2


def test_the_asked_row_does_not_help_itself() -> None:
    points = [point_of(size, 0.02 + 0.001 * size) for size in (1, 4, 8, 16)]
    longer = [replace(p, accept_len=3.5) if p.concurrency == 8 else p for p in points]
    before, after = (predict_halves("t", item)[2] for item in (points, longer))
    assert after.predicted == before.predicted
    assert after.measured == pytest.approx(before.measured * 3.5 / 2.5)


def test_tables_with_too_few_concurrencies_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("num_steps,concurrency,throughput_tok_s\noff,1,90\noff,8,400\n")
    (tmp_path / "b.csv").write_text("num_steps,concurrency,throughput_tok_s\nsome,1,90\n")
    few, bad = judge_tables(tmp_path)
    assert few.left_out == "2 concurrencies with a throughput or TPOT"
    assert bad.left_out
    assert "'some'" in bad.left_out
    assert not few.rows


def test_logs_and_traces_pair_by_name_or_by_list(tmp_path: Path) -> None:
    for folder in ("logs", "traces"):
        (tmp_path / folder).mkdir()
    for name in (
        "logs/a.log",
        "logs/b.log.gz",
        "logs/c.log",
        "traces/a.jsonl",
        "traces/z.jsonl.gz",
    ):
        (tmp_path / name).touch()
    assert [(a.name, b.name) for a, b in find_pairs(tmp_path)] == [("a.log", "a.jsonl")]
    listed = tmp_path / "logs/pairs.csv"
    listed.write_text("log,trace\nc.log,z.jsonl.gz\n")
    assert [(a.name, b.name) for a, b in find_pairs(tmp_path)] == [
        ("a.log", "a.jsonl"),
        ("c.log", "z.jsonl.gz"),
    ]
    listed.write_text("log,trace\nc.log,gone.jsonl\n")
    with pytest.raises(CalibrationError, match=r"'gone\.jsonl'"):
        find_pairs(tmp_path)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xff\xfe\x00", "expected a CSV in UTF-8"),
        (b'log,trace\n"a', "expected a CSV in UTF-8"),
        (b"log,trace\n" + b"a" * 200_000, "expected a CSV in UTF-8"),
        (b"", "columns log and trace"),
        (b"log;trace\na.log;a.jsonl\n", "columns log and trace"),
        (b"log,trace\na.log\n", "a log and a trace a line"),
        (b"log,trace\na.log,a.jsonl,b\n", "a log and a trace a line"),
        (b"log,trace\na.log,../traces/a.jsonl\n", "names of files"),
        (b"log,trace\na.log,a\0.jsonl\n", "names of files"),
    ],
)
def test_a_bad_list_of_pairs_is_one_line(tmp_path: Path, data: bytes, expected: str) -> None:
    for name in ("logs/a.log", "traces/a.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    listed = tmp_path / "logs/pairs.csv"
    listed.write_bytes(data)
    with pytest.raises(CalibrationError, match=expected) as caught:
        find_pairs(tmp_path)
    assert str(listed) in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(listed))
    listed.unlink()
    listed.mkdir()
    with pytest.raises(CalibrationError, match="cannot be read"):
        find_pairs(tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        [{}],
        ["x"],
        None,
        5,
        {"a": 1},
        [{"name": "a", "sha256": 1}],
        [{"name": 5, "sha256": "1"}],
        [{"name": "../a", "sha256": "1"}],
        [{"name": "a\0", "sha256": "1"}],
    ],
)
def test_malformed_source_files_are_one_line(
    tmp_path: Path, files: object, capsys: pytest.CaptureFixture[str]
) -> None:
    value = json.loads(CALIBRATION.read_text())
    value["source"]["files"] = files
    path = tmp_path / "c.json"
    path.write_text(json.dumps(value))
    assert validate.main(["--calibration", str(path), "--data", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert "source.files" in err


def decode_line(second: int, batch: int, tokens: int, rate: float) -> str:
    return (
        f"[2026-11-29 14:00:{second:02d}] Decode batch, #running-req: {batch}, #token: {tokens}, "
        "token usage: 0.01, accept len: 2.50, accept rate: 0.50, cuda graph: True, "
        f"gen throughput (token/s): {rate:.2f}, #queue-req: 0"
    )


def fixed_depth_run(folder: Path, log_rate: float) -> tuple[Path, Path]:
    """Write trace and log of 3 steps at batch sizes 4 and 8, accept length 2.5, 10 ms a round."""
    header = TraceHeader(
        "0.5.17", "H200", "m", "fa3", speculative=True, draft="d", zero_step="warm"
    )
    rows = []
    for size in (4, 8):
        rows.append(TraceRow("prefill", None, size, 512 * size))
        rows += [
            TraceRow(
                "decode",
                3,
                size,
                round(size * (512 + 2.5 * i)),
                step_s=0.01,
                mean_correct_drafts=1.5,
            )
            for i in range(80)
        ]
    write_trace(folder / "run.jsonl", header, rows)
    prefill = "[2026-11-29 14:00:01] Prefill batch, #new-seq: 4, #new-token: 2048, #queue-req: 0"
    lines = [
        prefill,
        decode_line(2, 4, 4 * 612, 500.0),
        decode_line(3, 4, 4 * 712, log_rate),
        prefill.replace("00:01", "00:04"),
        decode_line(5, 8, 8 * 612, 900.0),
    ]
    (folder / "run.log").write_text("\n".join(lines) + "\n")
    return folder / "run.log", folder / "run.jsonl"


@pytest.mark.parametrize(("log_rate", "error"), [(1000.0, 0.0), (1200.0, 0.2)])
def test_a_log_is_held_against_the_trace_of_its_run(
    tmp_path: Path, log_rate: float, error: float
) -> None:
    result = compare_log(*fixed_depth_run(tmp_path, log_rate))
    assert result.refused is None
    assert result.tiers == ("3",)
    four, eight = result.cells
    assert four.throughput == pytest.approx(4 * 2.5 / 0.01)
    assert four.error == pytest.approx(error, abs=1e-6)
    # One decode line after a prefill tells nothing.
    assert eight.from_log is None
    assert eight.error is None
    worst, wrong = check_logs([result])
    assert worst.passed == (error <= bounds.LOG_WORST)
    assert wrong.passed


def test_a_refused_log_of_one_depth_misses_the_bound(tmp_path: Path) -> None:
    log, trace = fixed_depth_run(tmp_path, 1000.0)
    log.write_text("nothing of a server\n")
    result = compare_log(log, trace)
    assert result.refused
    assert str(tmp_path) not in result.refused
    assert [check.passed for check in check_logs([result])] == [False, False]


def test_accept_rates_give_their_accept_length() -> None:
    for num_steps, rate in ((1, 0.3), (3, 0.5), (7, 0.9)):
        accept_len = sum(rate**i for i in range(num_steps + 1))
        assert accept_rate_of(accept_len, num_steps) == pytest.approx(rate)


def test_nothing_measured_holds_no_bound() -> None:
    assert not Check("x", float("nan"), 1.0).passed
    assert all(np.isnan(value) for value in summary([]))
    assert summary([-0.3, 0.1, 0.2])[0] == pytest.approx(0.2)


def close(found: object, expected: object) -> bool:
    """Compare JSON values, numbers to 2%: the last digits differ between machines."""
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        return found.keys() == expected.keys() and all(
            close(found[k], expected[k]) for k in expected
        )
    if isinstance(expected, list):
        assert isinstance(found, list)
        return len(found) == len(expected) and all(map(close, found, expected))
    if isinstance(expected, float):
        return found == pytest.approx(expected, rel=0.02, abs=0.002)
    return found == expected


def test_the_shipped_data_holds_every_bound_and_gives_the_shipped_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    output = tmp_path / "validation.json"
    assert validate.main(["-o", str(output)]) == 0
    found, expected = json.loads(output.read_text()), json.loads(SHIPPED.read_text())
    for name in expected:
        assert close(found[name], expected[name]), name
    assert all(check["passed"] for check in found["checks"])
    refused = [log for log in found["logs"] if log["refused"]]
    assert [log["log"] for log in refused] == ["h200_sglang0.5.17_eagle3_fa3_mixed_steps.log"]
    printed = capsys.readouterr().out
    assert "MISSED" not in printed
    assert "unidentifiable" in printed


def test_a_missed_bound_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = hold_out_cells({"native": samples_of(2e-8)})
    calibration = Calibration.load(CALIBRATION)
    wrong = tuple(replace(cell, predicted_s=2.0 * cell.measured_s) for cell in cells)
    result = validate.Validation(calibration, wrong, (), (), (), ())
    monkeypatch.setattr(validate, "validate", lambda *_: result)
    output = tmp_path / "out.json"
    assert validate.main(["--calibration", str(CALIBRATION), "-o", str(output)]) == 1
    assert "MISSED" in capsys.readouterr().out
    # A figure that was not measured is null, and misses its bound.
    checks = {item["name"]: item for item in json.loads(output.read_text())["checks"]}
    assert checks["log throughput against the run's own trace, worst error"]["value"] is None
    assert checks["step time of other runs, quiet cells, p95 error"]["value"] is None
    assert not any(item["passed"] for name, item in checks.items() if "wrongly" not in name)


def test_changed_missing_and_table_sources_are_one_line_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DATA / "traces", tmp_path / "traces")
    changed = sorted((tmp_path / "traces").iterdir())[0]
    command = ["--calibration", str(CALIBRATION), "--data", str(tmp_path)]
    changed.write_bytes(changed.read_bytes() + b"\n")
    assert validate.main(command) == 2
    assert "calibrate again" in capsys.readouterr().err
    changed.unlink()
    assert validate.main(command) == 2
    assert "cannot be read" in capsys.readouterr().err
    kimi = ROOT / "checkpoints/calibrations/kimi-k2.5-8gpu-table.json"
    assert validate.main(["--calibration", str(kimi), "--data", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "made from step traces" in err
    assert err.count("\n") == 1
    assert validate.main([*command, "-o", str(CALIBRATION)]) == 2


def test_another_run_is_predicted_and_a_slower_one_is_told() -> None:
    calibration = Calibration.load(CALIBRATION)
    known = validate.read_sources_of(calibration, DATA / "traces")
    others = find_other_runs(DATA / "traces", known)
    names = [trace.path.name for trace in others]
    assert len(names) == 4
    assert not set(names) & {trace.path.name for trace in known}
    cells = judge_other_runs(calibration, others)
    assert {cell.tier for cell in cells} == {"cold", "1", "2", "3", "5", "7"}
    assert all(check.passed for check in check_other_runs(cells))
    slower = [
        replace(
            trace,
            rows=tuple(
                row if row.step_s is None else replace(row, step_s=1.2 * row.step_s)
                for row in trace.rows
            ),
        )
        for trace in others
    ]
    checks = check_other_runs(judge_other_runs(calibration, slower))
    assert not any(check.passed for check in checks)
    assert checks[0].value == pytest.approx(1 - 1 / 1.2, abs=0.03)


def test_no_other_run_misses_its_bounds() -> None:
    checks = check_other_runs([])
    assert [np.isnan(check.value) for check in checks] == [True, True]
    assert not any(check.passed for check in checks)
    calibration = Calibration.load(CALIBRATION)
    names = {check.name for check in validate.Validation(calibration, (), (), (), (), ()).checks}
    assert {check.name for check in checks} < names


def test_other_runs_are_found_plain_and_zipped_but_once(tmp_path: Path) -> None:
    known = validate.read_sources_of(Calibration.load(CALIBRATION), DATA / "traces")
    names = [trace.path.name for trace in find_other_runs(DATA / "traces", known)]
    for name in (*names, known[0].path.name):
        data = gzip.decompress((DATA / "traces" / name).read_bytes())
        (tmp_path / name.removesuffix(".gz")).write_bytes(data)
    found = [trace.path.name for trace in find_other_runs(tmp_path, known)]
    assert found == [name.removesuffix(".gz") for name in names]
    shutil.copy(DATA / "traces" / names[0], tmp_path)
    again = [trace.path.name for trace in find_other_runs(tmp_path, known)]
    assert again == [names[0], *found[1:]]
