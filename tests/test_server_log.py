"""Server logs: every era's lines, what a line's throughput means, and what must be refused."""

import gzip
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.errors import CalibrationError
from controller.trace import read_trace
from tests.synthetic_log import write_log
from training.log_rounds import MAX_POINTS_PER_BATCH, LogSource, read_log
from training.prefill import fit_prefill
from training.server_log import (
    ArgumentsLine,
    BrokenLine,
    DecodeLine,
    PrefillLine,
    SwitchLine,
    parse_log,
)
from training.textfile import TextFile

DATA = Path(__file__).parents[1] / "training/data"
LOGS = DATA / "logs"
NATIVE = LOGS / "h200_sglang0.5.17_fa3_native.log"
MIXED = LOGS / "h200_sglang0.5.17_eagle3_fa3_mixed_steps.log"
ERA_B = LOGS / "sglang_issue_11948_2025-10_eagle3.log"
STAMP = "[2026-11-29 14:06:58] "


def parse(*lines: str) -> list[object]:
    return list(parse_log(enumerate(lines, start=1)))


def decode(line: str) -> DecodeLine:
    (found,) = parse(line)
    assert isinstance(found, DecodeLine), found
    return found


# -- lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "decodes", "prefills", "schedulers"),
    [
        ("h200_sglang0.5.17_eagle3_fa3_mixed_steps", 29, 63, {""}),
        ("h200_sglang0.5.17_fa3_native", 18, 39, {""}),
        ("sgl-kernel-npu_pr_608_2026-07_npu_spec", 3, 1, {""}),
        ("sglang_issue_11948_2025-10_eagle3", 5, 1, {""}),
        ("sglang_issue_2777_2025-01_eagle2_cachehit", 0, 7, set()),
        ("sglang_issue_4759_2025-03", 1, 8, {""}),
        ("sglang_pr_13023_2025-11_nospec_graph_flip", 8, 0, {""}),
        ("sglang_pr_30393_2026-08_pd_decode_spec", 4, 0, {""}),
        ("sglang_pr_6081_2025-05_dp_attention", 5, 0, {"DP0", "DP6", "DP5", "DP7", "DP2"}),
        ("cpu_sglang0.5.23_eagle3_3-steps", 13, 20, {""}),
    ],
)
def test_every_shipped_log_is_read_whole(
    name: str, decodes: int, prefills: int, schedulers: set[str]
) -> None:
    path = LOGS / f"{name}.log"
    lines = list(parse_log(TextFile(path).lines()))
    text = path.read_text()
    assert text.count("Decode batch") == decodes and text.count("Prefill batch") == prefills
    found = [line for line in lines if isinstance(line, DecodeLine)]
    assert len(found) == decodes
    assert sum(isinstance(line, PrefillLine) for line in lines) == prefills
    assert not any(isinstance(line, BrokenLine) for line in lines)
    assert {line.scheduler for line in found} == schedulers


def test_fields_of_every_era() -> None:
    old = decode(
        "[2025-03-24 02:56:41 TP0] Decode batch. #running-req: 32, #token: 7352, token usage: "
        "0.01, accept len: 2.54, gen throughput (token/s): 39.33, largest-len: 0, #queue-req: 68, "
    )
    assert (old.batch_size, old.context_tokens, old.throughput) == (32, 7352, 39.33)
    assert (old.accept_len, old.accept_rate, old.graph) == (2.54, None, None)
    pool = decode(
        "[2026-08-14 14:02:47 DP1 PP0 TP3 EP1] Decode batch [8120], #running-req: 3, #full token: "
        "266624, full token usage: 0.43, #swa token: 12, swa token usage: 0.10, mamba num: 4, "
        "mamba usage: 0.20, accept len: 1.67, accept rate: 0.13, cap len: 3.00, pre-allocated "
        "usage: 0.22, #prealloc-req: 0, #transfer-req: 1, #retracted-req: 0, waiting-image-req: "
        "0, musa graph: False, gen throughput (token/s): 183.10, #queue-req: 0, est. decode "
        "TFLOPS/s (per GPU): 1.20, est. read BW (GB/s per GPU): 3.00, est. write BW (GB/s per "
        "GPU): 0.10, fwd occupancy: 93.20%, fwd+idle occupancy: 99.00%"
    )
    assert (pool.scheduler, pool.context_tokens, pool.graph) == ("DP1 PP0", 266624, False)
    assert (pool.accept_len, pool.accept_rate, pool.throughput) == (1.67, 0.13, 183.1)
    hisparse = decode(
        STAMP + "Decode batch, #running-req: 2, #gpu token: 90, gpu token usage: 0.10, #cpu token: "
        "7, cpu token usage: 0.00, cpu graph: True, gen throughput (token/s): 5.00, #queue-req: 0"
    )
    assert (hisparse.context_tokens, hisparse.graph, hisparse.accept_len) == (90, True, None)


