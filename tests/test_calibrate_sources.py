"""``python -m training.calibrate`` on any mix of sources: tables, logs, benchmarks, bad input."""

import gzip
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from controller.calibration import Calibration
from controller.errors import CalibrationError, ConfigError
from controller.trace import write_trace
from tests.synthetic_log import write_log
from tests.test_calibrate import HEADER, KIMI, ROOT, TRACES, run, synthetic
from training.calibrate import main
from training.fitting import calibrate
from training.plot import MAX_SIZES, _contexts, drawn_sizes, plot
from training.points import Point, check_units, fit_points, least_slope
from training.ppo import TrainConfig, train
from training.report import break_even, print_report
from training.sources import Sources, read_sources, source_kind
from training.tables import Table, TableOptions, read_table

DATA = ROOT / "training/data"
TABLES = DATA / "tables"
NATIVE_LOG = DATA / "logs/h200_sglang0.5.17_fa3_native.log"


def table(tmp_path: Path, text: str, **options: object) -> Table:
    path = tmp_path / "t.csv"
    path.write_text(text)
    return read_table(path, TableOptions(**options))  # type: ignore[arg-type]


def refused(tmp_path: Path, text: str, expected: str, **options: object) -> None:
    with pytest.raises(CalibrationError, match=expected) as caught:
        fit_points(table(tmp_path, text, **options).points)
    assert "t.csv" in str(caught.value) and "\n" not in str(caught.value)


# -- public tables ---------------------------------------------------------------------------------


def test_throughput_by_depth_and_concurrency() -> None:
    """SGLang PR 22246: every fixed depth at every batch size, no accept length, no native rows."""
    found = read_table(TABLES / "sglang_pr22246_qwen3-235b.csv")
    assert found.left_out == {"of a changing depth (column num_steps)": 7}
    assert {point.tier for point in found.points} == set("123456") and len(found.points) == 42
    cost = {item.tier: item for item in fit_points(found.points)}
    assert cost["1"].measured_batch_sizes == (1, 2, 4, 8, 16, 32, 48)
    assert cost["1"].base_s[0] == pytest.approx(1.7 / 162)
    assert found.hardware is None and found.depths == ()


def test_time_per_output_token_only() -> None:
    """SGLang PR 16961: TPOT by batch size, two backends in one table."""
    path = TABLES / "sglang_pr16961_deepseek-v3.2_tpot.csv"
    with pytest.raises(CalibrationError, match=r"num_steps: .* got 'nothing'"):
        read_table(path)
    with pytest.raises(CalibrationError, match=r"config is .*fa3.* with --where config=TEXT"):
        read_table(path, TableOptions(num_steps=3))
    found = read_table(path, TableOptions(num_steps=3, where=(("config", "FA3"),), accept_len=2.0))
    steps = {point.batch_size: point.step_s for point in found.points}
    assert steps == pytest.approx({1: 0.01888, 2: 0.02616, 8: 0.03174, 16: 0.043, 32: 0.06758})


def test_zero_steps_by_config_and_unknown_depth_as_told() -> None:
    path = TABLES / "vllm_recipes_pr923_qwen3.8-flash-next.csv"
    found = read_table(path, TableOptions(num_steps=2, accept_len=1.73))
    assert [(p.tier, p.batch_size) for p in found.points] == [
        ("native", 64),
        ("2", 48),
        ("native", 8),
        ("2", 8),
    ]
    assert found.points[3].step_s == pytest.approx(1.73 * 8 / 503)
    assert found.hardware == "4x H100 80GB TP4 + PLE CPU offload"


def test_context_axis_of_a_table() -> None:
    """vLLM PR 48944: 256 requests at contexts of 400 and 900 tokens give a cost of context."""
    found = read_table(
        TABLES / "vllm_pr48944_gemma4-31b_context.csv", TableOptions(speculative_max_running=256)
    )
    cost = {item.tier: item for item in fit_points(found.points)}
    slope = (256 / 1987.1 - 256 / 2711.7) / (256 * 500)
    assert cost["native"].context_s_per_token == pytest.approx(slope, rel=1e-3)
    assert cost["native"].max_context_tokens == 256 * 900
    assert [region.context_low for region in cost["native"].regions] == [102_400, 230_400]


