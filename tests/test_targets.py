"""What a run found, judged: arithmetic by hand, hits and misses; and regret after a shift."""

import numpy as np
import pytest

from controller.calibration import Calibration, PrefillCost, TierCost
from controller.errors import CalibrationError
from env.acceptance_process import Acceptance
from env.deployment import Deployment
from env.simulator import Cell
from env.workload import ClosedLoop, Lengths, Workload
from tests.synthetic import calibration
from training.complete import main, native_share, with_native
from training.controllers import BatchThreshold, Oracle
from training.recording import record
from training.regret import HORIZON, WINDOW, measure_shifts, phase_starts, rounds_to_catch_up
from training.statistics import stratified_half_width
from training.targets import (
    after_shift,
    against_hindsight,
    against_ladder,
    against_rules,
    against_threshold,
    judge,
    kimi,
    mean_difference,
    open_load,
    precision,
    share_of_oracle,
    shares,
)

NAMES = ("native always", "always native", "fixed 3", "tuned threshold", "sglang ladder")
NAMES += ("greedy", "tuned greedy", "bandit", "policy", "oracle", "bound")


def made_cell(name, scenario="drift", closed=True, goodput=None, **objectives):
    """Every controller at 10 but for those given, one number or one a seed."""
    values = dict.fromkeys(NAMES, 10.0) | {k.replace("_", " "): v for k, v in objectives.items()}
    controllers = {
        who: {
            "objective": list(np.broadcast_to(np.array(value, float), 2)),
            "slo_goodput_by_seed": [1.0, 1.0] if goodput is None else goodput.get(who, [1.0, 1.0]),
        }
        for who, value in values.items()
    }
    return {"cell": name, "closed": closed, "scenario": scenario, "controllers": controllers}


def made_system(*cells, name="kimi-like", tuned=None, shifts=()):
    scores = tuned or {"tuned threshold": 1.0, "greedy": 2.0}
    return {
        "system": name,
        "held_out": True,
        "cells": list(cells),
        "tuned": {who: {"score": score} for who, score in scores.items()},
        "shifts": {"policy": list(shifts)},
    }


def test_the_oracle_counts_as_at_least_as_good_as_the_best():
    cell = made_cell("a", policy=9.0, oracle=11.0, native_always=12.0, bound=20.0)
    assert share_of_oracle(cell) == pytest.approx(9 / 12)
    assert share_of_oracle(cell, governed=True) == pytest.approx(9 / 11)
    other = made_cell("b", policy=10.0)
    rows = shares(made_system(cell, other))
    assert [row.value for row in rows[:2]] == ["0.8750", "0.7500"]
    assert [row.hit for row in rows] == [False, False, False, False, None]
    assert rows[1].where == "a"
    assert rows[4].value == f"{(9 / 20 + 1) / 2:.4f}"


def test_the_share_of_the_gain_over_the_threshold():
    system = made_system(
        made_cell("a", policy=11.6, oracle=12.0), made_cell("b", policy=9.95, oracle=10.0)
    )
    share, worst = against_threshold(system)
    assert share.value == "77.5% (+7.75% of +10.00%)" and share.hit is False
    assert worst.value == "-0.50%" and worst.hit is True and worst.where == "b"
    assert against_threshold(made_system(made_cell("a")))[0].hit is None
    lost = made_system(made_cell("a", policy=9.8))
    assert against_threshold(lost)[1].hit is False


def test_hindsight_knows_the_best_fixed_choice_of_each_cell():
    system = made_system(
        made_cell("a", policy=11.9, fixed_3=12.0), made_cell("b", policy=10.0, native_always=10.5)
    )
    server, tier = against_hindsight(system)
    assert server.where == "b" and server.value == "-4.76%" and server.hit is False
    assert tier.where == "a" and tier.value == "-0.83%" and tier.hit is True


def test_the_ladder_is_judged_where_it_leaves_a_fifth():
    (row,) = against_ladder(made_system(made_cell("a", policy=12.5, oracle=13.0)))
    assert row.hit is True and row.value == "+25.00% (oracle +30.00%)"
    assert against_ladder(made_system(made_cell("a", policy=11.0, oracle=13.0)))[0].hit is False
    assert against_ladder(made_system(made_cell("a", policy=11.0, oracle=11.9)))[0].hit is None