LINE = (
    STAMP + "Decode batch, #running-req: 4, #token: 2396, token usage: 0.00, accept len: 2.50, "
    "accept rate: 0.50, cuda graph: True, gen throughput (token/s): 661.02, #queue-req: 0"
)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (LINE[:120], "gen throughput (token/s)"),
        (LINE[: LINE.index(", #queue")], "#queue-req"),
        (LINE.replace("661.02", "nan"), "gen throughput (token/s)"),
        (LINE.replace("661.02", "-661.02"), "gen throughput (token/s)"),
        (LINE.replace("req: 4", "req: -4"), "#running-req"),
        (LINE.replace("2396", "2e3"), "#token"),
        (LINE.replace("#token", "#t"), "#token"),
        (LINE.replace("len: 2.50", "len: 0.50"), "accept len"),
        (LINE.replace("11-29", "13-29"), "time stamp"),
        (LINE + LINE, "two lines in one"),
        (
            LINE[:130] + STAMP + 'INFO: client:1 - "GET / HTTP/1.1" 200 OK',
            "gen throughput (token/s)",
        ),
    ],
)
def test_cut_and_senseless_lines_are_broken(broken: str, reason: str) -> None:
    assert decode(LINE).throughput == 661.02
    assert parse(broken) == [BrokenLine(1, reason)]


def test_other_lines_are_skipped_and_ranks_of_one_scheduler_count_once() -> None:
    http = STAMP + 'INFO:     client:43514 - "POST /generate HTTP/1.1" 200 OK'
    first, second = (LINE.replace("58]", f"58 TP{rank}]") for rank in (0, 1))
    assert parse(http, "", "garbage, batch", first, second, first, http) == [
        decode(first).__class__(**{**vars(decode(first)), "number": number}) for number in (4, 6)
    ]
    assert parse(STAMP + "Switch adaptive runtime state: steps 3 -> 5, draft_tokens 4 -> 6") == [
        SwitchLine(1, 3, 5)
    ]


def test_arguments_of_both_spellings() -> None:
    (new,) = (
        line
        for line in parse_log(TextFile(LOGS / "cpu_sglang0.5.23_eagle3_3-steps.log").lines())
        if isinstance(line, ArgumentsLine)
    )
    assert new.values["speculative_num_steps"] == 3
    assert new.values["speculative_draft_model_path"] == "/models/tiny/draft"
    assert (
        new.values["decode_log_interval"] == 20 and new.values["attention_backend"] == "intel_amx"
    )
    (old,) = parse(
        STAMP + "server_args=ServerArgs(model_path='a, b=c/d', speculative_algorithm='EAGLE3', "
        "speculative_num_steps=5, speculative_eagle_topk=1, tp_size=8, draft_tp_size=3, "
        "disable_overlap_schedule=False)"
    )
    assert isinstance(old, ArgumentsLine)
    assert old.values == {
        "model_path": "a, b=c/d",
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 5,
        "speculative_eagle_topk": 1,
        "tp_size": 8,
        "disable_overlap_schedule": False,
    }


# -- round times -----------------------------------------------------------------------------------