def test_acceptance_by_position() -> None:
    path = TABLES / "spark_issue343_gemma4-26b.csv"
    with pytest.raises(CalibrationError, match="as in the other rows of tier 2"):
        calibrate(read_sources([path], TableOptions()), "x")
    options = TableOptions(where=(("concurrency", "1"),))
    found = calibrate(read_sources([path], options), "x").calibration
    assert found.acceptance is not None and found.acceptance.source == "table"
    assert found.acceptance.accept_rate_by_position == pytest.approx(
        (0.844, 0.7097, 0.6427, 0.7039), abs=1e-3
    )
    assert found.step_s("4", 1, 0) == pytest.approx(3.099 / 55.6)


def test_rows_without_concurrency_give_acceptance_only(capsys: pytest.CaptureFixture[str]) -> None:
    path = TABLES / "sglang_pr23336_glm-4.7-fp8_accept_len.csv"
    found = read_table(path)
    assert found.left_out == {
        "without a concurrency": 4,
        "of a changing depth (column num_steps)": 1,
    }
    assert {d.num_steps: d.accept_len for d in found.depths} == {1: 1.85, 3: 3.04, 7: 4.52}
    with pytest.raises(CalibrationError, match="expected round times, got none"):
        calibrate(read_sources([path], TableOptions()), "x")
    golden = TABLES / "inferencex_golden_accept_len.csv"
    with pytest.raises(CalibrationError, match="--where model=TEXT"):
        read_table(golden)
    kimi = read_table(golden, TableOptions(where=(("config", "kimik2.5_eagle3 thinking_on"),)))
    assert [d.accept_len for d in kimi.depths][:3] == [1.83, 2.43, 2.88]
    other = TABLES / "sglang_pr21599_accept_len.csv"
    with pytest.raises(CalibrationError, match="LOW-accept"):
        read_table(other, TableOptions(where=(("num_steps", "0"),)))


# -- columns and figures ---------------------------------------------------------------------------

TEXT = "num_steps,concurrency,throughput_tok_s\n"


def test_columns_by_other_names(tmp_path: Path) -> None:
    found = table(tmp_path, "Spec Steps,BS,Tok/s,Acc_Length\n3,4,800,2.5\n", columns=STEPS)
    (point,) = found.points
    assert (point.tier, point.batch_size, point.step_s) == ("3", 4, 2.5 * 4 / 800)
    both = "num_steps,bs,mean_tpot_ms,median_tpot_ms\noff,4,5,6\n"
    refused(tmp_path, both, "columns mean_tpot_ms and median_tpot_ms may both be tpot_ms")
    (point,) = table(tmp_path, both, columns={"tpot_ms": "median_tpot_ms"}).points
    assert point.step_s == 0.006
    refused(tmp_path, both, "expected one of the columns num_steps", columns={"tpot_ms": "x"})
    refused(tmp_path, "num_steps,bs,bs\noff,1,1\n", "'bs' is there twice")
    refused(tmp_path, "num_steps,concurrency\noff,1\n", "--column throughput_tok_s=NAME")
    refused(tmp_path, TEXT + "off,1,50\n", "--where hardware=x", where=(("hardware", "x"),))
    refused(tmp_path, TEXT + "off,1,50\n", "no row that --where", where=(("num_steps", "3"),))