def test_behind_means_behind_beyond_luck():
    sure = made_system(made_cell("a", policy=9.9), made_cell("b", "mixture", policy=11.0))
    rows = {row.name: row for row in against_rules(sure)}
    assert rows["against greedy: not behind in any scenario"].hit is False
    assert rows["against greedy: not behind in any scenario"].where == "drift"
    lucky = made_system(made_cell("a", policy=[9.0, 10.8]))
    rows = {row.name: row for row in against_rules(lucky)}
    assert rows["against bandit: not behind in any scenario"].hit is True


def test_a_third_of_what_greedy_leaves():
    left = made_cell("a", policy=10.0 * np.exp(0.01), oracle=10.0 * np.exp(0.04))
    what = "where greedy leaves more than 2% to the oracle, a third of it is recovered"
    rows = {row.name: row for row in against_rules(made_system(left))}
    assert rows[what].hit is False and rows[what].value == "25%"
    enough = made_cell("a", policy=10.0 * np.exp(0.02), oracle=10.0 * np.exp(0.04))
    rows = {row.name: row for row in against_rules(made_system(enough))}
    assert rows[what].hit is True and rows[what].value == "50%"
    little = made_cell("a", oracle=10.1)
    assert {r.name: r.hit for r in against_rules(made_system(little))}[what] is None


def test_open_load_is_judged_against_what_tuning_chose():
    cell = made_cell(
        "a", closed=False, policy=10.5, greedy=10.0, oracle=12.0, goodput={"greedy": [2.0, 2.0]}
    )
    time, mean, goodput, mean_goodput = open_load(made_system(cell, made_cell("closed")))
    assert "against greedy" in time.value and time.hit is True
    assert mean.hit is True and mean.value.startswith("+4.88%")
    assert goodput.hit is False and goodput.value.startswith("worst -50.00%")
    assert mean_goodput.hit is False
    assert open_load(made_system(made_cell("closed"))) == []


def test_shifts_are_judged_by_what_ran_when_they_came():
    shifts = [
        {"rises": False, "speculating": True, "rounds": r, "excess": 99.0} for r in (10, 40, 400)
    ] + [{"rises": True, "speculating": False, "rounds": 500, "excess": e} for e in (3.0, 20.0)]
    rounds, excess = after_shift(made_system(made_cell("a"), shifts=shifts))
    assert rounds.value == "40 rounds (of 3 shifts)" and rounds.hit is True
    assert excess.value == "11.5 (of 2 shifts)" and excess.hit is True
    assert [row.hit for row in after_shift(made_system(made_cell("a")))] == [None, None]


def test_kimi_and_precision():
    assert kimi(made_system(made_cell("a"), name="other")) == []
    (row,) = kimi(made_system(made_cell("a", policy=9.95)))
    assert row.hit is True and row.value == "0.9950"
    (row,) = precision(made_system(made_cell("a", policy=[10.0, 10.4])))
    assert row.hit is False
    pooled = judge({"systems": [made_system(made_cell("a"))]})
    assert pooled[0].system == "all held out" and pooled[0].value == "1.0000"


def test_luck_of_independent_cells_averages_out():
    strata = [np.array([1.0, 3.0]), np.array([2.0, 2.0]), np.array([0.0, 2.0])]
    # Variances of the means 1, 0 and 1; three degrees of freedom.
    assert stratified_half_width(strata) == pytest.approx(3.18 * 2**0.5 / 3)
    assert np.isnan(stratified_half_width([np.array([1.0])]))
    mean, half = mean_difference(
        [made_cell("a", policy=[np.e * 10, 10.0]), made_cell("b")], "policy", "greedy"
    )
    assert mean == pytest.approx(0.25)
    assert half == pytest.approx(4.30 * 0.5 / 2)


# --- regret --------------------------------------------------------------------------------------


def test_phases_begin_with_the_first_round_after_a_shift():
    start_s = np.array([0.0, 4.0, 9.9, 10.1, 15.0, 30.5, 31.0, np.nan])
    assert phase_starts(start_s, 10.0) == [(1, 3, 5), (3, 5, 7)]


