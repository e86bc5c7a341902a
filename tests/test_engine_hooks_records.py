"""The step trace, the decision log and the thread under them."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from controller.trace import TraceHeader, read_trace
from engine_hooks.background import BackgroundWriter
from engine_hooks.decision_log import DecisionLog
from engine_hooks.recorder import Rotation, TraceRecorder

HEADER = TraceHeader("0.5.23", "CPU", "tiny", "intel_amx", speculative=True, zero_step="warm")
ROW = ("decode", 3, 4, 100, 0, 0.01, None, 0.001, 1.5)


def test_rows_are_written_soon_and_at_the_end():
    written = []
    writer = BackgroundWriter(written.extend, "test", flush_s=0.01)
    writer.put(1)
    end = time.monotonic() + 10
    while not written and time.monotonic() < end:
        time.sleep(0.01)
    assert written == [1]
    writer.put(2)
    writer.close()
    assert written == [1, 2]


def test_a_full_queue_drops_and_counts():
    release, written = threading.Event(), []

    def write(rows):
        release.wait(10)
        written.extend(rows)

    writer = BackgroundWriter(write, "test", max_queued=3, flush_s=60)
    for row in range(5):
        writer.put(row)
    release.set()
    writer.close()
    assert written == [0, 1, 2]
    assert writer.dropped == 2


def test_an_error_ends_the_writing_and_nothing_else(caplog):
    def write(rows):
        raise OSError("disk full")

    writer = BackgroundWriter(write, "test", flush_s=0.01)
    writer.put(1)
    end = time.monotonic() + 10
    while not writer.dropped and time.monotonic() < end:
        time.sleep(0.01)
    writer.put(2)
    writer.close()
    assert writer.dropped == 2
    assert "disk full" in caplog.text


def test_a_trace_is_read_back_and_bad_rows_are_left_out(tmp_path):
    recorder = TraceRecorder(tmp_path / "trace.jsonl", HEADER)
    recorder.put(ROW)
    recorder.put(("decode", 9, 4, 100, 0, 0.01, None, 0.001, 1.5))
    recorder.put(ROW)
    recorder.close()
    trace = read_trace(recorder.files[0])
    assert len(trace.rows) == 2
    assert trace.rows[0].mean_correct_drafts == 1.5
    assert recorder.refused == 1


def test_a_trace_never_overwrites_and_rotates_by_size(tmp_path):
    (tmp_path / "trace.jsonl").write_text("mine")
    recorder = TraceRecorder(
        tmp_path / "trace.jsonl",
        HEADER,
        Rotation(max_bytes=300, max_files=2),
        start=lambda write, name: BackgroundWriter(write, name, flush_s=0.01),
    )
    for _ in range(4):
        before = len(list(tmp_path.iterdir()))
        recorder.put(ROW)
        end = time.monotonic() + 10
        while recorder.files[-1].stat().st_size > 600 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(list(tmp_path.iterdir())) <= before + 1
    recorder.close()
    assert (tmp_path / "trace.jsonl").read_text() == "mine"
    assert len(recorder.files) == 2
    assert all(read_trace(file).header == HEADER for file in recorder.files)


def test_a_killed_recorder_has_lost_a_second_at_most(tmp_path):
    code = (
        "import sys, time\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from test_engine_hooks_records import HEADER, ROW\n"
        "from engine_hooks.recorder import TraceRecorder\n"
        "recorder = TraceRecorder(Path(sys.argv[1]), HEADER)\n"
        "[recorder.put(ROW) for _ in range(100)]\n"
        "time.sleep(1.6)\n"
        "[recorder.put(ROW) for _ in range(100)]\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    path = tmp_path / "trace.jsonl.gz"
    here = os.path.dirname(__file__)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path), here], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
    with pytest.warns(match="ends in the middle") if _is_cut(path) else _nothing():
        rows = read_trace(path).rows
    assert len(rows) >= 100


def _is_cut(path):
    import gzip

    try:
        gzip.decompress(path.read_bytes())
    except EOFError:
        return True
    return False


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_a_decision_log_has_a_file_a_rank(tmp_path):
    logs = [DecisionLog(tmp_path / "decisions.jsonl", rank) for rank in range(2)]
    for log in logs:
        log.put({"asked": log.path.name})
        log.close()
    assert [json.loads(log.path.read_text()) for log in logs] == [
        {"asked": "decisions.jsonl"},
        {"asked": "decisions.jsonl.rank1"},
    ]