STEPS = {"num_steps": "Spec Steps"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TEXT + "off,1,100\noff,8,7.4\n", "mixed units"),
        (TEXT + "off,1,100\noff,2,160\noff,4,0.5\n", "mixed units"),
        ("num_steps,concurrency,tpot_ms\noff,1,9\noff,2,0.0095\n", "units are right"),
        ("num_steps,concurrency,tpot_ms\noff,1,9\noff,2,9500\noff,4,12\n", "mixed units"),
        ("num_steps,concurrency,tpot_s\noff,1,9\n", None),
        ("num_steps,concurrency,tpot_s\noff,1,12\n", "units are right"),
        ("num_steps,concurrency,throughput_tok_s,tpot_ms\noff,8,800,0.0099\n", "ms against s"),
        ("num_steps,concurrency,throughput_tok_s,tpot_ms\noff,8,9.9,800\n", None),
        ("num_steps,concurrency,throughput_tok_s,tpot_s\noff,8,800,9.9\n", "ms against s"),
        (TEXT.replace("\n", ",accept_len\n") + "3,1,90,-2\n", "column accept_len"),
        (TEXT.replace("\n", ",accept_len\n") + "3,1,90,nan\n", "column accept_len"),
        (TEXT.replace("\n", ",tpot_ms\n") + "off,1,,-3\n", "column tpot_ms"),
        (
            TEXT.replace("\n", ",hardware\n") + "off,1,50,H200\noff,4,90,B200\n",
            "hardware is 'B200'",
        ),
        (TEXT.replace("\n", ",model\n") + "off,1,50,a\n3,1,90,b\n", "model is 'b' but 'a'"),
        (TEXT.replace("\n", ",config\n") + "3,1,50,fa3\n3,4,90,triton\n", "for tier 3; calib"),
        (TEXT.replace("\n", ",accept_by_position\n") + "2,1,50,0.5 0.6\n", "2 falling chances"),
        (TEXT.replace("\n", ",accept_by_position\n") + "2,1,50,0.5\n", "2 falling chances"),
        (TEXT.replace("\n", ",context_tokens\n") + "off,1,50,-1\n", "column context_tokens"),
        (TEXT + "0,1,50\n", "--zero-steps"),
        (TEXT + "off,1,50\noff,64,4,772\n", "t.csv:3: expected 3 fields .* got 4"),
        (TEXT + "off,1,50,\n", "t.csv:2: expected 3 fields"),
        (TEXT + 'off,1,50\noff,64,"4,772"\n', "t.csv:3: column throughput_tok_s"),
        (TEXT + "off,1,50\noff,999999999999,9e11\n", "t.csv:3: expected at most 1000000 requests"),
        (TEXT + "off,1,50\n3,3000000,9000\n", "t.csv:3: expected at most 1000000 requests"),
    ],
)
def test_figures_that_make_no_sense(tmp_path: Path, text: str, expected: str | None) -> None:
    if expected:
        refused(tmp_path, text, expected)
    else:
        assert fit_points(table(tmp_path, text).points)


def test_zero_steps(tmp_path: Path) -> None:
    assert table(tmp_path, TEXT + "0,1,50\n", zero_steps="cold").points[0].tier == "cold"
    text = TEXT.replace("\n", ",config\n") + "0,1,50,No speculation\n"
    assert table(tmp_path, text).points[0].tier == "native"
    assert table(tmp_path, text, zero_steps="warm").points[0].tier == "warm"


def test_per_request_throughput(tmp_path: Path) -> None:
    (point,) = table(tmp_path, "num_steps,concurrency,per_request_tok_s\noff,8,20\n").points
    assert point.step_s == 0.05


def point(batch: int, step_s: float, context: int | None = None, tier: str = "native") -> Point:
    return Point("f:1", "table", tier, batch, batch, context, step_s, 1.0, False, None)


def test_unit_check_allows_what_contexts_explain() -> None:
    check_units([point(1, 0.005, 100), point(2, 0.05, 2_000_000)])
    check_units([point(1, 0.005), point(256, 1.2)])
    with pytest.raises(CalibrationError, match="mixed units"):
        check_units([point(1, 0.005), point(2, 0.09)])


