"""Every baseline: its rule by hand on small cases, and that it learns nothing too early."""

import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest

import training.baselines
from controller.calibration import TierCost
from controller.errors import ConfigError
from controller.memory import (
    CURRENT_TIER,
    NUM_MEMORY,
    ROUNDS_SINCE_SPECULATION,
    ROUNDS_SINCE_SWITCH,
)
from env.acceptance_process import Acceptance
from env.deployment import Deployment
from env.simulator import Cell, Simulator
from env.workload import ClosedLoop, Lengths, Workload
from tests.synthetic import calibration, cell, even_system
from training.baselines.bandit import Bandit, add_reward, best_arm, bucket_of, make_bandit
from training.baselines.feedback import (
    COLD_START,
    HISTOGRAM,
    ROWS,
    TIER,
    WIDTH,
    collect,
    new_feedback,
)
from training.baselines.greedy import Greedy, greedy_choice
from training.baselines.ladder import (
    AT,
    AVERAGE,
    COUNT,
    DEFAULT_LADDER,
    Ladder,
    Slot,
    SlotTable,
    fitted_slots,
    update_slot,
)
from training.baselines.registry import BASELINES, load_maker
from training.baselines.static import BatchTable, make_table, make_threshold
from training.baselines.stepwise import Stepwise
from training.baselines.task import Task
from training.controllers import BatchThreshold
from training.evaluation import evaluate
from training.recording import record

LENGTHS = {"prompts": Lengths(16, 0.0, 16, 16), "outputs": Lengths(200, 0.2, 100, 400)}


LONG = LENGTHS | {"outputs": Lengths(60_000, 0.0, 60_000, 60_000)}


def busy(acceptance, clients=6, tokens=6000, overlap=True, tiers="off,1,3", lengths=LENGTHS):
    """Off takes 10 ms, depth 1 14 ms and depth 3 20 ms, whatever the batch."""
    system = replace(
        even_system(),
        costs=tuple(
            TierCost(name, (1,), (seconds,), 0.0, (0.0,), 10**9, 100)
            for name, seconds in (("native", 0.010), ("1", 0.014), ("3", 0.020))
        ),
    )
    server = Deployment(system, tiers=tiers, max_running_requests=8, overlap=overlap)
    return Cell(server, Workload("busy", ClosedLoop(clients, tokens), acceptance, **lengths))


# --- SGLang's ladder -----------------------------------------------------------------------------


def feed(table, state, rows, correct, slot=0):
    update_slot(
        table.settings[slot],
        table.steps[slot],
        table.num_candidates[slot],
        state[slot],
        rows,
        correct,
    )
    return int(table.steps[slot, int(state[slot, AT])])


def test_a_slot_averages_and_steps_as_by_hand():
    slots = (Slot(1, (1, 3, 5), alpha=0.5, interval=2, warmup=1, down=0.0),)
    table = SlotTable(slots, 3)
    state = table.first.copy()
    assert state[0].tolist() == [1, 2.0, 0]  # depth 3, average 3 - 1
    assert feed(table, state, 2, 6) == 3  # warm-up; average 0.5 * 2 + 0.5 * 3
    assert state[0, AVERAGE] == 2.5
    assert feed(table, state, 2, 6) == 3  # between evaluations; 2.75
    assert feed(table, state, 1, 3) == 5  # 2.875 > 3 - 0.5
    assert state[0].tolist() == [2, 2.875, 3]
    feed(table, state, 4, 0)  # 1.4375
    assert feed(table, state, 4, 0) == 3  # 0.71875 <= 3 - 0.5, then not <= 1 - 0.5
    feed(table, state, 4, 0)
    assert feed(table, state, 4, 0) == 1  # 0.1796875 <= 1 - 0.5
    assert state[0, COUNT] == 7


def test_a_slot_that_is_off_goes_one_up_at_every_evaluation():
    slots = (Slot(1, (0, 2), alpha=0.5, interval=3, warmup=0),)
    table = SlotTable(slots, 0)
    state = table.first.copy()
    assert state[0, AVERAGE] == -1
    assert [feed(table, state, 5, 0) for _ in range(3)] == [0, 0, 2]
    assert state[0, AVERAGE] == 1.0  # neutral at depth 2; off rounds are not averaged


