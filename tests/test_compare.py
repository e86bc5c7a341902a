"""The comparison: arithmetic by hand, pairing, and what the shipped policy is held to."""

import json
from pathlib import Path

import numpy as np
import pytest

from controller.calibration import Calibration
from controller.checkpoint import load_checkpoint, save_checkpoint
from controller.errors import ConfigError
from env.acceptance_process import Acceptance
from env.deployment import Deployment
from env.lengths import Lengths
from env.simulator import Cell
from env.workload import ClosedLoop, Workload
from tests.synthetic import calibration, cell
from training.compare import compare, half_width, main, summarise, totals
from training.controllers import (
    BatchThreshold,
    LearnedPolicy,
    Oracle,
    fixed_controllers,
    threshold_grid,
)
from training.evaluation import METRICS, Outcome, evaluate, tune_threshold
from training.network import TierScorer

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "checkpoints" / "h200-llama3-8b-eagle3-fa3"
KIMI = ROOT / "checkpoints" / "calibrations" / "kimi-k2.5-8gpu-table.json"


def outcome(objective):
    objective = np.array(objective, float)
    metrics = {name: np.ones_like(objective) for name in METRICS}
    return Outcome(metrics, objective, np.ones((len(objective), 2)) / 2)


def test_shares_and_gains_by_hand():
    cells = [cell(0.012, 0.8), cell(0.012, 0.5)]
    outcomes = {
        "tuned threshold": outcome([[10, 10], [20, 20]]),
        "policy": outcome([[11, 13], [20, 20]]),
        "oracle": outcome([[14, 16], [19, 19]]),  # behind in the second cell: luck
        "bound": outcome([[16, 16], [22, 22]]),
    }
    entries = summarise(outcomes, cells)
    first, second = (entry["controllers"]["policy"] for entry in entries)
    assert first["gain_over_threshold"] == pytest.approx(0.2)
    assert first["share_of_oracle"] == pytest.approx(12 / 15)
    assert first["gain_half_width_95"] == pytest.approx(12.71 * 0.1)
    assert second["share_of_oracle"] == 1.0
    assert [entry["oracle_gain"] for entry in entries] == pytest.approx([0.5, 0.0])
    total = totals(entries)
    assert total["controllers"]["policy"]["share_of_oracle_gain"] == pytest.approx(0.1 / 0.25)
    assert total["controllers"]["policy"]["worst_cell"] == "synthetic"