def test_least_cost_of_context() -> None:
    """8 requests of long contexts took longer than 16 of short ones: the context must cost that."""
    batch, context = np.array([1, 8, 16]), np.array([600.0, 49_848.0, 9584.0])
    step = np.array([0.0048, 0.00635, 0.0052])
    slope = least_slope(batch, context, step)
    assert slope == pytest.approx((0.00635 - 0.0052) / (49_848 - 9584))
    assert least_slope(batch, context / context * 500, step) == 0.0
    (cost,) = fit_points(
        [point(b, s, int(c)) for b, c, s in zip(batch, context, step, strict=True)]
    )
    assert cost.context_s_per_token == slope
    for b, c, s in zip(batch, context, step, strict=True):
        assert cost.base_at(int(b)) + slope * c == pytest.approx(s, rel=1e-3)


def test_the_native_log_alone_gives_the_costs_of_its_traces() -> None:
    """Cost of context and round times within 3% of the shipped calibration, from 6 lines."""
    found = calibrate(read_sources([NATIVE_LOG], TableOptions()), "log")
    traces = Calibration.load(ROOT / "checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")
    ours, theirs = found.calibration.cost("native"), traces.cost("native")
    assert ours.context_s_per_token == pytest.approx(theirs.context_s_per_token, rel=0.03)
    for batch in (1, 8, 16, 32, 96, 128):
        for each in (512, 1024):
            assert found.calibration.step_s("native", batch, batch * each) == pytest.approx(
                traces.step_s("native", batch, batch * each), rel=0.03
            )
    assert found.calibration.prefill_native.s_per_token == pytest.approx(23.6e-6, rel=0.05)
    assert any("least that explains it" in remark for remark in found.remarks)


# -- trust -----------------------------------------------------------------------------------------


def test_trust_by_cell(tmp_path: Path) -> None:
    rows = synthetic()
    trace = tmp_path / "a.jsonl"
    write_trace(trace, HEADER, rows)
    found = calibrate(read_sources([trace], TableOptions()), "t").calibration
    assert len(found.cost("3").regions) == 8, "4 batch sizes at 2 context levels"
    trust = found.trust
    assert trust("3", 4, 4 * 600) == trust("3", 3, 4 * 600) == "measured"
    assert trust("3", 4, 10_000) == "interpolated", "between the two levels"
    assert trust("3", 2, 1200) == "interpolated", "between batch sizes"
    assert trust("3", 4, 100) == "interpolated", "below the shortest context"
    assert trust("3", 17, 9000) == trust("3", 4, 10**6) == "extrapolated"
    assert "batch size 17" in str(found.extrapolation("3", 17, 9000))
    assert "1000000 context tokens" in str(found.extrapolation("3", 4, 10**6))
    assert found.extrapolation("3", 4, 10_000) is None
    found.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == found


def test_trust_of_a_table_goes_by_batch_size() -> None:
    found = calibrate(read_sources([KIMI], TableOptions()), "k").calibration
    assert found.trust("native", 30, 0) == found.trust("native", 30, 10**6) == "measured"
    assert found.trust("native", 31, 0) == "interpolated"
    assert found.trust("native", 251, 0) == "extrapolated"
    assert found.extrapolation("native", 100, 10**6) is None
    shipped = Calibration.load(ROOT / "checkpoints/calibrations/kimi-k2.5-8gpu-table.json")
    assert shipped.trust("native", 30, 10**6) == "measured", "a file without regions"
    assert shipped.trust("3", 49, 0) == "extrapolated"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"batch_size": 0}, "at least 1"),
        ({"context_low": 5, "context_high": 1}, "ascending context"),
        ({"context_low": None}, "both ends"),
        ({"count": 1.5}, "expected integers"),
        ({"extra": 1}, "unknown keys"),
    ],
)
def test_bad_regions_are_refused(change: dict[str, object], expected: str) -> None:
    found = calibrate(read_sources([NATIVE_LOG], TableOptions()), "k").calibration
    value = found.to_json()
    value["costs"][0]["regions"][0].update(change)
    with pytest.raises(CalibrationError, match=expected):
        Calibration.from_json(value)