def test_native_h200_log_agrees_with_its_trace() -> None:
    """Throughput by batch size within 10% of the traces', wherever the log identifies it."""
    log = read_log(NATIVE)
    assert log.tier == "native" and log.unusable == {"first after a prefill or a start": 12}
    rows = [
        row
        for path in sorted((DATA / "traces").glob("*_native*.jsonl.gz"))
        for row in read_trace(path).rows
        if row.phase == "decode" and row.step_s is not None
    ]
    print("\nbatch  context     log   trace  (tokens/s)")
    found = {}
    for point in log.points:
        assert point.context_tokens is not None and point.throughput is not None
        near = [
            row.step_s
            for row in rows
            if row.batch_size == point.batch_size
            and 0.8 < row.context_tokens / point.context_tokens < 1.25
        ]
        assert len(near) >= 20
        trace = point.batch_size / float(np.median(near))
        found[point.batch_size] = point.throughput / trace
        print(
            f"{point.batch_size:5} {point.context_tokens:8} {point.throughput:7.0f} {trace:7.0f}  "
            f"{found[point.batch_size] - 1:+.1%}"
        )
    assert set(found) == {1, 8, 16, 32, 96, 128}
    assert all(0.9 < ratio < 1.1 for ratio in found.values())


def test_prefill_cost_of_the_native_h200_log() -> None:
    """The traces give 3.37 ms + 23.4 us a token; a full batch of 16,384 tokens tells 23.6 us."""
    cost = fit_prefill(read_log(NATIVE).bursts).cost
    assert cost.base_s == 0.0 and cost.s_per_token == pytest.approx(23.6e-6, rel=0.05)


@pytest.mark.parametrize("era", ["A", "B", "C"])
@pytest.mark.parametrize("draft_tokens", [1, 2, 4, 8])
def test_round_times_of_a_log_with_known_rounds(
    tmp_path: Path, era: str, draft_tokens: int
) -> None:
    path = tmp_path / "k.log"
    truth = write_log(
        path, [(1, 0.005), (8, 0.006), (64, 0.012)], era=era, draft_tokens=draft_tokens
    )
    log = read_log(path, None if draft_tokens == 1 else draft_tokens - 1)
    assert log.tier == ("native" if draft_tokens == 1 else str(draft_tokens - 1))
    assert log.num_decode == 12 and log.unusable == {"first after a prefill or a start": 3}
    if draft_tokens > 2:
        assert log.era == era, "at one draft token both eras' rates can look alike"
    for batch, step_s in truth.items():
        points = [point for point in log.points if point.batch_size == batch]
        assert len(points) == 3
        for point in points:
            # The accept length is printed to 0.005.
            assert point.step_s == pytest.approx(step_s, rel=0.006)
    contexts = [point.context_tokens for point in log.points if point.batch_size == 8]
    assert contexts == sorted(contexts) and contexts[0] > 8 * 512  # type: ignore[operator]


def test_a_line_after_a_prefill_or_of_another_batch_size_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "n.log"
    write_log(path, [(4, 0.005), (8, 0.006)], draft_tokens=1, lines=3)
    lines = [line for line in path.read_text().splitlines() if "batch" in line]
    without = [line for line in lines if "Prefill" not in line]
    path.write_text("\n".join(without))
    log = read_log(path)
    assert log.unusable == {
        "first after a prefill or a start": 1,
        "where the batch size changed": 1,
    }
    assert len(log.points) == 4
    # A line that cannot be read may have been a prefill.
    path.write_text("\n".join([*without[:2], without[2][:90], without[2], *without[3:]]))
    log = read_log(path)
    assert log.num_broken == 1 and log.unusable["first after a prefill or a start"] == 2
    flipped = [line.replace("graph: True", "graph: False") for line in without[:1]]
    path.write_text("\n".join([*flipped, *without[1:]]))
    assert read_log(path).unusable["where graphs went on or off"] == 1
    stages = [line.replace("] ", f" PP{i % 2} TP0] ") for i, line in enumerate(without)]
    path.write_text("\n".join(stages))
    assert read_log(path).unusable == {"of interleaved pipeline stages": 6}


