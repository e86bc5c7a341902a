"""Outputs of SGLang's benchmarks: records of the real code, and of versions that cannot run here.

The records in ``training/data/bench`` were written by SGLang 0.5.23. Fields of other versions:

- ``bench_serving``: 0.5.17 has the fields of 0.5.23 (``benchmark/serving.py``, ``result = {...}``
in
  ``benchmark``); older ones lack ``server_info``, ``accept_length`` or the latencies.
- ``bench_one_batch_server``: in commit 00b08c49 run_name, batch_size, input_len, output_len,
latency,
  output_throughput and overall_throughput; in 0.5.17 (``BenchOneCaseResult.dump_to_jsonl``) also
  ``last_ttft``, ``last_gen_throughput`` and ``acc_length`` (-1 without speculation); in 0.5.23 also
  ``total_output_tokens``, ``num_early_stopped`` and the steady-state figures.
- ``scripts/playground/bench_speculative.py``: batch_size, steps, topk, num_draft_tokens,
acc_length,
  step_time, speed and completion_tokens (commit 01d2a3d0).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from controller.errors import CalibrationError
from training.bench_outputs import bench_kind, read_bench
from training.log_rounds import read_log
from training.sources import source_kind

DATA = Path(__file__).parents[1] / "training/data"
SERVING = DATA / "bench/sglang0.5.23_cpu_serving_3-steps.jsonl"
SERVING_NATIVE = DATA / "bench/sglang0.5.23_cpu_serving_native.jsonl"
ONE_BATCH = DATA / "bench/sglang0.5.23_cpu_one_batch_server_3-steps.jsonl"
ONE_BATCH_NATIVE = DATA / "bench/sglang0.5.23_cpu_one_batch_server_native.jsonl"


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, *items: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def speculative(steps: int, batch: int, length: float, step_s: float, topk: int = 1) -> dict:
    return {
        "batch_size": batch,
        "steps": steps,
        "topk": topk if steps else 0,
        "num_draft_tokens": steps + 1 if steps else 0,
        "acc_length": length,
        "step_time": step_s,
        "speed": round(length / step_s, 3),
        "completion_tokens": 512.0,
    }


@pytest.mark.parametrize("path", [SERVING, SERVING_NATIVE, ONE_BATCH, ONE_BATCH_NATIVE])
def test_kind_shows_in_the_content(path: Path) -> None:
    kind = "bench_serving" if "serving" in path.name else "bench_one_batch_server"
    assert bench_kind(path.read_text().splitlines()[0]) == kind
    assert source_kind(path) == "benchmark"


def test_serving_records_of_a_real_server() -> None:
    """Round times by the benchmark, seen from outside, agree with the server's own record."""
    bench = read_bench(SERVING)
    assert bench.kind == "bench_serving" and not bench.left_out
    assert [(p.tier, p.concurrency, p.batch_size) for p in bench.points] == [
        ("3", 1, 1),
        ("3", 4, 3),
        ("3", 8, 7),
    ]
    state = records(SERVING)[0]["server_info"]["internal_states"][0]
    own = sorted(state["step_time_dict"]["1"])[:3]
    assert bench.points[0].step_s == pytest.approx(own[1], rel=0.05)
    assert bench.points[0].accept_len == state["avg_spec_accept_length"] == 3.55
    assert bench.points[2].context_tokens == 7 * (32 + 64)
    assert bench.arguments == {
        "model_path": "/models/tiny/target",
        "attention_backend": "intel_amx",
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "disable_overlap_schedule": True,
        "decode_log_interval": 20,
    }
    native = read_bench(SERVING_NATIVE)
    assert [point.tier for point in native.points] == ["native"] * 3
    logged = read_log(DATA / "logs/cpu_sglang0.5.23_native.log")
    step_s = sorted(point.step_s for point in logged.points if point.batch_size == 8)
    assert step_s[0] < native.points[2].step_s < step_s[-1], "the same server's log"


def test_one_batch_records_of_a_real_server() -> None:
    native = read_bench(ONE_BATCH_NATIVE)
    assert [(p.tier, p.batch_size, p.context_tokens) for p in native.points] == [
        ("native", 1, 96),
        ("native", 4, 384),
        ("native", 8, 768),
    ]
    first = records(ONE_BATCH_NATIVE)[0]
    decode_s = first["latency"] - first["last_ttft"]
    assert native.points[0].step_s == pytest.approx(decode_s / 127)
    with pytest.raises(CalibrationError, match="give --num-steps N"):
        read_bench(ONE_BATCH)
    drafted = read_bench(ONE_BATCH, 3)
    first = records(ONE_BATCH)[0]
    decode_s = first["latency"] - first["last_ttft"]
    assert drafted.points[0].step_s == pytest.approx(decode_s / (127 / first["acc_length"]))