# -- mixes -----------------------------------------------------------------------------------------


def test_kinds_show_in_the_content(tmp_path: Path) -> None:
    kinds = {path.parent.name: source_kind(path) for path in sorted(DATA.glob("*/*.*"))}
    assert kinds == {"bench": "benchmark", "logs": "log", "tables": "table", "traces": "trace"}
    zipped = tmp_path / "anything"
    zipped.write_bytes(gzip.compress(NATIVE_LOG.read_bytes()))
    assert source_kind(zipped) == "log"
    zipped.write_bytes(gzip.compress(KIMI.read_bytes()))
    assert source_kind(zipped) == "table"
    assert read_table(zipped).points == tuple(
        Point(**{**vars(point), "where": point.where.replace(str(KIMI), str(zipped))})
        for point in read_table(KIMI).points
    )


def test_fixed_depth_logs_and_all_else_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logs at depths 1 and 3 without arguments, a native one, a table and a trace of one tier."""
    sources = []
    for steps, scale in ((0, 1.0), (1, 1.2), (3, 1.5)):
        path = tmp_path / f"k{steps}.log"
        runs = [(1, 0.005 * scale), (8, 0.006 * scale), (64, 0.012 * scale)]
        write_log(path, runs, draft_tokens=steps + 1, lines=6)
        sources.append(path)
    rows = [row for row in synthetic() if row.num_steps in (None, 0)]
    trace, csv = tmp_path / "warm.jsonl.gz", tmp_path / "t.csv"
    write_trace(trace, HEADER, rows)
    csv.write_text("num_steps,concurrency,throughput_tok_s,accept_len\n3,8,9,2\n5,8,1000,3\n")
    output, png = tmp_path / "out.json", tmp_path / "out.png"
    assert (
        main(
            [
                *map(str, [*sources, trace, csv, "-o", output, "--plot", png]),
                *("--num-steps", "k1.log=1", "--num-steps", "3"),
            ]
        )
        == 0
    )
    shown = capsys.readouterr()
    assert shown.out.count("15 of 18 decode lines give a round time") == 3
    assert "tier 3, era C (bonus token not counted)" in shown.out
    assert "decode lines left out: 3 first after a prefill or a start" in shown.err
    found = Calibration.load(output)
    assert found.tier_names == ("native", "warm", "1", "3", "5")
    assert found.step_s("native", 8, 8 * 600) == pytest.approx(0.006, rel=0.02)
    assert found.step_s("3", 8, 8 * 600) == pytest.approx(0.009, rel=0.02), "log, not table"
    assert found.step_s("5", 8, 0) == pytest.approx(0.024), "only the table has it"
    assert found.acceptance is not None and found.acceptance.source == "log+table"
    assert [depth.num_steps for depth in found.acceptance.depths] == [1, 3, 5]
    assert found.acceptance.depths[1].accept_len == pytest.approx(1 + 3 * 0.6, rel=0.02)
    assert [item["name"] for item in found.source["files"]] == [
        "warm.jsonl.gz",
        "t.csv",
        "k0.log",
        "k1.log",
        "k3.log",
    ]
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000


def test_benchmarks_and_logs_of_one_server() -> None:
    paths = [
        DATA / "logs/cpu_sglang0.5.23_native.log",
        DATA / "bench/sglang0.5.23_cpu_serving_3-steps.jsonl",
        DATA / "bench/sglang0.5.23_cpu_serving_native.jsonl",
    ]
    found = calibrate(read_sources(paths, TableOptions()), "cpu")
    assert found.calibration.tier_names == ("native", "3")
    kinds = {point.tier: point.kind for point in found.points if point.tier == "3"}
    assert kinds == {"3": "benchmark"}
    assert found.calibration.source["model_path"] == "/models/tiny/target"
    assert found.calibration.acceptance is not None
    assert found.calibration.acceptance.source == "benchmark"


def test_other_systems_are_refused(tmp_path: Path) -> None:
    own = DATA / "logs/cpu_sglang0.5.23_native.log"
    with pytest.raises(CalibrationError, match=r"attention_backend is 'intel_amx' but .*'fa3'"):
        read_sources([TRACES[0], own], TableOptions())
    other = tmp_path / "other.log"
    other.write_text(own.read_text().replace("/models/tiny/target", "/models/big"))
    with pytest.raises(CalibrationError, match="model_path is '/models/big'"):
        read_sources([own, other], TableOptions())
    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    first.write_text(TEXT.replace("\n", ",hardware\n") + "off,1,50,H200\n")
    second.write_text(TEXT.replace("\n", ",hardware\n") + "3,1,90,B200\n")
    with pytest.raises(CalibrationError, match="hardware is 'B200' but"):
        read_sources([first, second], TableOptions())


def test_the_same_content_twice_is_noticed(tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(gzip.decompress(TRACES[0].read_bytes()))
    with pytest.raises(
        CalibrationError, match=r"given twice, it holds the same as .*native\.jsonl"
    ):
        read_sources([TRACES[0], plain], TableOptions())
    log = tmp_path / "n.log.gz"
    log.write_bytes(gzip.compress(NATIVE_LOG.read_bytes(), 1))
    with pytest.raises(CalibrationError, match="given twice"):
        read_sources([NATIVE_LOG, log], TableOptions())


# -- the command -----------------------------------------------------------------------------------


def test_the_shipped_calibrations_byte_for_byte(tmp_path: Path) -> None:
    for name, sources, flags in (
        ("kimi-k2.5-8gpu-table", [KIMI], ("--num-steps", "3", "--accept-len", "2.88")),
        (
            "h200-llama3-8b-eagle3-fa3",
            TRACES,
            ("--kv-capacity-tokens", "695000", "--chunk-tokens", "16384"),
        ),
    ):
        shipped = ROOT / f"checkpoints/calibrations/{name}.json"
        notes = Calibration.load(shipped).source["notes"]
        output = tmp_path / shipped.name
        args = [*map(str, sources), "-o", str(output), *flags, "--notes", notes, "--costs-only"]
        assert main(args) == 0
        assert output.read_bytes() == shipped.read_bytes()


def test_a_cut_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(TRACES[0].read_bytes()[:-500])
    assert main([str(cut), "-o", str(tmp_path / "o.json")]) == 0
    cut_off, untrainable = capsys.readouterr().err.splitlines()
    assert cut_off.startswith("warning: ") and "which is left out" in cut_off
    assert untrainable.endswith("off,1,2,3,5,7: add a source at draft steps 1, 2, 3, 5, 7")


def test_bad_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "o.json"
    empty, junk, broken = tmp_path / "empty", tmp_path / "junk", tmp_path / "broken.gz"
    empty.touch()
    junk.write_bytes(bytes(range(1, 256)) * 50)
    broken.write_bytes(b"\x1f\x8b" + b"nonsense" * 20)
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "cut.gz").write_bytes(TRACES[0].read_bytes()[:30])
    (tmp_path / "magic.gz").write_bytes(b"\x1f\x8b")
    for path, expected in (
        (tmp_path, "cannot be read"),
        (tmp_path / "absent", "cannot be read"),
        (empty, "empty file"),
        (tmp_path / "empty.gz", "empty file"),
        (tmp_path / "cut.gz", "truncated"),
        (tmp_path / "magic.gz", "truncated"),
        (junk, "no step trace, server log, benchmark output or table: expected a CSV"),
        (broken, "damaged data"),
        (DATA / "logs/sglang_pr_13023_2025-11_nospec_graph_flip.log", "where the batch size"),
        (DATA / "logs/h200_sglang0.5.17_eagle3_fa3_mixed_steps.log", "depth changed"),
    ):
        shutil.rmtree(output, ignore_errors=True)
        assert main([str(path), "-o", str(output)]) == 2
        *_, last = capsys.readouterr().err.splitlines()
        assert (last.startswith("error: ") and str(path) in last) or "batch size" in last
        assert expected in last
    assert not output.exists()


def exits(args: Sequence[object], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "o.json"
    base = [NATIVE_LOG, "-o", output]
    assert "got 'a=9'" in exits([*base, "--num-steps", "a=9"], capsys)
    assert "got '0'" in exits([*base, "--num-steps", "0"], capsys)
    assert "NAME=VALUE" in exits([*base, "--where", "x"], capsys)
    error = run(capsys, *base, "--num-steps", "k3.log=3")
    assert f"expected the name of a source ({NATIVE_LOG.name})" in error
    told = ("--num-steps", f"{NATIVE_LOG.name}=3")
    assert "have no accept len" in run(capsys, *base, *told)
    unknown = run(capsys, *base, "--column", "foo=bar")
    assert "--column foo=bar" in unknown
    assert "num_steps, concurrency, throughput_tok_s" in unknown
    assert "kimik2.5_eagle3/thinking_on" in run(capsys, *base, "--acceptance", "kimi")
    assert "ends in .png" in run(capsys, *base, "--plot", tmp_path / "a.pdf")
    assert "folder does not exist" in run(capsys, *base, "--plot", tmp_path / "no/a.png")
    assert not output.exists()
    out = run(capsys, *base, "--acceptance", "kimik2.5_eagle3/thinking_on", code=0)
    assert "preset kimik2.5_eagle3/thinking_on" in out
    found = Calibration.load(output)
    assert found.acceptance is not None and len(found.acceptance.depths) == 7


FIXED = sorted((DATA / "logs").glob("h200_sglang0.5.17_eagle3_fa3_depth-*.log"))


def test_logs_of_fixed_depths_without_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say their depths; the report fits a terminal; what training needs is said."""
    monkeypatch.setenv("COLUMNS", "80")
    output = tmp_path / "fixed.json"
    args = [*map(str, FIXED), "-o", str(output), "--simulated-acceptance"]
    assert main(args) == 0
    shown = capsys.readouterr()
    assert Calibration.load(output).tier_names == ("1", "3", "7")
    assert "accept rate by position: simulated: not used" in " ".join(shown.out.split())
    assert "Prefill, native: not measured, the speculative cost is used" in shown.out
    *_, last = shown.err.splitlines()
    assert last == (
        "warning: calibration 'fixed' cannot be trained on with the default tiers "
        "off,1,2,3,5,7: add a log or trace of the server without speculation (for off) and a "
        "source at draft steps 2, 5, or train with --tiers 1,3,7"
    )
    with pytest.raises(ConfigError, match=r"^--tiers off,1,2,3,5,7 on .*such as 1,3,7$"):
        train(TrainConfig(calibration=output, output=tmp_path / "policy"))