def test_the_ceiling_caps_on_the_way_down_only():
    settings = {"alpha": 1.0, "interval": 1, "warmup": 0, "ceiling": 1.0, "down": -9.0}
    table = SlotTable((Slot(1, (1, 3, 5), **settings),), 5)
    state = table.first.copy()
    assert feed(table, state, 2, 6) == 3  # average 3, so no more than 3
    table = SlotTable((Slot(1, (1, 3, 5), **settings),), 3)
    state = table.first.copy()
    assert feed(table, state, 2, 6) == 5  # on the way up the ceiling does not hold


def test_depths_without_a_tier_are_left_out():
    fitted = fitted_slots(DEFAULT_LADDER, (0, 3))
    assert [slot.steps for slot in fitted] == [(3,), (0, 3), (0,), (0,)]
    assert fitted_slots(DEFAULT_LADDER, (3, 5))[3].steps == (3,)
    with pytest.raises(ConfigError, match="ascending"):
        Slot(1, (3, 1))


def test_batches_go_to_the_slot_at_or_below_their_padded_size():
    table = SlotTable(DEFAULT_LADDER, 3)
    assert [table.slot_of(size) for size in (1, 7, 8, 31, 32, 64, 500)] == [0, 0, 1, 1, 2, 3, 3]
    padded = replace(calibration(), cuda_graph_batch_sizes=(1, 8, 16))
    assert [table.slot_of(size, padded) for size in (1, 2, 9, 17)] == [0, 1, 1, 1]


def test_the_default_ladder_is_off_in_large_batches_and_deep_in_small_ones():
    sure = Acceptance("shared", 1.0, 1.0)
    few = evaluate(Ladder(), [busy(sure, clients=1, tokens=4000)], [1])
    assert few.tier_share[0, -1] == 1.0
    slots = (Slot(1, (3,)), Slot(4, (0,)))
    outcome = evaluate(Ladder(slots), [busy(sure, clients=6)], [1])
    assert outcome.tier_share[0, 0] > 0.95


# --- what is known when --------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_result_is_known_one_decision_late_under_overlap(overlap):
    simulator = Simulator([busy(Acceptance("shared", 0.7, 0.7), overlap=overlap)])
    simulator.reset([3])
    feedback = new_feedback(1)
    server = simulator.state.server[0]
    launched, heard, late = [], [], 0
    for i in range(300):
        count = collect(simulator.state, 0, feedback.held[0], feedback.known[0])
        heard += [feedback.known[0, j].copy() for j in range(count)]
        assert len(heard) == len(launched) - (server.pending_tier >= 0)
        late += len(heard) < len(launched)
        tier = i % 3
        rows = int(server.num_running)
        simulator.step(np.array([tier]))
        launched.append((tier, rows, simulator.state.histogram[0].copy()))
    assert late == 0 if not overlap else late > 200
    for result, (tier, rows, histogram) in zip(heard, launched, strict=False):
        assert (result[TIER], result[ROWS]) == (tier, rows)
        assert result[HISTOGRAM:].tolist() == histogram.tolist()
    # Off leaves the draft behind, so the first depth after it starts cold, the second does not.
    assert [int(result[COLD_START]) for result in heard[3:9]] == [0, 1, 0, 0, 1, 0]
    assert feedback.held.shape == (1, WIDTH + 1)


class Inspector(Stepwise):
    """A user's own rule: the deepest tier in small batches."""

    def start(self, simulator):
        return None

    def choose(self, simulator, memory, actions):
        small = simulator.state.server.num_running < 4
        actions[:] = np.where(small, simulator.num_tiers - 1, 0)