def test_half_width_is_students():
    assert half_width(np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(3.18 * 1.291 / 2, rel=1e-3)
    assert np.isnan(half_width(np.array([1.0])))


def test_threshold_grid_tries_every_pair():
    grid = threshold_grid(["cold", "1", "3"], 48)
    assert len({(each.tier, each.threshold) for each in grid}) == len(grid)
    assert {each.tier for each in grid} == {0, 1, 2}
    assert {1, 2, 3, 4, 32, 48} <= {each.threshold for each in grid if each.tier == 2}
    assert max(each.threshold for each in grid) == 48


def test_tuned_threshold_turns_speculation_off_where_it_does_not_pay():
    grid = threshold_grid(["cold", "3"], 8)
    assert tune_threshold(grid, [cell(0.040, 0.2)], [1]).tier == 0
    assert tune_threshold(grid, [cell(0.011, 0.9)], [1]).tier == 1


def test_controllers_meet_the_same_requests():
    cells = [cell(0.012, 0.6)]
    first = evaluate(BatchThreshold(1, 99, "a"), cells, [4, 5])
    again = evaluate(BatchThreshold(1, 99, "b"), cells, [4, 5])
    assert np.array_equal(first.objective, again.objective)
    assert first.objective[0, 0] != first.objective[0, 1]
    assert first.tier_share[0].tolist() == [0.0, 1.0]


def tiny_checkpoint(path):
    deployment = Deployment(calibration(), tiers="off,3", max_running_requests=8)
    return save_checkpoint(
        path,
        parameters=TierScorer(8, 8, 40.0).arrays(),
        tiers=deployment.resolved_tiers(),
        calibration=deployment.calibration,
        training_config={},
        evaluation={},
    )


def test_report_is_valid_json_and_complete(tmp_path):
    report = compare(
        tiny_checkpoint(tmp_path / "c"),
        num_seeds=2,
        max_running_requests=8,
        cells=[cell(0.012, 0.8), cell(0.012, 0.2)],
    )
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    names = set(report["cells"][0]["controllers"])
    assert names == {"always cold", "fixed 3", "tuned threshold", "policy", "oracle", "bound"}
    for entry in report["cells"]:
        for item in entry["controllers"].values():
            assert set(METRICS) <= set(item)
            assert item["throughput_tok_s"] > 0
    with pytest.raises(ConfigError, match="at least 2"):
        compare(tiny_checkpoint(tmp_path / "d"), num_seeds=1, cells=[cell(0.012, 0.8)])


def test_command_line_names_what_is_wrong(tmp_path, capsys):
    tiny_checkpoint(tmp_path / "c")
    out = ["-o", str(tmp_path / "report.json")]
    assert main([str(tmp_path / "c"), "--tiers", "off,5", *out]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "'5'" in error
    assert main([str(tmp_path / "nowhere")]) == 2
    assert not list(tmp_path.glob("*.json"))


def test_an_output_that_would_destroy_something_is_refused(tmp_path, capsys):
    tiny_checkpoint(tmp_path / "c")
    (tmp_path / "thesis.json").write_text("{}")
    for output in ("c/policy.json", "c/new.json", "thesis.json", "c"):
        assert main([str(tmp_path / "c"), "-o", str(tmp_path / output)]) == 2
        assert capsys.readouterr().err.startswith("error: output ")
    assert main([str(tmp_path / "c"), "--tiers", "3"]) == 2
    assert "--output" in capsys.readouterr().err
    load_checkpoint(tmp_path / "c")
    assert (tmp_path / "thesis.json").read_text() == "{}"


@pytest.mark.timeout(600)
class Counted:
    """A policy that takes the last tier, but for every 50th decision; counts its decisions."""

    def __init__(self, num_tiers):
        self.num_tiers = num_tiers
        self.asked = 0

    def logits(self, observations):
        assert len(observations) == 1
        self.asked += 1
        return np.eye(self.num_tiers)[[-1 if self.asked % 50 else 0]]


@pytest.mark.parametrize(("clients", "repeats"), [(1, True), (4, True), (5, False)])
def test_the_policy_repeats_a_decision_for_few_requests_as_in_the_server(clients, repeats):
    deployment = Deployment(calibration(), tiers="off,3", max_running_requests=8)
    # One output is longer than the episode: nobody joins or leaves after the start.
    lengths = Lengths(100_000.0, 0.0, 100_000, 100_000)
    workload = Workload(
        "long", ClosedLoop(clients, 3000 * clients), Acceptance("shared", 0.5, 0.5), outputs=lengths
    )
    cells = [Cell(deployment, workload)]
    asked = {}
    for rounds in (1, 8):
        policy = Counted(2)
        evaluate(LearnedPolicy(policy, repeat_rounds=rounds), cells, [1])
        asked[rounds] = policy.asked
    # Of 50 decisions 9 are for one round, after a change and the one back; the others for 8 rounds.
    expected = asked[1] * 50 / (9 + 41 * 8) if repeats else asked[1]
    assert asked[8] == pytest.approx(expected, rel=0.1)


def test_shipped_policy_beats_the_threshold_in_every_default_cell():
    """The claim of the README, on fewer seeds: no cell lost, most of the oracle's gain won."""
    report = compare(load_checkpoint(SHIPPED), num_seeds=3)
    policy = report["totals"]["controllers"]["policy"]
    assert policy["worst_gain"] > -0.01, policy["worst_cell"]
    assert policy["share_of_oracle_gain"] > 0.70
    assert report["totals"]["oracle_mean_gain"] > 0.04


def test_shipped_policy_costs_nothing_where_speculation_never_pays():
    """On the Kimi table speculation loses everywhere: a few probes are all that it costs."""
    system = Calibration.load(KIMI)
    deployment = Deployment(system, tiers="native,3", max_running_requests=256)
    # The accept rate whose accept length at 3 steps is the one that the table was read with.
    rates = np.linspace(0, 1, 100_001)
    accept_len = 1 + rates + rates**2 + rates**3
    rate = float(rates[np.argmin(abs(accept_len - system.assumed_accept_len["3"]))])
    cells = [
        Cell(
            deployment,
            Workload(f"{n}", ClosedLoop(n, 1500 * n), Acceptance("shared", rate, rate)),
        )
        for n in (1, 5, 30, 100, 250)
    ]
    native = evaluate(fixed_controllers(["native", "3"])[0], cells, [1])
    shipped = evaluate(LearnedPolicy(load_checkpoint(SHIPPED).policy), cells, [1])
    assert (shipped.tier_share[:, 0] > 0.95).all()
    assert (shipped.objective >= 0.99 * native.objective).all()
    assert (evaluate(Oracle(), cells, [1]).objective <= native.objective * 1.001).all()