def test_a_report_of_80_columns_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    trace = DATA / "traces/h200_llama3-8b-shape_eagle3_fa3_speculative.jsonl.gz"
    fitted = calibrate(read_sources([trace, *FIXED], TableOptions()), "x")
    print_report(fitted, Console(width=80))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    (row,) = (line for line in out.splitlines() if line.split()[:2] == ["warm", "459"])
    assert row.split()[2:5] == ["1-256", "(9)", "136-418688"] and row.rstrip().endswith("13.0%")


def test_what_a_plot_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured times as they are, whole batch sizes, and cold in place of a missing native."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    shape = "h200_llama3-8b-shape_eagle3_fa3"
    names = ("speculative", "zero-step-skips-draft-extend")
    traces = [DATA / f"traces/{shape}_{name}.jsonl.gz" for name in names]
    for paths, last in (
        (traces, "accept length to break even with cold"),
        (traces[:1], ""),
    ):
        fitted = calibrate(read_sources(paths, TableOptions()), "x")
        plot(fitted, tmp_path / "x.png")
        axes = dict(zip([*fitted.calibration.tier_names, "break"], figures[-1].axes, strict=False))
        for tier, samples in fitted.samples.items():
            x, y = axes[tier].lines[0].get_data()
            assert len(y) == len(samples) and np.allclose(y, 1e3 * samples.step_s)
            assert np.all(np.asarray(y) > 0.0) and x.tolist() == samples.batch_size.tolist()
        labels = [label.get_text() for label in axes["1"].get_xticklabels()]
        assert {"1", "16", "256"} <= set(labels) and not any("." in label for label in labels)
        assert axes["break"].get_title() == last
        (text,) = axes["break"].texts or [None]
        if last:
            assert text is None and len(axes["break"].lines) == 6, "five depths and 1.0"
        else:
            assert text.get_transform() == axes["break"].transAxes, "not at a batch size"
            assert not axes["break"].axison


