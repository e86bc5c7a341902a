"""The step-trace schema and its files."""

import gzip
import json
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.errors import SpecGovernorError, TraceError
from controller.trace import (
    ROW_FIELDS,
    TraceHeader,
    TraceReader,
    TraceRow,
    TraceWarning,
    TraceWriter,
    read_trace,
    write_trace,
)

HEADER = TraceHeader(
    engine_version="0.5.17",
    hardware="NVIDIA H200",
    model="Llama-3-8B",
    draft="EAGLE-3",
    attention_backend="fa3",
    speculative=True,
    zero_step="warm",
    cuda_graph_batch_sizes=(1, 2, 4),
)
ROWS = (
    TraceRow("prefill", None, 2, 64, new_tokens=64),
    TraceRow("decode", 0, 2, 64, step_s=0.005, mean_correct_drafts=0.0),
    TraceRow("decode", 3, 2, 66, 1, step_s=0.007, launch_host_s=0.0, mean_correct_drafts=2.5),
    TraceRow("decode", None, 2, 73, step_s=0.004),
)
GOOD = ROWS[2].to_json()
FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def text_of(header: object, *rows: object) -> str:
    return "".join(json.dumps(item) + "\n" for item in (header, *rows))


def write(tmp_path: Path, text: str | bytes, name: str = "t.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def message_of(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert str(path) in text and "\n" not in text and "; " in text
    return text


numbers = st.floats(0, 1e6, allow_nan=False)


@st.composite
def rows(draw: st.DrawFn) -> TraceRow:
    decode = draw(st.booleans())
    steps = draw(st.none() | st.integers(0, 7)) if decode else None
    return TraceRow(
        phase="decode" if decode else "prefill",
        num_steps=steps,
        batch_size=draw(st.integers(1, 2**53)),
        context_tokens=draw(st.integers(0, 2**53)),
        queue_depth=draw(st.integers(0, 10**6)),
        step_s=draw(st.none() | st.floats(1e-9, 1e6)),
        new_tokens=None if decode else draw(st.none() | st.integers(0, 10**9)),
        launch_host_s=draw(st.none() | numbers),
        mean_correct_drafts=None if steps is None else draw(st.none() | st.floats(0, steps)),
    )


@FILES
@given(items=st.lists(rows(), max_size=8), compressed=st.booleans(), streamed=st.booleans())
def test_round_trip(
    tmp_path: Path, items: list[TraceRow], compressed: bool, streamed: bool
) -> None:
    path = tmp_path / ("t.jsonl.gz" if compressed else "t.jsonl")
    if streamed:
        with TraceWriter(path, HEADER) as writer:
            for item in items:
                writer.write(item)
    else:
        write_trace(path, HEADER, items)
    trace = read_trace(path)
    assert trace.header == HEADER
    assert trace.rows == tuple(items)
    assert trace.path == path


def test_gzip_is_deterministic_and_told_apart_by_content(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    write_trace(first, HEADER, ROWS)
    with TraceWriter(second, HEADER) as writer:
        for row in ROWS:
            writer.write(row)
    data = first.read_bytes()
    assert data == second.read_bytes()
    assert data[4:8] == b"\0\0\0\0", "the gzip header holds no time"
    assert not data[3] & 0b1000, "nor a name"
    assert read_trace(write(tmp_path, data, "no_suffix")).rows == ROWS
    joined = gzip.compress(gzip.decompress(data)[:100]) + gzip.compress(gzip.decompress(data)[100:])
    assert read_trace(write(tmp_path, joined, "joined")).rows == ROWS


def test_writer_flush_makes_rows_readable(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    with TraceWriter(path, HEADER) as writer:
        writer.write(ROWS[0])
        writer.flush()
        with pytest.warns(TraceWarning, match="middle of a line"):
            assert read_trace(path).rows == ROWS[:1]


def test_reader_streams(tmp_path: Path) -> None:
    path = write(tmp_path, text_of(HEADER.to_json(), GOOD, {"phase": "x"}))
    reader = iter(TraceReader(path))
    assert next(reader) == ROWS[2]
    with pytest.raises(TraceError, match=":3: "):
        next(reader)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("phase", "verify"),
        ("phase", None),
        ("num_steps", 8),
        ("num_steps", -1),
        ("num_steps", True),
        ("num_steps", 3.0),
        ("batch_size", 0),
        ("batch_size", True),
        ("batch_size", "4"),
        ("batch_size", 2**60),
        ("context_tokens", -1),
        ("context_tokens", None),
        ("new_tokens", 4),
        ("step_s", 0),
        ("step_s", -0.1),
        ("step_s", True),
        ("step_s", [0.1]),
        ("step_s", 10**400),
        ("launch_host_s", -1e-9),
        ("mean_correct_drafts", 3.01),
        ("mean_correct_drafts", -0.5),
        ("queue_depth", 1.5),
        ("queue_depth", {}),
    ],
)
def test_bad_values_name_line_field_and_fix(tmp_path: Path, field: str, value: object) -> None:
    text = message_of(write(tmp_path, text_of(HEADER.to_json(), GOOD, {**GOOD, field: value})))
    assert ":3: " in text and repr(field) in text and "expected" in text and "got" in text


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_must_be_finite(tmp_path: Path, literal: str) -> None:
    line = json.dumps(GOOD).replace("0.007", literal)
    assert "finite" in message_of(write(tmp_path, text_of(HEADER.to_json()) + line + "\n"))


@pytest.mark.parametrize("name", ROW_FIELDS)
def test_every_field_must_be_there(tmp_path: Path, name: str) -> None:
    row = {key: value for key, value in GOOD.items() if key != name}
    assert repr(name) in message_of(write(tmp_path, text_of(HEADER.to_json(), row)))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (json.dumps({**GOOD, "accepted": 1}), "unknown field"),
        (json.dumps(GOOD)[:-1] + ', "phase": "decode"}', "twice"),
        ("[1]", "a row object, got a list"),
        ("", "JSON object"),
        ("{", "JSON object"),
        ("[" * 100_000, "JSON object"),
        ("1" * 5000, "JSON object"),
        (json.dumps(HEADER.to_json()), "second header"),
    ],
    ids=["unknown", "twice", "list", "blank", "cut", "deep", "long", "header"],
)
def test_bad_lines(tmp_path: Path, line: str, expected: str) -> None:
    path = write(tmp_path, text_of(HEADER.to_json()) + line + "\n" + json.dumps(GOOD) + "\n")
    text = message_of(path)
    assert ":2: " in text and expected in text


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    assert ":2: " in message_of(write(tmp_path, text_of(HEADER.to_json()).encode() + b"\xff\n"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"schema_version": 2}, "record again with this version"),
        ({"schema_version": True}, "schema_version"),
        ({"schema": "other"}, "training.convert_trace"),
        ({"hardware": ""}, "'hardware'"),
        ({"speculative": 1}, "'speculative'"),
        ({"zero_step": "lukewarm"}, "'warm', 'cold', null"),
        ({"zero_step": ["warm"]}, "'zero_step'"),
        ({"acceptance": None}, "'acceptance'"),
        ({"cuda_graph_batch_sizes": [4, 2]}, "ascending"),
        ({"cuda_graph_batch_sizes": []}, "ascending"),
        ({"cuda_graph_batch_sizes": [True, 2]}, "ascending"),
        ({"cuda_graph_batch_sizes": 4}, "ascending"),
        ({"speculative": False}, "'zero_step'"),
        ({"extra": 1}, "'extra'"),
        ({"draft": 3}, "'draft'"),
    ],
)
def test_bad_headers(tmp_path: Path, change: dict[str, object], expected: str) -> None:
    text = message_of(write(tmp_path, text_of({**HEADER.to_json(), **change}, GOOD)))
    assert ":1: " in text and expected in text


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    assert "got no whole line" in message_of(write(tmp_path, ""))
    assert "convert_trace" in message_of(write(tmp_path, text_of(GOOD)))
    assert "JSON object" in message_of(write(tmp_path, "a,b\n1,2\n"))
    assert "JSON object" in message_of(write(tmp_path, '{"schema": "specgov'))
    message_of(tmp_path)
    message_of(tmp_path / "absent.jsonl")
    with pytest.raises(SpecGovernorError):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("header", "row", "field"),
    [
        ({"speculative": False, "zero_step": None, "draft": None}, GOOD, "num_steps"),
        ({"zero_step": None}, {**GOOD, "num_steps": 0, "mean_correct_drafts": 0}, "zero_step"),
        ({}, {**GOOD, "num_steps": None}, "mean_correct_drafts"),
        ({}, {**GOOD, "phase": "prefill"}, "num_steps"),
    ],
)
def test_fields_must_agree(
    tmp_path: Path, header: dict[str, object], row: dict[str, object], field: str
) -> None:
    text = message_of(write(tmp_path, text_of({**HEADER.to_json(), **header}, row)))
    assert ":2: " in text and field in text