def test_schedulers_are_kept_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "0.log", tmp_path / "1.log"]
    texts = []
    for rank, path in enumerate(paths):
        write_log(path, [(4 + rank, 0.005 + 0.001 * rank)], draft_tokens=4, seed=rank)
        texts.append(
            [line.replace("] ", f" DP{rank} TP{rank}] ") for line in path.read_text().splitlines()]
        )
    both = tmp_path / "both.log"
    both.write_text("\n".join(itertools.chain(*zip(*texts, strict=True))))
    log = read_log(both, 3)
    assert len(log.points) == 6 and log.unusable == {"first after a prefill or a start": 2}
    for point in log.points:
        assert point.step_s == pytest.approx({4: 0.005, 5: 0.006}[point.batch_size], rel=0.006)


def test_requests_that_join_without_a_prefill_line_are_seen_in_the_pool() -> None:
    log = read_log(LOGS / "sglang_pr_30393_2026-08_pd_decode_spec.log", 5)
    assert (log.tier, log.era) == ("5", "C")
    assert log.unusable["where requests came or went"] == 2, "the pool grew by 26,304 and 38,784"
    (point,) = log.points
    assert point.step_s == pytest.approx(3 * 1.72 / 183.75)


# -- depth -----------------------------------------------------------------------------------------


def test_eras_of_the_public_logs() -> None:
    assert (read_log(ERA_B, 3).era, len(read_log(ERA_B, 3).points)) == ("B", 4)
    npu = read_log(LOGS / "sgl-kernel-npu_pr_608_2026-07_npu_spec.log", 3)
    assert (npu.era, npu.points) == ("C", ())
    assert read_log(LOGS / "sglang_issue_4759_2025-03.log", 3).era == "A"
    own = read_log(LOGS / "cpu_sglang0.5.23_eagle3_3-steps.log")
    assert (own.tier, own.era, own.arguments["tp_size"]) == ("3", "C", 1), "from its arguments"


def test_the_mixed_log_is_refused() -> None:
    with pytest.raises(CalibrationError, match=r"at best 6 of 29 lines.*depth changed"):
        read_log(MIXED)
    with pytest.raises(CalibrationError, match="depth changed"):
        read_log(MIXED, 3)


def test_adaptive_logs_are_refused(tmp_path: Path) -> None:
    adaptive = LOGS / "cpu_sglang0.5.23_eagle3_adaptive.log"
    with pytest.raises(CalibrationError, match="switches its draft steps"):
        read_log(adaptive)
    lines = [line for line in adaptive.read_text().splitlines() if "daptive run" not in line]
    path = tmp_path / "a.log"
    path.write_text("\n".join(lines))
    with pytest.raises(CalibrationError, match="speculative-adaptive"):
        read_log(path)
    path.write_text("\n".join(line for line in lines if "server_args" not in line))
    with pytest.raises(CalibrationError, match="depth changed"):
        read_log(path, 3)