def test_fitted_curves_pass_the_context_of_each_batch_size() -> None:
    batch = np.array([1, 1, 1, 4, 4])
    context = np.array([10.0, 20.0, 60.0, 400.0, 800.0])
    found = _contexts(batch, context, np.array([1, 2, 4, 8]))
    assert found[1].tolist() == pytest.approx([20.0, 2 * (20 + 130 / 3), 600.0, 1200.0])
    assert found[0, [0, 2]].tolist() == [10.0, 400.0] and found[2, [0, 2]].tolist() == [60.0, 800.0]


def test_more_requests_than_any_server_holds_are_refused() -> None:
    assert point(1_000_000, 1.0).batch_size == 1_000_000
    with pytest.raises(CalibrationError, match="at most 1000000 requests at once"):
        point(1_000_001, 1.0)


def test_curves_are_drawn_at_few_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert drawn_sizes(3, 9).tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert len(drawn_sizes(1, MAX_SIZES)) == MAX_SIZES
    sizes = drawn_sizes(7, 10**12)
    assert 300 < len(sizes) <= MAX_SIZES
    assert (sizes[0], sizes[-1]) == (7, 10**12)
    assert np.all(np.diff(sizes) > 0)
    calls = []

    def counted(*args: object) -> float | None:
        calls.append(args)
        return break_even(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("training.plot.break_even", counted)
    (tmp_path / "t.csv").write_text(TEXT + "off,1,50\noff,1000000,900000\n3,1,90\n3,1000000,1e6\n")
    base = [tmp_path / "t.csv", "--speculative-max-running-requests", 10**6]
    run(capsys, *base, "-o", tmp_path / "o.json", "--plot", tmp_path / "o.png", code=0)
    assert 300 < len(calls) <= MAX_SIZES


def test_a_plot_destroys_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in.png", tmp_path / "x.png"
    shutil.copy(KIMI, source)
    base = [source, "--num-steps", 3, "-o", output]
    hard, soft = tmp_path / "hard.png", tmp_path / "soft.png"
    hard.hardlink_to(source)
    soft.symlink_to(output)
    for path in (output, tmp_path / "." / "x.png", soft, source, hard):
        assert "which it would replace" in run(capsys, *base, "--plot", path)
    (tmp_path / "d.png").mkdir()
    assert "got a folder" in run(capsys, *base, "--plot", tmp_path / "d.png")
    other = tmp_path / "other.png"
    other.write_text("kept")
    assert "is something else" in run(capsys, *base, "--plot", other)
    assert other.read_text() == "kept"
    assert source.read_bytes() == KIMI.read_bytes()
    assert not output.exists()


def test_no_source_gives_no_calibration() -> None:
    with pytest.raises(CalibrationError, match="expected round times, got none"):
        calibrate(Sources(), "x")