def test_writers_refuse_rows_that_contradict_the_header(tmp_path: Path) -> None:
    native = TraceHeader("0.5.17", "H200", "m", "fa3", speculative=False)
    path = write(tmp_path, "kept")
    with pytest.raises(TraceError, match="speculative"):
        write_trace(path, native, ROWS)
    assert path.read_text() == "kept"
    with TraceWriter(path, native) as writer, pytest.raises(TraceError, match="speculative"):
        writer.write(ROWS[1])


@pytest.mark.parametrize("keep", [1, 20, 60])
def test_cut_last_line_is_left_out(tmp_path: Path, keep: int) -> None:
    text = text_of(HEADER.to_json(), GOOD) + json.dumps(GOOD)[:keep]
    with pytest.warns(TraceWarning, match=":3: .*middle of a line"):
        assert read_trace(write(tmp_path, text)).rows == (ROWS[2],)


def test_last_line_without_newline(tmp_path: Path) -> None:
    text = text_of(HEADER.to_json(), GOOD)
    assert read_trace(write(tmp_path, text[:-1])).rows == (ROWS[2],)
    bad = json.dumps({**GOOD, "batch_size": 0})
    assert "batch_size" in message_of(write(tmp_path, text + bad))


def test_cut_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    text = text_of(HEADER.to_json()) + json.dumps(GOOD)[:30] + "\n" + json.dumps(GOOD) + "\n"
    assert ":2: " in message_of(write(tmp_path, text))


