"""The benchmark counts what it says it counts, and its command fails in one line."""

import json
import sys

import numba
import numpy as np
import pytest

from controller.calibration import Calibration
from env import benchmark, benchmark_plot
from env.greedy import greedy_tier, run_greedy
from env.phase_clock import (
    BATCH_PHASES,
    DECODE_PHASES,
    LOOP_PHASES,
    PhaseClock,
    phase_clock,
)
from env.simulator import Simulator
from tests.synthetic import cell

SYSTEM = Calibration.load("checkpoints/calibrations/h200-llama3-8b-eagle3-fa3.json")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Measure for moments, on one thread."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    for name, value in (("WINDOW_S", 0.02), ("WINDOWS", 2), ("SERVERS", 3), ("RUNNING", 5)):
        monkeypatch.setattr(benchmark, name, value)
    yield
    numba.set_num_threads(before)


def test_both_ways_of_driving_make_the_same_decisions():
    compiled, lockstep = (benchmark.Driver(SYSTEM, 3, 5) for _ in range(2))
    compiled.compiled(40)
    lockstep.lockstep(40)
    assert (compiled.simulator.state.server == lockstep.simulator.state.server).all()
    rounds = compiled.simulator.state.tier_rounds
    assert (rounds == lockstep.simulator.state.tier_rounds).all()
    assert (rounds.sum(axis=1) == benchmark.WARM_UP + 40).all()


def test_the_greedy_policy_takes_the_largest_score_and_stops_at_the_end():
    simulator = Simulator([cell(0.012, 0.9, tokens=800)] * 2)
    simulator.reset([1, 2])
    run_greedy(simulator.state, simulator.costs, 10)
    assert (simulator.state.server.num_rounds == 10).all()
    assert (simulator.state.tier_rounds[:, 1] >= 9).all(), "speculation pays here"
    run_greedy(simulator.state, simulator.costs, 10**6)
    assert simulator.done.all()
    seen = np.zeros((2, simulator.observation_size), np.float32)
    simulator.observe(seen)
    scores = seen[:, benchmark.FIRST_SCORE :: benchmark.NUM_PER_TIER]
    assert [greedy_tier(each, 2) for each in seen] == scores.argmax(axis=1).tolist()


def test_a_measurement_counts_decisions_and_running_requests():
    driver = benchmark.Driver(SYSTEM, 3, 5)
    speed = benchmark.measure(driver, driver.compiled)
    server = driver.simulator.state.server
    assert speed.mean_running == pytest.approx(5.0, abs=0.2)
    assert speed.decisions_per_s > 1000
    seconds_a_round = float((server.now_s / server.num_rounds).mean())
    assert speed.real_time_factor == pytest.approx(
        speed.decisions_per_s / 3 * seconds_a_round, rel=0.2
    )


def test_clocked_kernels_do_what_the_others_do():
    pair = [Simulator([cell(0.012, 0.7)] * 2) for _ in range(2)]
    clock = phase_clock()
    for simulator in pair:
        simulator.reset([1, 2])
    tiers = np.array([1, 0])
    clock.ticks[:] = 0
    for i in range(60):
        area, tokens = pair[0].step(tiers[[i % 2, (i + 1) % 2]])
        results = (np.zeros(2), np.zeros(2, np.int64), np.zeros(2), np.zeros(2))
        clock.step(pair[1].state, pair[1].costs, tiers[[i % 2, (i + 1) % 2]], *results)
        assert (results[0] == area).all()
        assert (results[1] == tokens).all()
    assert (pair[0].state.server == pair[1].state.server).all()
    own = clock.self_ticks()
    assert set(own) == {*DECODE_PHASES, *LOOP_PHASES, *BATCH_PHASES}
    assert all(ticks > 0 for ticks in own.values())
    assert sum(own.values()) < clock.ticks.sum(), "phases within phases are not counted twice"


def test_the_command_ends_with_one_line_of_json(capsys):
    assert benchmark.main(["--json", "--no-profile"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["decisions_per_s"] > 1000
    assert found["real_time_factor"] > 1
    assert 2**25 < found["peak_rss_bytes"]
    assert f"{found['decisions_per_s']:,.0f}" in "\n".join(lines)


def test_the_profile_accounts_for_the_time_of_a_decision():
    spent = benchmark.profile(benchmark.Driver(SYSTEM, 3, 5), rounds=50)
    assert list(spent.values()) == sorted(spent.values(), reverse=True)
    assert {"observe", "policy", "draw_results", "step, outside the phases"} <= set(spent)
    assert min(spent.values()) >= 0


def test_the_plot_is_an_image(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "PLOT_RUNNING", (1, 4))
    monkeypatch.setattr(benchmark, "PLOT_SERVERS", (1, 2))
    path = tmp_path / "folder" / "speed.png"
    assert benchmark.main(["--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out
    assert benchmark.main(["--plot", str(tmp_path / "speed.docx")]) == 2
    assert "ends in one of" in capsys.readouterr().err


def test_without_matplotlib_the_plot_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"specgovernor\[plot\]"):
        benchmark_plot.draw(SYSTEM, tmp_path / "speed.png")


def test_another_processor_is_told_to_leave_the_profile_out(monkeypatch, capsys):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ValueError, match="riscv64; leave the profile out"):
        PhaseClock()
    monkeypatch.setattr(benchmark, "phase_clock", PhaseClock)
    found = benchmark.run(SYSTEM)
    benchmark.show(found)
    assert "profile_ns" not in found
    assert "no profile: the profile reads" in capsys.readouterr().out


def test_bad_arguments_end_in_one_line(capsys):
    assert benchmark.main(["--calibration", "absent.json"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(SystemExit) as caught:
        benchmark.main(["--speed"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