def test_catching_up_needs_a_whole_window():
    time = np.ones(40)
    loss = np.where(np.arange(40) < 7, 0.5, 0.0)
    loss[20] = 0.5
    # From round 6 on ten rounds lose 0.5 of 10 s; from 7 on nothing.
    assert rounds_to_catch_up(loss, time, 0.04) == 7
    assert rounds_to_catch_up(loss, time, 0.05) == 6
    assert rounds_to_catch_up(np.full(40, 0.5), time, 0.1) == HORIZON
    assert rounds_to_catch_up(loss[: WINDOW - 1], time[: WINDOW - 1], 1.0) == HORIZON


def shift_cell(think_s=0.0):
    server = Deployment(calibration(0.010, 0.015, off="native"), "off,3", max_running_requests=8)
    lengths = {"prompts": Lengths(16, 0.0, 16, 16), "outputs": Lengths(200, 0.2, 100, 400)}
    acceptance = Acceptance("collapse", 0.0, 0.9, period=3.0)
    return Cell(server, Workload("shift", ClosedLoop(4, 6000, think_s), acceptance, **lengths))


def test_a_fixed_depth_loses_what_it_costs_and_off_what_it_misses():
    fixed, off = BatchThreshold(1, 99, "fixed 3"), BatchThreshold(0, 0, "off")
    found = measure_shifts([fixed, off], Oracle("oracle"), [shift_cell()], [1, 2])
    falls = {name: [s for s in each if not s.rises] for name, each in found.items()}
    rises = {name: [s for s in each if s.rises] for name, each in found.items()}
    assert all(s.speculating for s in found["fixed 3"])
    assert not any(s.speculating for s in found["off"])
    # Without acceptance a round at depth 3 takes 15 ms for the tokens of 10 ms: half a native
    # round lost each time, for ever.
    for shift in falls["fixed 3"]:
        assert shift.rounds == HORIZON
        assert shift.curve[99] == pytest.approx(50.0, rel=0.05)
    for shift in falls["off"]:
        assert shift.rounds == 0 and abs(shift.excess) < 1.0
    for shift in rises["off"]:
        assert shift.rounds == HORIZON and shift.excess > 50.0
    for shift in rises["fixed 3"]:
        assert shift.rounds == 0
    assert all(shift.rounds <= WINDOW for shift in found["oracle"])


def test_a_recording_is_what_ran():
    run = record(BatchThreshold(1, 3, "t"), [shift_cell(think_s=0.5)], [1])
    assert (run.tier[run.running[:, 0] <= 3, 0] == 1).all()
    assert (run.tier[run.running[:, 0] > 3, 0] == 0).all()
    assert set(run.tier[:, 0]) == {0, 1}
    assert run.step_s[run.tier == 1] == pytest.approx(0.015)
    early = run.start_s[:, 0] < 2.9
    assert run.accept_rate[early, 0] == pytest.approx(0.9)
    assert (np.diff(run.start_s[:, 0]) > 0).all()


# --- an assumed off ------------------------------------------------------------------------------


def depths_only():
    costs = tuple(
        TierCost(name, (1, 8), (low, high), 0.0, (0.0, 0.0), 0, 5)
        for name, low, high in (("1", 0.010, 0.020), ("3", 0.012, 0.03))
    )
    return Calibration("depths", costs, PrefillCost(0.0, 0.0), PrefillCost(0.0, 0.0))


def test_an_assumed_off_is_a_share_of_the_shallowest_depth_and_says_so(tmp_path, capsys):
    made = with_native(depths_only(), 0.7, "a guess")
    assert made.tier_names == ("native", "1", "3")
    assert made.step_s("native", 8, 0) == pytest.approx(0.014)
    assert made.source["assumed_native"]["why"] == "a guess"
    assert native_share(200.0, 100.0, 2.5) == pytest.approx(0.8)
    with pytest.raises(CalibrationError, match="expected depths only"):
        with_native(made, 0.7, "again")
    with pytest.raises(CalibrationError, match="at most 1"):
        with_native(depths_only(), 1.5, "")
    depths_only().save(tmp_path / "in.json")
    arguments = [str(tmp_path / "in.json"), "-o", str(tmp_path / "out.json"), "--why", "x"]
    assert main([*arguments, "--native-share", "0.7"]) == 0
    assert Calibration.load(tmp_path / "out.json").tier_names == ("native", "1", "3")
    assert main([*arguments, "--native-share", "0"]) == 2
    assert "error: " in capsys.readouterr().err