@pytest.mark.parametrize(
    "controller",
    [
        Ladder((Slot(1, (0, 1, 3)), Slot(5, (0, 1)))),
        Greedy(),
        Greedy("slow", 0.02, 16, 3),
        Bandit(0.1, 0.98, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("overlap", [False, True])
def test_whole_episodes_in_a_kernel_are_the_same_as_round_by_round(controller, overlap):
    cells = [
        busy(Acceptance("shared", 0.1, 0.9, period=0.5), overlap=overlap),
        busy(Acceptance("per-request", 0.1, 0.9, period=32.0), clients=3, overlap=overlap),
    ]
    found = []
    for run in (type(controller).run, Stepwise.run):
        simulator = Simulator(cells)
        simulator.reset([5, 6])
        run(controller, simulator)
        found.append([array.tobytes() for array in simulator.state])
        assert simulator.state.server.num_switches.min() > 0
    assert found[0] == found[1]


# --- greedy --------------------------------------------------------------------------------------


def remembered(current, since_switch=100, since_speculation=0):
    memory = np.zeros(NUM_MEMORY)
    memory[CURRENT_TIER] = current
    memory[ROUNDS_SINCE_SWITCH] = since_switch
    memory[ROUNDS_SINCE_SPECULATION] = since_speculation
    return memory


def choice(gains, memory, margin=0.0, every=0, rounds=4):
    return greedy_choice(np.array(gains), np.array([0, 1, 3]), memory, margin, every, rounds)


def test_greedy_takes_the_best_unless_its_margin_holds_it():
    assert choice([-1.0, 0.0, -0.2], remembered(2)) == 1
    assert choice([-1.0, 0.0, -0.2], remembered(2), margin=0.3) == 2
    assert choice([-1.0, 0.0, -0.4], remembered(2), margin=0.3) == 1
    assert choice([0.0, 0.0, -0.4], remembered(1)) == 0  # equals: the first


def test_greedy_probes_after_a_long_stretch_off_and_carries_it_through():
    off = [0.0, -3.0, -2.0]
    assert choice(off, remembered(0, since_speculation=99)) == 0
    assert choice(off, remembered(0, since_speculation=99), every=100) == 0
    assert choice(off, remembered(0, since_speculation=100), every=100) == 2
    assert choice(off, remembered(2, since_switch=1), every=100, rounds=4) == 2
    assert choice(off, remembered(2, since_switch=3), every=100, rounds=4) == 0


def test_plain_greedy_stays_off_when_acceptance_returns_and_probing_does_not():
    """Acceptance falls at 3 s and rises at 6 s, and nobody joins, which would be new evidence."""
    falling = Acceptance("collapse", 0.02, 0.95, period=3.0)
    cells = [busy(falling, 8, 14_000, tiers="off,3", lengths=LONG)]
    high = {}
    for controller in (Greedy(), Greedy(probe_every=16)):
        run = record(controller, cells, [1])
        again = (run.start_s[:, 0] > 6.5) & (run.start_s[:, 0] < 9.0)
        high[controller.probe_every] = run.tier[again, 0].mean()
    assert high[None] < 0.3
    assert high[16] > 0.9


# --- the bandit ----------------------------------------------------------------------------------


def test_rewards_fade_and_bounds_are_ucb_by_hand():
    weights, sums = np.zeros(3), np.zeros(3)
    add_reward(weights, sums, 1, 1.2, 0.5)
    add_reward(weights, sums, 2, 0.8, 0.5)
    add_reward(weights, sums, 1, 1.6, 0.5)
    assert weights.tolist() == [0.0, 1.25, 0.5]
    assert sums == pytest.approx([0.0, 1.2 / 4 + 1.6, 0.4])
    steps = np.array([0, 1, 3])
    assert best_arm(weights, sums, steps, 0.0) == 1  # 1.52 against 1 and 0.8
    # ln(1.75 + 1) = 1.0116: 1.52 + 0.8996 c against 0.8 + 1.4224 c, equal at c = 1.377
    assert best_arm(weights, sums, steps, 1.37) == 1
    assert best_arm(weights, sums, steps, 1.39) == 2
    assert best_arm(np.array([0.0, 1.0, 1.0]), np.array([0.0, 0.9, 0.8]), steps, 0.0) == 0
    assert best_arm(np.array([0.0, 1.0, 0.0]), np.array([0.0, 9.0, 0.0]), steps, 0.1) == 2
    assert [bucket_of(size) for size in (1, 2, 3, 4, 255, 256, 10**6)] == [0, 1, 1, 2, 7, 8, 13]


def test_the_bandit_finds_the_best_tier():
    learnt = evaluate(Bandit(0.1, 1.0, 4), [busy(Acceptance("shared", 0.9, 0.9))], [1])
    assert learnt.tier_share[0, 2] > 0.8
    learnt = evaluate(Bandit(0.1, 1.0, 4), [cell(0.030, 0.2, tokens=8000)], [1])
    assert learnt.tier_share[0, 0] > 0.8


# --- static ones, and the registry ---------------------------------------------------------------


def test_a_table_looks_up_the_range_of_a_batch():
    table = BatchTable((1, 4, 16), (2, 1, 0))
    assert table.tier_by_size(18).tolist() == [2, 2, 2, 2, *[1] * 12, 0, 0]


def crossover_task():
    """Off takes 10 ms; depth 3 takes 11 ms up to 3 rows and 50 ms from 4 on."""
    system = calibration(off_s=0.010)
    deep = replace(
        system.costs[1],
        batch_sizes=(1, 3, 4, 8),
        base_s=(0.011, 0.011, 0.05, 0.05),
        relative_noise=(0.0,) * 4,
    )
    server = Deployment(
        replace(system, costs=(system.costs[0], deep)), tiers="off,3", max_running_requests=8
    )
    acceptance = Acceptance("shared", 0.8, 0.8)
    return Task(
        [
            Cell(server, Workload("", ClosedLoop(clients, 3000 * clients), acceptance, **LENGTHS))
            for clients in (2, 7)
        ],
        [1],
    )


def test_tuning_finds_the_crossover():
    task = crossover_task()
    threshold = make_threshold(task)
    assert isinstance(threshold, BatchThreshold)
    assert (threshold.tier, threshold.threshold) in ((1, 2), (1, 3))
    assert task.trials == 1 + len({1, 2, 3, 4, 6, 8})
    table = make_table(task)
    assert isinstance(table, BatchTable)
    # Batches of 1 are too few to judge by, and 8 clients there are none.
    assert table.tier_by_size(8)[[2, 7]].tolist() == [1, 0]


def test_every_baseline_tunes_and_none_is_worse_than_never_speculating():
    task = crossover_task()
    never = task.score(BatchThreshold(0, 0, "off"))
    scores = {}
    for name, make in BASELINES.items():
        controller = make(task)
        scores[name] = task.score(controller)
        assert controller.name
    assert scores["tuned threshold"] > never + 0.1
    assert scores["tuned ladder"] >= scores["sglang ladder"]
    assert scores["tuned greedy"] >= scores["greedy"]
    assert scores["batch table"] >= scores["tuned threshold"] - 1e-12
    assert min(scores[name] for name in scores if name != "sglang ladder") > never
    again = make_bandit(task)
    assert task.score(again) == scores["bandit"]


def test_a_users_own_controller_is_named_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "my_rules.py").write_text(
        "from training.controllers import BatchThreshold\n"
        "def make(task):\n"
        "    return task.best(BatchThreshold(1, size, 'mine') for size in (0, 3))\n"
        "value = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = load_maker("my_rules:make")(crossover_task())
    assert made.threshold == 3
    for path, what in (
        ("my_rules", "MODULE:FUNCTION"),
        ("my_rules:nothing", "nothing"),
        ("no_such_module:make", "no_such_module"),
        ("my_rules:value", "function"),
    ):
        with pytest.raises(ConfigError, match=what):
            load_maker(path)
    sys.modules.pop("my_rules")


def test_a_rule_in_numpy_needs_no_kernel():
    small = evaluate(Inspector(), [busy(Acceptance("shared", 0.5, 0.5), clients=3)], [1])
    large = evaluate(Inspector(), [busy(Acceptance("shared", 0.5, 0.5), clients=6)], [1])
    assert small.tier_share[0, 2] == 1.0
    assert large.tier_share[0, 0] > 0.9


def test_the_documented_example_runs(tmp_path, monkeypatch):
    text = training.baselines.__doc__
    code = text[text.index("    # my_rules.py") : text.index("and name it::")]
    (tmp_path / "example_rules.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    task = crossover_task()
    made = load_maker("example_rules:make")(task)
    assert made.name == "deepest up to 4 rows"
    assert task.trials == 3
    sys.modules.pop("example_rules")


def test_nothing_to_tune_is_refused():
    with pytest.raises(ConfigError, match="at least one candidate"):
        crossover_task().best([])
