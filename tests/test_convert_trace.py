"""The converter for recordings without a header."""

import json
import re
from pathlib import Path

import pytest

from controller.calibration import Calibration
from controller.errors import TraceError
from controller.trace import read_trace
from training.convert_trace import main

ROOT = Path(__file__).parents[1]
H200 = Calibration.load(ROOT / "checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")
TRACES = [ROOT / "training/data/traces" / file["name"] for file in H200.source["files"]]
FLAGS = [
    "--hardware", "H200", "--model", "m", "--engine-version", "0.5.17",
    "--attention-backend", "fa3", "--draft", "EAGLE-3",
]  # fmt: skip
ROW = {
    "phase": "decode",
    "num_steps": 0,
    "batch_size": 4,
    "context_tokens": 128,
    "step_s": 0.005,
    "queue_depth": 0,
}


def recording(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_speculative_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = recording(tmp_path, ROW, {**ROW, "num_steps": 3}), tmp_path / "out.jsonl.gz"
    flags = [*FLAGS, "--zero-step", "cold", "--cuda-graph-batch-sizes", "1,2,4"]
    assert main([str(source), str(target), *flags]) == 0
    assert "2 rows" in capsys.readouterr().out
    trace = read_trace(target)
    head = trace.header
    assert (head.speculative, head.zero_step, head.draft) == (True, "cold", "EAGLE-3")
    assert (head.hardware, head.cuda_graph_batch_sizes) == ("H200", (1, 2, 4))
    assert head.overlap_schedule is True
    assert [row.num_steps for row in trace.rows] == [0, 3]
    assert trace.rows[0].new_tokens is None and trace.rows[0].mean_correct_drafts is None


def test_native_recording_has_no_draft_and_no_zero_step(tmp_path: Path) -> None:
    source, target = recording(tmp_path, {**ROW, "num_steps": None}), tmp_path / "out.jsonl"
    assert main([str(source), str(target), *FLAGS, "--no-overlap-schedule"]) == 0
    head = read_trace(target).header
    assert (head.speculative, head.zero_step, head.draft) == (False, None, None)
    assert head.overlap_schedule is False


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], "empty"),
        ([{**ROW, "batch_size": 0}], "in.jsonl:1: field 'batch_size'"),
        ([ROW, {**ROW, "extra": 1}], "in.jsonl:2: field 'extra'"),
        ([{"schema": "specgovernor.trace"}], "use it as it is"),
        ([[1]], "row object"),
    ],
)
def test_bad_recordings(
    tmp_path: Path, rows: list[object], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("kept")
    assert main([str(recording(tmp_path, *rows)), str(target), *FLAGS]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and expected in error
    assert target.read_text() == "kept"


def test_bad_flags_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = recording(tmp_path, ROW), tmp_path / "out.jsonl"
    for flags in ([], [*FLAGS, "--cuda-graph-batch-sizes", "1,x"]):
        with pytest.raises(SystemExit) as caught:
            main([str(source), str(target), *flags])
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    assert main([str(source), str(target), *FLAGS, "--cuda-graph-batch-sizes", "4,2"]) == 2
    assert "ascending" in capsys.readouterr().err
    assert main([str(tmp_path / "absent"), str(target), *FLAGS]) == 2
    assert not target.exists()


def test_a_recording_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = recording(tmp_path, ROW)
    before = source.read_bytes()
    assert main([str(source), str(source), *FLAGS]) == 2
    assert "which it would replace" in capsys.readouterr().err
    assert source.read_bytes() == before


def test_error_without_header_points_to_the_converter(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=re.escape("python -m training.convert_trace")):
        read_trace(recording(tmp_path, ROW))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.split("fa3_")[1][:12])
def test_shipped_traces(path: Path) -> None:
    trace = read_trace(path)
    head = trace.header
    assert head.speculative is ("native" not in path.name)
    assert head.zero_step == (
        None if "native" in path.name else "cold" if "skips" in path.name else "warm"
    )
    assert (head.engine_version, head.hardware) == ("0.5.17", "NVIDIA H200")
    assert head.acceptance == "simulated"
    assert len(trace.rows) > 800
    assert [row.step_s for row in trace.rows].count(None) == 1


def test_all_traces_are_shipped() -> None:
    assert len(TRACES) == 4