def test_serving_of_before_server_info(tmp_path: Path) -> None:
    item = records(SERVING)[2]
    del item["server_info"]
    path = write(tmp_path / "a.jsonl", item)
    with pytest.raises(CalibrationError, match="give --num-steps N"):
        read_bench(path)
    assert read_bench(path, 3).points[0].step_s == read_bench(SERVING).points[2].step_s
    with pytest.raises(CalibrationError, match="expected 1 to 3 at 2 draft steps"):
        read_bench(path, 2)
    old = {name: value for name, value in item.items() if "e2e" not in name}
    (point,) = read_bench(write(path, old), 3).points
    assert point.batch_size == 7, "by throughput times TPOT"
    native = records(SERVING_NATIVE)[2]
    del native["server_info"], native["accept_length"]
    with pytest.raises(CalibrationError, match="--num-steps off"):
        read_bench(write(path, native))
    assert read_bench(path, 0).points[0].tier == "native"


def test_one_batch_of_before_time_to_first_token(tmp_path: Path) -> None:
    item = records(ONE_BATCH_NATIVE)[0]
    names = ("run_name", "batch_size", "input_len", "output_len", "latency", "output_throughput")
    path = write(tmp_path / "a.jsonl", {name: item[name] for name in names})
    with pytest.raises(CalibrationError, match="1 of a version that does not tell prefill"):
        read_bench(path, 0)
    early = {**item, "num_early_stopped": 1}
    bench = read_bench(write(path, early, item))
    assert len(bench.points) == 1 and bench.left_out == {"whose requests stopped early": 1}
    decode_s = item["latency"] - item["last_ttft"]
    short = {**item, "output_len": 1, "output_throughput": 1 / decode_s}
    assert read_bench(write(path, short, item)).left_out == {"with too few output tokens": 1}


def test_bench_speculative(tmp_path: Path) -> None:
    path = write(
        tmp_path / "s.jsonl",
        speculative(0, 8, 1.0, 0.005),
        speculative(3, 8, 2.4, 0.0063),
        speculative(3, 8, 2.9, 0.0083, topk=4),
        speculative(9, 8, 2.9, 0.0093),
    )
    bench = read_bench(path)
    assert [(p.tier, p.step_s, p.accept_len) for p in bench.points] == [
        ("native", 0.005, 1.0),
        ("3", 0.0063, 2.4),
    ]
    assert bench.left_out == {
        "of draft trees (topk above 1)": 1,
        "deeper than 7 draft steps": 1,
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"mean_tpot_ms": 0.0155}, "units|rounds of"),
        ({"duration": 2.1e6}, "mixed units"),
        ({"output_throughput": -1.0}, "above 0, got -1.0"),
        ({"output_throughput": float("nan")}, "above 0, got nan"),
        ({"completed": 1.5}, "an integer above 0"),
        ({"completed": 0}, "without a completed request"),
        ({"mean_tpot_ms": 0}, "without a time per output token"),
        ({"mean_e2e_latency_ms": 1e5}, "max_concurrency 8"),
        ({"accept_length": 4.5}, "expected 1 to 4 at 3 draft steps"),
        ({"accept_length": None}, "expected an accept length at 3"),
        ({"accept_length": "3"}, "accept_length: expected a number"),
        ({"server_info": {"speculative_adaptive": True}}, "speculative-adaptive"),
        ({"server_info": {"speculative_eagle_topk": 2}}, "1 of draft trees"),
        ({"server_info": {"speculative_num_steps": None}}, "give --num-steps N"),
    ],
)
def test_bad_serving_records(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    path = write(tmp_path / "a.jsonl", {**records(SERVING)[2], **change})
    with pytest.raises(CalibrationError, match=expected) as caught:
        read_bench(path)
    assert str(path) in str(caught.value)


def test_bad_one_batch_and_speculative_records(tmp_path: Path) -> None:
    item = records(ONE_BATCH_NATIVE)[2]
    path = tmp_path / "a.jsonl"
    milliseconds = {**item, "latency": item["latency"] * 1e3, "last_ttft": item["last_ttft"] * 1e3}
    with pytest.raises(CalibrationError, match="mixed units"):
        read_bench(write(path, milliseconds))
    with pytest.raises(CalibrationError, match="batch_size: expected a number above 0, got None"):
        read_bench(write(path, {**item, "batch_size": None}))
    with pytest.raises(CalibrationError, match="mixed units"):
        read_bench(write(path, {**speculative(3, 8, 2.4, 0.0063), "step_time": 6.3}))


def test_files_that_are_mixed_or_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, records(ONE_BATCH_NATIVE)[0], records(SERVING_NATIVE)[0])
    with pytest.raises(CalibrationError, match="split the file"):
        read_bench(path)
    other = records(SERVING_NATIVE)[1]
    other["server_info"]["attention_backend"] = "fa3"
    with pytest.raises(CalibrationError, match="another model, backend"):
        read_bench(write(path, records(SERVING_NATIVE)[0], other))
    text = SERVING_NATIVE.read_text()
    path.write_text(text[:-300])
    cut = read_bench(path)
    assert len(cut.points) == 2 and cut.left_out == {"cut at the end of the file": 1}
    first, second, _ = text.splitlines()
    path.write_text(f"{first}\n{second[:500]}\n{second}\n")
    with pytest.raises(CalibrationError, match=r"a\.jsonl:2: expected a JSON object"):
        read_bench(path)
