"""The protocol: its parts share nothing, its loads are even, and a run of it is whole."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from env.arrivals import Replay
from env.scale import capacity_rps
from env.workload import ClosedLoop
from tests.test_compare import SHIPPED
from training import full, protocol
from training.compare import FIRST_TEST_SEED, TUNING_SEEDS, main
from training.full import run_protocol
from training.ppo import EVALUATION_SEEDS
from training.protocol import (
    BANDS,
    HELD_OUT,
    MAX_RUNNING,
    OPEN_RATES,
    OPEN_TEST,
    OPEN_TUNING,
    SIZES,
    SURFACES,
    TEST_SCENARIOS,
    TEST_SEED,
    TRAINED_ON,
    TUNING_SCENARIOS,
    TUNING_SEED,
    cell_seeds,
    deployment_of,
    load_system,
    shift_cells,
    tuning_cells,
)
from training.suite import native_of, off_step_s
from training.suite_report import html_report, markdown
from training.targets import judge

FULL = SIZES["full"]
H200 = deployment_of(load_system(TRAINED_ON))


def every_test_cell(name):
    return protocol.test_cells(deployment_of(load_system(name)), FULL)


def test_the_parts_share_no_seed():
    cells = [len(every_test_cell(TRAINED_ON)), len(tuning_cells(H200, FULL))]
    test = set(np.ravel(cell_seeds(TEST_SEED, cells[0], FULL.seeds)).tolist())
    assert len(test) == cells[0] * FULL.seeds, "each cell has seeds of its own"
    test |= {seed + i for seed in (full.SHIFT_SEED, full.MAP_SEED) for i in range(FULL.shift_seeds)}
    tuning = {*np.ravel(cell_seeds(TUNING_SEED, cells[1], 1)).tolist(), *TUNING_SEEDS}
    assert not test & tuning
    assert not (test | tuning) & set(EVALUATION_SEEDS)
    assert min(test | tuning) >= FIRST_TEST_SEED, "training seeds count up from zero"


def test_the_parts_share_no_scenario_and_no_trace():
    assert not set(TUNING_SCENARIOS) & set(TEST_SCENARIOS)
    for first, second in zip(TUNING_SCENARIOS, TEST_SCENARIOS, strict=True):
        assert first.make(0.01) != second.make(0.01)
    recorded = [{lengths for _, lengths, _ in part} for part in (OPEN_TUNING, OPEN_TEST)]
    assert recorded[0] & recorded[1] == {"default"}
    assert all(len(part) == 2 for part in recorded)


def test_whole_systems_are_left_out():
    assert TRAINED_ON not in HELD_OUT
    assert set(FULL.calibrations) == {TRAINED_ON, *HELD_OUT, *SURFACES}
    hashes = {load_system(name).sha256 for name in FULL.calibrations}
    assert len(hashes) == len(FULL.calibrations)
    for name in HELD_OUT:
        largest = MAX_RUNNING.get(name, 256)
        sizes = load_system(name).cost("native").measured_batch_sizes
        assert sizes[-1] >= 0.9 * largest, "no batch far beyond what was measured"


def test_drawn_surfaces_are_the_same_every_time_and_unlike_the_h200():
    for name in SURFACES:
        assert load_system(name).sha256 == load_system(name).sha256
        assert load_system(name).tier_names == load_system(TRAINED_ON).tier_names
        ratio = load_system(name).step_s("3", 64, 0) / load_system(TRAINED_ON).step_s("3", 64, 0)
        assert abs(ratio - 1.0) > 0.05


@pytest.mark.parametrize("name", [TRAINED_ON, HELD_OUT[1]])
def test_loads_are_even_over_the_bands(name):
    cells = every_test_cell(name)
    limit = cells[0].deployment.max_running_requests
    counts = {}
    for cell in cells:
        band = cell.name.partition(":")[0]
        counts[band] = counts.get(band, 0) + 1
    closed = {counts[band] for band in BANDS}
    assert closed == {2 * len(TEST_SCENARIOS)}
    assert {counts[f"open {share:g}"] for share in OPEN_RATES} == {len(OPEN_TEST)}
    clients = sorted({c.workload.load.concurrency for c in cells if c.workload.is_closed})
    assert clients == sorted(
        {1, max(limit // 256, 1), limit // 32, limit // 8, 3 * limit // 8, limit, 3 * limit // 2}
    )


def test_open_loads_run_at_shares_of_the_native_servers_capacity():
    for cell in every_test_cell(TRAINED_ON):
        load, workload = cell.workload.load, cell.workload
        if isinstance(load, ClosedLoop):
            continue
        native = native_of(cell.deployment)
        assert [tier.name for tier in native.resolved_tiers()] == ["native"]
        capacity = capacity_rps(native, workload.prompts, workload.outputs)
        share = float(re.match(r"open ([\d.]+):", cell.name).group(1))
        assert load.mean_rate == pytest.approx(share * capacity, rel=1e-6)
        if isinstance(load, Replay):
            assert load.trace.name.endswith("conv_first-30-min.csv.gz") or "conv" in cell.name


def test_periods_are_in_rounds_of_the_server_without_speculation():
    for name in (TRAINED_ON, "kimi-k2.5-8gpu-table"):
        deployment = deployment_of(load_system(name))
        for cell, clients in zip(shift_cells(deployment), (8, 64, 256), strict=True):
            step_s = off_step_s(deployment, clients)
            assert cell.workload.acceptance.period == pytest.approx(protocol.SHIFT_ROUNDS * step_s)
    slow, fast = (off_step_s(deployment_of(load_system(n)), 8) for n in (HELD_OUT[0], TRAINED_ON))
    assert slow > 2 * fast


def test_tuning_meets_every_load_and_every_scenario():
    cells = tuning_cells(deployment_of(load_system(TRAINED_ON)), FULL)
    closed = [cell for cell in cells if cell.workload.is_closed]
    assert len(closed) == 12
    assert len(cells) - len(closed) == len(OPEN_RATES) * len(OPEN_TUNING)
    for scenario in TUNING_SCENARIOS:
        assert sum(cell.name.endswith(f", {scenario.name}") for cell in closed) == 2


# --- a small run ---------------------------------------------------------------------------------

TINY = replace(
    SIZES["smoke"],
    seeds=2,
    rounds=40,
    requests=20,
    calibrations=("qwen3.8-flash-next-table",),
    tuning_rounds=20,
    tuning_requests=10,
)


@pytest.fixture(scope="module")
def report():
    patch = pytest.MonkeyPatch()
    patch.setitem(full.SIZES, "smoke", TINY)
    patch.setattr(protocol, "SHIFT_ROUNDS", 60)
    patch.setattr(full, "TRAINED_ON", "qwen3.8-flash-next-table")
    done = []
    try:
        made = run_protocol(SHIPPED, "smoke", jobs=1, watch=done.append)
    finally:
        patch.undo()
    assert done == ["qwen3.8-flash-next-table"]
    return made


def test_a_run_has_every_controller_in_every_cell(report):
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    (system,) = report["systems"]
    names = {"native always", "always native", "fixed 3", "policy", "oracle", "bound"}
    names |= set(full.BASELINES)
    assert len(system["cells"]) == 6 * 2 + 3 * 2
    for cell in system["cells"]:
        assert set(cell["controllers"]) == names
        for item in cell["controllers"].values():
            assert len(item["objective"]) == 2 and min(item["objective"]) > 0
    assert set(system["tuned"]) == names - {"policy", "oracle", "bound"}
    assert system["tuned"]["tuned threshold"]["trials"] > 10
    assert system["tuned"]["sglang ladder"]["trials"] == 0
    assert len(system["map"]["policy"]) == 7 and len(system["map"]["policy"][0]) == 9
    assert len(system["time_line"]["time_s"]) == len(system["time_line"]["num_steps"]) > 20
    assert {"policy", "oracle", "bandit"} <= set(system["shifts"])


def test_the_reports_name_every_target_and_need_no_other_file(report):
    page, text = html_report(report), markdown(report)
    targets = judge(report)
    assert len({target.name for target in targets}) >= 18
    for target in targets:
        assert target.name in text
    assert page.count("<svg") == 4
    assert page.count('<td class="hit">') == sum(t.hit is True for t in targets)
    assert page.count('<td class="MISS">') == sum(t.hit is False for t in targets)
    assert not re.search(r'(src|href)="(?!#|data:)|url\((?!#)|@import', page), "self-contained"
    assert html_report(report) == page, "the same text every time"
    rows = [line for line in text.splitlines() if line.startswith("| light: closed 1, mixture")]
    assert len(rows) == 1 and rows[0].count("|") == 10


def test_the_command_refuses_what_a_suite_fixes(tmp_path, capsys):
    for extra, what in (
        (["--seeds", "3"], "--seeds"),
        (["--tiers", "off,3"], "--tiers"),
        (["--jobs", "0"], "--jobs"),
        (["--controller", "nowhere"], "MODULE:FUNCTION"),
    ):
        arguments = [str(SHIPPED), "--suite", "smoke", "-o", str(tmp_path / "r.json"), *extra]
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and what in error
    assert main([str(SHIPPED), "--controller", "a:b", "-o", str(tmp_path / "r.json")]) == 2
    assert "--suite" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_writes_three_reports(tmp_path, monkeypatch, report, capsys):
    monkeypatch.setattr("training.compare.run_protocol", lambda *arguments: report)
    assert main([str(SHIPPED), "--suite", "smoke", "-o", str(tmp_path / "r.json")]) == 0
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".html", ".json", ".md"]
    assert json.loads((tmp_path / "r.json").read_text()) == report
    assert "against greedy" in capsys.readouterr().out
    assert np.isfinite(report["systems"][0]["cells"][0]["controllers"]["policy"]["objective"]).all()