@given(
    steps=st.integers(1, 7),
    era=st.sampled_from("BC"),
    correct=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_a_fixed_depth_is_never_refused(
    tmp_path_factory: pytest.TempPathFactory, steps: int, era: str, correct: list[float]
) -> None:
    path = tmp_path_factory.mktemp("log") / "k.log"
    lines = []
    for share in correct:
        length = 1 + share * steps
        rate = share if era == "C" else length / (steps + 1)
        lines.append(
            LINE.replace("len: 2.50", f"len: {length:.2f}").replace(
                "rate: 0.50", f"rate: {rate:.2f}"
            )
        )
    path.write_text("\n".join(lines))
    log = read_log(path, steps)
    assert log.tier == str(steps) and log.era in (era, None)


@pytest.mark.parametrize("depths", [(3, 5), (1, 3), (2, 7)])
def test_two_depths_in_one_log_are_refused(tmp_path: Path, depths: tuple[int, int]) -> None:
    texts = []
    for steps in depths:
        path = tmp_path / f"{steps}.log"
        write_log(path, [(4, 0.005), (8, 0.006)], draft_tokens=steps + 1)
        texts.append(path.read_text())
        assert read_log(path, steps).points
    path = tmp_path / "both.log"
    path.write_text("".join(texts))
    with pytest.raises(CalibrationError, match="depth changed"):
        read_log(path, depths[0])


def refused(path: Path, steps: int | None, text: str) -> None:
    with pytest.raises(CalibrationError, match=text) as caught:
        read_log(path, steps)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_depths_that_contradict_the_log(tmp_path: Path) -> None:
    refused(ERA_B, None, r"give --num-steps N \(the accept rates fit 3 ")
    refused(ERA_B, 4, "do not fit 4 draft steps")
    refused(ERA_B, 0, "expected no accept len without speculation")
    own = LOGS / "cpu_sglang0.5.23_eagle3_3-steps.log"
    refused(own, 2, "its server ran 3 draft steps")
    text = own.read_text()
    path = tmp_path / "x.log"
    path.write_text(text.replace("'speculative_eagle_topk': 1", "'speculative_eagle_topk': 4"))
    refused(path, None, "topk 4")
    path.write_text(text.replace("'speculative_num_steps': 3", "'speculative_num_steps': 9"))
    refused(path, None, "expected 1 to 7 draft steps, got 9")
    path.write_text(text + NATIVE.read_text())
    refused(path, None, "13 of 31 decode lines with an accept len")
    path.write_text(text + (LOGS / "cpu_sglang0.5.23_native.log").read_text())
    refused(path, None, "second start")
    native = (LOGS / "cpu_sglang0.5.23_native.log").read_text()
    path.write_text(native.replace("'speculative_algorithm': None", "'speculative_algorithm': 'X'"))
    refused(path, None, "expected an accept len")
    # Era A has no rate to check, but an accept length has a limit.
    path.write_text("\n".join([LINE.replace(", accept rate: 0.50", "")] * 2))
    assert read_log(path, 2).era == "A"
    refused(path, 1, "up to 2 at 1 draft steps, got 2.5")


FIXED = {n: LOGS / f"h200_sglang0.5.17_eagle3_fa3_depth-{n}.log" for n in (1, 3, 7)}


@pytest.mark.parametrize("depth", FIXED)
def test_the_arguments_of_0517_tell_the_depth(depth: int) -> None:
    """They hold ", batch_notify_size=16", which is no batch line."""
    assert ", batch_notify_size=16" in FIXED[depth].read_text().splitlines()[0]
    log = read_log(FIXED[depth])
    assert (log.tier, log.num_broken) == (str(depth), 0) and len(log.points) >= 20
    assert log.arguments["speculative_num_steps"] == depth
    assert log.arguments["attention_backend"] == "fa3"
    assert log.arguments["speculative_adaptive"] is False
    refused(FIXED[depth], 5, f"its server ran {depth} draft steps")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("eagle_topk=1", "eagle_topk=4", "topk 4"),
        ("speculative_adaptive=False", "speculative_adaptive=True", "speculative-adaptive"),
        ("num_steps=3", "num_steps=2", "do not fit 2 draft steps"),
        ("num_steps=3", "num_steps=9", "expected 1 to 7 draft steps, got 9"),
        ("speculative_num_steps=3", "speculative_num_steps=None", "expected a depth"),
    ],
)
def test_arguments_of_0517_that_contradict_the_log(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    path = tmp_path / "x.log"
    path.write_text(FIXED[3].read_text().replace(old, new))
    refused(path, None, expected)
    path.write_text(FIXED[3].read_text() + FIXED[3].read_text().replace(old, new))
    refused(path, None, "second start")


# -- files -----------------------------------------------------------------------------------------


def test_no_decode_line_is_refused() -> None:
    refused(LOGS / "sglang_issue_2777_2025-01_eagle2_cachehit.log", 3, "got none in the log")


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_cutting_and_mixing_lines_never_makes_up_a_round(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Processes write into each other's lines; what is left must be what was logged."""
    truth = {(p.batch_size, p.context_tokens, p.step_s) for p in read_log(NATIVE).points}
    lines = NATIVE.read_text().splitlines()
    for _ in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.integers(0, len(lines) - 1))
        here = data.draw(st.integers(0, len(lines[at])))
        match data.draw(st.sampled_from(["cut", "glue", "insert"])):
            case "cut":
                lines[at] = lines[at][:here]
            case "glue":
                lines[at] += lines[at - 1]
            case "insert":
                lines[at] = lines[at][:here] + STAMP + "INFO: GET /" + lines[at][here:]
    path = tmp_path_factory.mktemp("log") / "n.log"
    path.write_text("\n".join(lines))
    try:
        log = read_log(path)
    except CalibrationError:
        return
    assert {(p.batch_size, p.context_tokens, p.step_s) for p in log.points} <= truth


def test_a_log_that_prints_everything_twice(tmp_path: Path) -> None:
    path = tmp_path / "n.log"
    path.write_text("".join(f"{line}\n{line}\n" for line in NATIVE.read_text().splitlines()))
    log = read_log(path)
    assert log.unusable == {"first after a prefill or a start": 12, "printed twice": 18}
    assert [p.step_s for p in log.points] == [p.step_s for p in read_log(NATIVE).points]


def test_stalls_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "n.log"
    write_log(path, [(4, 0.005)], draft_tokens=1, lines=12)
    lines = path.read_text().splitlines()
    slow = next(i for i, line in enumerate(lines) if "Decode" in line and i > 8)
    lines[slow] = re.sub(r"s\): [\d.]+", "s): 150.00", lines[slow])
    path.write_text("\n".join(lines))
    log = read_log(path)
    assert log.unusable == {"first after a prefill or a start": 1, "with a stall": 1}
    assert len(log.points) == 10 and all(p.step_s < 0.006 for p in log.points)


def test_capacity_of_the_kv_cache() -> None:
    log = read_log(LOGS / "cpu_sglang0.5.23_eagle3_3-steps.log")
    assert (log.kv_tokens, log.chunk_tokens) == (16384, 4096)
    assert read_log(NATIVE).kv_tokens is None


def test_a_cut_gzip_log_gives_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "n.log.gz"
    write_log(tmp_path / "n.log", [(4, 0.005), (8, 0.006)] * 40, draft_tokens=1)
    data = gzip.compress((tmp_path / "n.log").read_bytes())
    path.write_bytes(data)
    whole = read_log(path)
    assert not whole.truncated and whole.sha256 == read_log(tmp_path / "n.log").sha256
    path.write_bytes(data[: len(data) // 2])
    part = read_log(path)
    assert part.truncated and 10 < part.num_decode < whole.num_decode
    path.write_bytes(data[:200] + b"\0" * 50 + data[250:])
    refused(path, None, "damaged data")


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Of many lines at one batch size every n-th stays, in order and from the whole log."""
    path = tmp_path / "n.log"
    write_log(path, [(4, 0.005)], draft_tokens=1, lines=3000)
    log: LogSource = read_log(path)
    assert MAX_POINTS_PER_BATCH // 2 <= len(log.points) < MAX_POINTS_PER_BATCH
    numbers = [int(point.where.rsplit(":", 1)[1]) for point in log.points]
    assert len(set(np.diff(numbers))) == 1 and numbers[-1] > 5500


def test_lines_longer_than_any_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.textfile.MAX_LINE_BYTES", 1000)
    monkeypatch.setattr("training.textfile._CHUNK_BYTES", 300)
    path = tmp_path / "x"
    path.write_bytes(b"a\n" + b"b" * 5000 + b"\nc\r\n\xff\nlast")
    file = TextFile(path)
    found: Iterator[tuple[int, str]] = file.lines()
    texts = dict(found)
    assert (texts[1], texts[3], texts[4], texts[5]) == ("a", "c", "�", "last")
    assert set(texts[2]) == {"b"} and len(texts[2]) == 1000 and file.num_overlong == 1