def test_cut_gzip_keeps_whole_rows(tmp_path: Path) -> None:
    many = [TraceRow("decode", 3, 1, n, step_s=0.001 + n * 1e-7) for n in range(300)]
    path = tmp_path / "t.jsonl.gz"
    write_trace(path, HEADER, many)
    data = path.read_bytes()
    for cut in (len(data) // 2, len(data) - 9, len(data) - 1):
        with pytest.warns(TraceWarning):
            trace = read_trace(write(tmp_path, data[:cut], "cut.gz"))
        assert trace.rows == tuple(many[: len(trace.rows)])
        assert trace.rows
    with pytest.warns(TraceWarning), pytest.raises(TraceError, match="no whole line"):
        read_trace(write(tmp_path, data[:12], "cut.gz"))


@FILES
@given(data=st.data(), compressed=st.booleans())
def test_byte_flips_never_escape_the_error_tree(
    tmp_path: Path, data: st.DataObject, compressed: bool
) -> None:
    path = tmp_path / ("t.jsonl.gz" if compressed else "t.jsonl")
    write_trace(path, HEADER, ROWS)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        try:
            trace = read_trace(path)
        except TraceError as error:
            assert str(path) in str(error)
        else:
            assert all(isinstance(row, TraceRow) for row in trace.rows)
