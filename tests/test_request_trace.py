"""Reading recorded traffic: the three formats, and files that break them."""

import gzip

import pytest

from controller.errors import SpecGovernorError
from env.request_trace import FORMATS, read_trace
from env.workloads import LOADS, SHIPPED, load_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-17 00:00:00.0000000,110,27
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2354]}
"""
# The columns of BurstGPT_1.csv and those of BurstGPT_3.csv.
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
50,GPT-4,300,0,300,API log
118,GPT-4,417,276,693,Conversation log
"""
BURST_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,\
Total tokens,Log Type
19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log
19440161.0,,2,ChatGPT,36,29,65,API log
"""


@pytest.fixture
def write(tmp_path):
    def to(name, text):
        path = tmp_path / name
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text, encoding="utf-8", newline="")
        return path

    return to


def rows(trace):
    columns = (trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_azure(write, ending, newline):
    trace = read_trace(write(f"azure.csv{ending}", AZURE.replace("\n", newline)), "azure")
    assert rows(trace)[:2] == [(0.0, 4808, 10), (pytest.approx(0.052, abs=1e-6), 3180, 8)]
    assert trace.arrival_s[2] == pytest.approx(5 * 3600 + 42 * 60 + 56.02004, abs=1e-6)
    assert trace.name == "azure.csv"


def test_mooncake_counts_milliseconds(write):
    trace = read_trace(write("mooncake.jsonl", MOONCAKE + "\n"), "mooncake")
    assert rows(trace) == [(0.0, 6955, 52), (pytest.approx(3.053), 6472, 26)]


def test_burstgpt_leaves_failed_requests_out(write):
    trace = read_trace(write("burst.csv", BURST), "burstgpt")
    assert rows(trace) == [(0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 276)]
    assert trace.num_failed == 1
    assert trace.mean_rate == pytest.approx(2 / 113)


def test_burstgpt_with_sessions(write):
    trace = read_trace(write("burst3.csv", BURST_3), "burstgpt")
    assert rows(trace) == [(0.0, 906, 446), (51.0, 36, 29)]


def test_a_burstgpt_file_becomes_a_load(write):
    load = LOADS.make("burstgpt", path=str(write("burst.csv", BURST)), rate=1.0)
    assert load.num_requests == 3
    assert load.mean_rate == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "requests", "span_s", "longest"),
    [
        ("azure-2023-code", 8819, 3435.948, (7437, 1899)),
        ("azure-2023-conv", 10108, 1799.899, (14050, 1000)),
        ("mooncake", 918, 297.0, (121924, 2000)),
    ],
)
def test_shipped_traces(name, requests, span_s, longest):
    trace = load_trace(name)
    assert len(trace) == requests
    assert trace.arrival_s[-1] == pytest.approx(span_s, abs=1e-3)
    assert (trace.prompt_tokens.max(), trace.output_tokens.max()) == longest


def test_all_shipped_traces_are_tested_and_described():
    readme = next(path.parent for _, path in SHIPPED.values()) / "README.md"
    text = readme.read_text(encoding="utf-8")
    assert all(name in text and path.name in text for name, (_, path) in SHIPPED.items())


BROKEN = {
    "other columns": ("azure", MOONCAKE, "ContextTokens"),
    "a format mistaken for another": ("azure", BURST, "is this another format?"),
    "one that is no format": ("vidur", AZURE, "expected one of ['azure', 'mooncake', 'burstgpt']"),
    "nothing": ("azure", "", "TIMESTAMP, ContextTokens, GeneratedTokens"),
    "a header alone": ("azure", AZURE.splitlines()[0], "at least two requests, got 0"),
    "a cut line": ("azure", AZURE + "2023-11-17 00:0", "line 5: expected 3 fields, got 1"),
    "a time that is none": ("azure", AZURE + "noon,1,1\n", "line 5: expected a time"),
    "half a token": ("azure", AZURE + "2023-11-18 00:00:00,1.5,1\n", "'1.5'"),
    "a negative count": ("azure", AZURE + "2023-11-18 00:00:00,-1,1\n", "'-1'"),
    "an absurd count": ("azure", AZURE + "2023-11-18 00:00:00,99999999999,1\n", "99999999999"),
    "no output": ("azure", AZURE + "2023-11-18 00:00:00,5,0\n", "got 5 and 0; remove the line"),
    "no prompt": ("burstgpt", BURST + "200,GPT-4,0,4,4,API log\n", "got 0 and 4"),
    "time that runs back": ("azure", AZURE + "2023-11-16 00:00:00,5,5\n", "sort the file by time"),
    "endless time": ("burstgpt", BURST + "inf,GPT-4,1,4,5,API log\n", "'inf'"),
    "a line that is no JSON": ("mooncake", MOONCAKE + '{"timestamp": 3', "line 3: expected a JSON"),
    "JSON that is no object": ("mooncake", MOONCAKE + "[1]\n", "line 3"),
    "a key missing": ("mooncake", '{"timestamp": 0, "input_length": 4}\n', "output_length"),
    "text for a number": (
        "mooncake",
        '{"timestamp": 0, "input_length": true, "output_length": 3}\n',
        "line 1",
    ),
}


@pytest.mark.parametrize(("kind", "text", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_files_are_refused_in_one_line(write, kind, text, reason):
    path = write("broken.txt", text)
    with pytest.raises(SpecGovernorError) as caught:
        read_trace(path, kind)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    if kind in FORMATS:
        assert str(caught.value).startswith(str(path))


def test_files_that_cannot_be_read(tmp_path, write):
    hour = [f"2023-11-16 18:{i // 60:02}:{i % 60:02}" for i in range(3000)]
    lines = [f"{time},{i * i % 977 + 1},{i % 89 + 1}" for i, time in enumerate(hour)]
    cut = write("cut.csv.gz", "\n".join([AZURE.splitlines()[0], *lines]))
    cut.write_bytes(cut.read_bytes()[:-20])
    plain = write("plain.csv", AZURE)
    named_gz = plain.rename(tmp_path / "plain.csv.gz")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00\x01" * 9)
    for path in (tmp_path / "absent.csv", tmp_path, cut, named_gz, binary):
        with pytest.raises(
            SpecGovernorError, match=r"expected a readable azure trace, got .+; check"
        ):
            read_trace(path, "azure")
