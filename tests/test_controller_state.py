"""What the controller counts, remembers and sees: by hand, in statistics, and as features."""

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller import acceptance, memory
from controller.acceptance import (
    DECAYS,
    NUM_COUNTS,
    NUM_SCALES,
    PRIOR_RATE,
    PRIOR_TRIES,
    estimate_accept_len,
    observe_join,
    observe_round,
)
from controller.calibration import Calibration, PrefillCost, TierCost
from controller.features import (
    GLOBAL_FEATURES,
    NUM_GLOBAL,
    NUM_PER_TIER,
    SCRATCH_SIZE,
    TIER_FEATURES,
    fill_observation,
    observation_bounds,
    observation_size,
)
from controller.memory import FAR, NUM_MEMORY, record_join, record_launch, record_result
from controller.tiers import MAX_NUM_STEPS
from env.deployment import Deployment
from env.simulator import Cell, Simulator
from env.workload import ClosedLoop, Workload

FAST, MEDIUM, SLOW = range(NUM_SCALES)
DEPTHS = MAX_NUM_STEPS + 1
NAMES = [feature.name for feature in TIER_FEATURES]
GAINS = [NAMES.index(name) for name in ("gain_fast", "gain_medium", "gain_slow")]


class Statistics:
    """Tries and successes with hand-friendly access."""

    def __init__(self):
        self.tries, self.successes = [0.0] * NUM_COUNTS, [0.0] * NUM_COUNTS

    def observe(self, histogram, num_steps):
        observe_round(self.tries, self.successes, histogram, num_steps)

    def of(self, scale, counts):
        return counts[scale * MAX_NUM_STEPS : (scale + 1) * MAX_NUM_STEPS]

    def accept_len(self, scale):
        out = [0.0] * (NUM_SCALES * DEPTHS)
        estimate_accept_len(self.tries, self.successes, out)
        return out[scale * DEPTHS : (scale + 1) * DEPTHS]

    def rates(self, scale):
        """Return the conditional accept rate of each position, recovered from the lengths."""
        gained = np.diff(self.accept_len(scale))
        return gained / np.concatenate([[1.0], gained[:-1]])


# Acceptance statistics


def test_doctests_pass():
    result = doctest.testmod(acceptance)
    assert result.attempted > 0
    assert result.failed == 0


def test_a_round_counts_tries_and_successes_by_position():
    counts = Statistics()
    # Of 4 requests 2 failed at once, 1 after one draft, 1 accepted all three.
    counts.observe([2, 1, 0, 1, 0, 0, 0, 0], 3)
    for scale in range(NUM_SCALES):
        assert counts.of(scale, counts.tries) == [4, 2, 1, 0, 0, 0, 0]
        assert counts.of(scale, counts.successes) == [2, 1, 1, 0, 0, 0, 0]


def test_counts_decay_at_every_speculative_round_also_where_it_does_not_reach():
    counts = Statistics()
    counts.observe([0, 0, 10], 2)
    counts.observe([6, 4], 1)
    for scale, decay in enumerate(DECAYS):
        assert counts.of(scale, counts.tries)[:3] == [10 * decay + 10, 10 * decay, 0]
        assert counts.of(scale, counts.successes)[:3] == [10 * decay + 4, 10 * decay, 0]
    assert list(DECAYS) == sorted(DECAYS), "fast forgets first"


def test_histogram_entries_beyond_the_depth_are_ignored():
    counts = Statistics()
    counts.observe([3, 5, 99, 99], 1)
    assert counts.of(FAST, counts.tries)[:2] == [8, 0]
    assert counts.of(FAST, counts.successes)[:2] == [5, 0]


def test_no_evidence_gives_the_prior_at_every_position_and_scale():
    for scale in range(NUM_SCALES):
        expected = [sum(PRIOR_RATE**j for j in range(k + 1)) for k in range(DEPTHS)]
        assert Statistics().accept_len(scale) == pytest.approx(expected, rel=1e-12)


def test_chain_of_priors_by_hand():
    assert (PRIOR_RATE, PRIOR_TRIES) == (0.6, 2.0)
    counts = Statistics()
    slow, fast = SLOW * MAX_NUM_STEPS, FAST * MAX_NUM_STEPS
    counts.tries[slow], counts.successes[slow] = 8.0, 6.0
    counts.tries[fast], counts.successes[fast] = 2.0, 0.0
    # Slow: (6 + 2 * 0.6) / 10 = 0.72, and with no tries deeper positions lean on it.
    assert counts.rates(SLOW) == pytest.approx([0.72] * MAX_NUM_STEPS)
    # Medium has no evidence and copies slow.
    assert counts.rates(MEDIUM) == pytest.approx([0.72] * MAX_NUM_STEPS)
    # Fast: (0 + 2 * 0.72) / 4 = 0.36; deeper it leans on medium, not on its own neighbour.
    assert counts.rates(FAST) == pytest.approx([0.36] + [0.72] * (MAX_NUM_STEPS - 1))
    assert counts.accept_len(FAST)[2] == pytest.approx(1 + 0.36 + 0.36 * 0.72)


def test_a_join_shrinks_fast_and_medium_and_keeps_slow():
    counts = Statistics()
    counts.observe([1, 3], 1)
    observe_join(counts.tries, counts.successes, 0.25)
    for scale, keep in ((FAST, 0.75), (MEDIUM, 0.75), (SLOW, 1.0)):
        assert counts.of(scale, counts.tries)[0] == 4 * keep
        assert counts.of(scale, counts.successes)[0] == 3 * keep
    observe_join(counts.tries, counts.successes, 1.0)
    assert counts.of(MEDIUM, counts.tries) == [0.0] * MAX_NUM_STEPS
    assert counts.of(SLOW, counts.tries)[0] == 4


@pytest.mark.parametrize("scale", [FAST, MEDIUM, SLOW])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.95), (0.5, 0.8)])
def test_recovers_the_hazards_of_a_mixed_population_seen_at_changing_depths(scale, low, high):
    """Half of the requests accept rarely, half often: the hazard rises with the position."""
    rng = np.random.default_rng(7)
    rates = np.where(np.arange(20_000) % 2 == 0, low, high)
    counts = Statistics()
    for round_ in range(60):
        depth = 1 + round_ % MAX_NUM_STEPS
        hit = rng.random((len(rates), depth)) < rates[:, None]
        correct = np.minimum.accumulate(hit, axis=1).sum(axis=1)
        counts.observe(np.bincount(correct, minlength=DEPTHS).tolist(), depth)
    j = np.arange(MAX_NUM_STEPS)
    hazards = (low ** (j + 1) + high ** (j + 1)) / (low**j + high**j)
    assert counts.rates(scale) == pytest.approx(hazards, abs=0.02)
    # One rate for all positions would be far off at depth 7.
    naive = sum(hazards[0] ** k for k in range(DEPTHS))
    exact = 1 + np.cumprod(hazards).sum()
    assert counts.accept_len(scale)[7] == pytest.approx(exact, rel=0.02)
    assert abs(naive / exact - 1) > 0.05


@given(
    st.lists(st.tuples(st.integers(1, 7), st.lists(st.integers(0, 300), min_size=8, max_size=8)))
)
@settings(max_examples=50, deadline=None)
def test_accept_lengths_are_finite_and_rise_by_less_with_each_depth(rounds):
    counts = Statistics()
    for depth, histogram in rounds:
        counts.observe(histogram, depth)
    for scale in range(NUM_SCALES):
        gained = np.diff(counts.accept_len(scale))
        assert counts.accept_len(scale)[0] == 1.0
        assert np.isfinite(gained).all()
        assert (gained > 0).all()
        assert gained[0] <= 1.0
        assert (np.diff(gained) <= 1e-6).all()


# Memory


class Memory:
    """A server's memory of three tiers: off, 1 and 3 draft steps."""

    steps = (0, 1, 3)

    def __init__(self, current=2):
        self.values = [7.0] * NUM_MEMORY
        self.tries, self.successes = [7.0] * NUM_COUNTS, [7.0] * NUM_COUNTS
        self.recent, self.ages = [7.0] * 3, [7.0] * 3
        memory.reset_memory(
            self.values, self.tries, self.successes, self.recent, self.ages, current
        )

    def launch(self, tier, keeps_warm=True, batch_size=1):
        steps = self.steps[tier]
        return record_launch(
            self.values, self.ages, self.recent, tier, steps, keeps_warm, batch_size
        )

    def join(self, joined, batch):
        record_join(self.values, self.tries, self.successes, joined, batch)

    def result(self, tier, histogram, cold_start=False):
        padded = list(histogram) + [0] * (DEPTHS - len(histogram))
        record_result(
            self.tries, self.successes, self.recent, tier, self.steps[tier], cold_start, padded
        )

    def __getattr__(self, name):
        return self.values[getattr(memory, name.upper())]


def test_reset_forgets_everything_but_the_starting_tier():
    after = Memory(current=2)
    assert after.values == [2.0] + [0.0] * (NUM_MEMORY - 1)
    assert set(after.tries) == set(after.successes) == {0.0}
    assert after.recent == [1.0] * 3
    assert after.ages == [FAR] * 3


def test_launches_by_hand():
    m = Memory(current=2)
    m.launch(0)
    assert (m.current_tier, m.rounds_since_switch, m.rounds_since_speculation) == (0, 0, 1)
    assert m.ages == [0, FAR + 1, FAR + 1]
    m.launch(0)
    assert (m.current_tier, m.rounds_since_switch, m.rounds_since_speculation) == (0, 1, 2)
    m.launch(1)
    assert (m.current_tier, m.rounds_since_switch, m.rounds_since_speculation) == (1, 0, 0)
    assert m.ages == [1, 0, FAR + 3]
    m.launch(2)
    assert (m.current_tier, m.rounds_since_switch, m.rounds_since_speculation) == (2, 0, 0)
    assert m.ages == [2, 1, 0]


def test_only_the_first_draft_after_rounds_that_left_the_draft_behind_starts_cold():
    m = Memory()
    assert not m.launch(2), "nothing is stale at the start"
    assert not m.launch(0, keeps_warm=False)
    assert not m.launch(0, keeps_warm=False)
    assert m.stale_rounds == 2
    assert m.launch(1)
    assert m.stale_rounds == 0
    assert not m.launch(2)


def test_warm_off_rounds_leave_nothing_stale():
    m = Memory()
    m.launch(0, keeps_warm=True)
    assert m.stale_rounds == 0
    assert not m.launch(2)


def test_a_warm_off_round_ends_the_cold_start():
    """Its draft-extend gives the next draft a token and a state, as env/decode.py has it."""
    m = Memory()
    m.launch(0, keeps_warm=False)
    m.launch(0, keeps_warm=True)
    assert not m.launch(2)


def test_joined_requests_add_up_until_the_next_speculation():
    m = Memory()
    m.join(2, 4)
    m.launch(0)
    m.join(3, 6)
    assert m.joined == 5
    m.launch(1)
    assert m.joined == 0


def test_a_join_shrinks_the_statistics_by_the_new_share():
    m = Memory()
    m.result(1, [1, 3])
    m.join(1, 4)
    assert m.tries[0] == 3.0
    m.join(9, 3)
    assert m.tries[0] == 0.0, "no share exceeds 1"
    assert m.tries[SLOW * MAX_NUM_STEPS] == 4.0
    m.join(0, 0)


def test_results_by_hand():
    m = Memory()
    # 4 rows with 0 + 1 + 3 + 3 correct drafts: accept length 1 + 7 / 4 = 2.75.
    m.result(2, [1, 1, 0, 2])
    assert m.recent == [1.0, 1.0, pytest.approx(1.0 + 0.3 * 1.75)]
    m.result(2, [4])
    assert m.recent[2] == pytest.approx(0.7 * 1.525 + 0.3)
    assert m.tries[0] == pytest.approx(4 * DECAYS[FAST] + 4)
    assert m.successes[0] == pytest.approx(3 * DECAYS[FAST])


def test_results_of_off_and_cold_rounds_teach_nothing():
    m = Memory()
    m.result(0, [4])
    m.result(2, [4], cold_start=True)
    assert set(m.tries) == {0.0}
    assert m.recent == [1.0] * 3


def test_a_round_without_rows_keeps_the_recent_accept_length():
    m = Memory()
    m.result(2, [0, 0, 0, 0])
    assert m.recent == [1.0] * 3


def test_turnover_by_hand():
    m = Memory(current=0)
    m.launch(0, batch_size=4)
    assert (m.completed, m.tokens, m.batch) == (0, 0, 4)
    m.join(2, 6)
    m.launch(0, batch_size=6)
    assert (m.completed, m.tokens, m.batch, m.just_joined) == (0, 4, 6, 0)
    m.join(1, 5)  # two have left
    m.launch(2, batch_size=5)
    keep = 32 / 34
    assert (m.completed, m.tokens) == pytest.approx((2 * keep, 10 * keep))
    assert memory.completion_rate(m.values) == pytest.approx((2 * keep + 1) / (10 * keep + 512))
    m.recent[2] = 3.0
    m.launch(0, batch_size=5)
    assert m.tokens == pytest.approx(10 * keep + 15)


def test_completion_rate_finds_the_mean_output_length():
    m = Memory(current=0)
    rng = np.random.default_rng(5)
    left = rng.geometric(1 / 160, size=64)
    for _ in range(400):
        m.launch(0, batch_size=64)
        left -= 1
        done = left == 0
        left[done] = rng.geometric(1 / 160, size=done.sum())
        if done.any():
            m.join(int(done.sum()), 64)
    assert memory.completion_rate(m.values) == pytest.approx(1 / 160, rel=0.35)


# Features


@st.composite
def situations(draw, max_s=100.0):
    """Draw valid inputs of ``fill_observation``, far beyond what a server meets."""
    depths = draw(st.sets(st.integers(0, MAX_NUM_STEPS), min_size=1, max_size=8))
    num_tiers = len(depths)
    count = st.floats(0, 1e7, allow_nan=False)
    tries = draw(st.lists(count, min_size=NUM_COUNTS, max_size=NUM_COUNTS))
    share = draw(st.lists(st.floats(0, 1), min_size=NUM_COUNTS, max_size=NUM_COUNTS))
    rounds = st.floats(0, 2e6).map(round).map(float)
    step_s = st.floats(1e-5, max_s)
    return {
        "batch_size": draw(st.integers(1, 8192)),
        "queue_depth": draw(st.integers(0, 10**7)),
        "context_tokens": draw(st.integers(0, 10**10)),
        "kv_use": draw(st.floats(0, 1.5)),
        "max_running_requests": draw(st.integers(1, 8192)),
        "memory": [
            float(draw(st.integers(0, num_tiers - 1))),
            *(draw(rounds) for _ in range(NUM_MEMORY - 1)),
        ],
        "tries": tries,
        "successes": [t * s for t, s in zip(tries, share, strict=True)],
        "recent_accept_len": draw(
            st.lists(st.floats(1, 8), min_size=num_tiers, max_size=num_tiers)
        ),
        "ages": draw(st.lists(rounds, min_size=num_tiers, max_size=num_tiers)),
        "num_steps": sorted(depths),
        "step_s": draw(st.lists(step_s, min_size=num_tiers, max_size=num_tiers)),
        "prefill_s": draw(st.floats(0, 1)),
    }


def observe(situation):
    """Return the observation as floats: global features, and one row a tier."""
    out = [math.nan] * observation_size(len(situation["num_steps"]))
    given = {**situation, "step_s": list(situation["step_s"])}  # It is changed.
    fill_observation(out, **given, scratch=[math.nan] * SCRATCH_SIZE)
    values = np.array(out)
    return values[:NUM_GLOBAL], values[NUM_GLOBAL:].reshape(-1, NUM_PER_TIER)


def reorder(situation, order):
    """Return the situation with the tiers ``order``, which has the current one."""
    changed = dict(situation)
    for name in ("recent_accept_len", "ages", "num_steps", "step_s"):
        changed[name] = [situation[name][k] for k in order]
    changed["memory"] = list(situation["memory"])
    changed["memory"][memory.CURRENT_TIER] = float(order.index(int(situation["memory"][0])))
    return changed


@given(situations())
@settings(max_examples=200, deadline=None)
def test_every_feature_is_finite_and_in_its_range(situation):
    low, high = observation_bounds(len(situation["num_steps"]))
    values = np.concatenate([part.ravel() for part in observe(situation)])
    assert np.isfinite(values).all()
    assert (np.array(low) <= values).all()
    assert (values <= np.array(high)).all()


def test_round_time_has_its_share_of_prefill_by_hand():
    situation = {
        "batch_size": 10,
        "queue_depth": 0,
        "context_tokens": 1000,
        "kv_use": 0.4,
        "max_running_requests": 62,
        # 9 requests completed in 1,488 tokens; with the one in 512 that counts as known, 1 in 200.
        "memory": [0.0, 0.0, 0.0, 0.0, 0.0, 10.0, 0.0, 9.0, 1488.0],
        "tries": [1e6] * NUM_COUNTS,
        "successes": [0.5e6] * NUM_COUNTS,
        "recent_accept_len": [1.0, 2.0],
        "ages": [0.0, 0.0],
        "num_steps": [0, 1],
        "step_s": [0.010, 0.016],
        "prefill_s": 0.012,
    }
    _, tiers = observe(situation)
    full_s = [0.010 + 0.012 * (1 - math.exp(-10 / 200)), 0.016 + 0.012 * (1 - math.exp(-15 / 200))]
    cost = [f.name for f in TIER_FEATURES].index("cost")
    advantage = [f.name for f in TIER_FEATURES].index("advantage")
    assert tiers[1, cost] == pytest.approx(math.log(full_s[1] / full_s[0]), abs=1e-6)
    expected = 10 * (math.log(1.5) - math.log(full_s[1] / full_s[0]))
    assert tiers[1, advantage] == pytest.approx(expected, abs=1e-4)


def test_features_by_hand():
    situation = {
        "batch_size": 31,
        "queue_depth": 7,
        "context_tokens": 31 * 1023,
        "kv_use": 0.4,
        "max_running_requests": 62,
        "memory": [1.0, 15.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 0.0],
        "tries": [0.0] * NUM_COUNTS,
        "successes": [0.0] * NUM_COUNTS,
        "recent_accept_len": [1.0, 2.0],
        "ages": [63.0, 0.0],
        "num_steps": [0, 3],
        "step_s": [0.010, 0.016],
        "prefill_s": 0.0,
    }
    shared, tiers = observe(situation)
    values = dict(zip([f.name for f in GLOBAL_FEATURES], shared, strict=True))
    assert values == pytest.approx(
        {
            "batch_size": 0.5,
            "occupancy": 0.5,
            "queue_depth": 0.3,
            "context_per_request": 0.5,
            "kv_use": 0.4,
            "speculating": 1.0,
            "num_steps": 3 / 7,
            "since_switch": 4 / 12,
            "since_speculation": 0.0,
            "unseen": 5 / 31,
            **{f"accept_rate_{scale}": 0.6 for scale in ("fast", "medium", "slow")},
            **{f"evidence_{scale}": 0.0 for scale in ("fast", "medium", "slow")},
        }
    )
    # Off gives 1 token in 10 ms, 3 steps 2.176 tokens in 16 ms: a ratio of 1.36.
    ratio = 10 * math.log(2.176 / 1.6)
    ceiling = 10 * math.log((1 - 0.95**4) / 0.05 / 1.6)
    off = [1, 0, 0, 0, -ratio, -ratio, -ratio, 0, 0, 0, 0.5]
    three = [0, 3 / 7, 1, math.log(1.6), 0, 0, 0, ratio, ceiling, math.log(2), 0]
    assert tiers[0] == pytest.approx(off, abs=1e-12)
    assert tiers[1] == pytest.approx(three, abs=1e-12)


@given(situations(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_the_order_of_all_but_the_first_tier_is_immaterial(situation, random):
    rest = list(range(1, len(situation["num_steps"])))
    random.shuffle(rest)
    order = [0, *rest]
    shared, tiers = observe(situation)
    shared_after, tiers_after = observe(reorder(situation, order))
    assert shared_after == pytest.approx(shared, abs=0)
    assert tiers_after == pytest.approx(tiers[order], abs=0)


@given(situations(), st.data())
@settings(max_examples=50, deadline=None)
def test_a_tier_knows_other_tiers_only_by_the_best_one(situation, data):
    """Leaving tiers out changes no feature but the gains, and these by one constant a scale."""
    num_tiers = len(situation["num_steps"])
    current = int(situation["memory"][memory.CURRENT_TIER])
    kept = data.draw(st.sets(st.integers(0, num_tiers - 1))) | {0, current}
    order = sorted(kept)
    shared, tiers = observe(situation)
    shared_after, tiers_after = observe(reorder(situation, order))
    own = [i for i in range(NUM_PER_TIER) if i not in GAINS]
    assert shared_after == pytest.approx(shared, abs=0)
    assert tiers_after[:, own] == pytest.approx(tiers[order][:, own], abs=0)
    for gain in GAINS:
        lost = tiers_after[:, gain] - tiers[order, gain]
        inside = (tiers[order, gain] > -2) & (tiers_after[:, gain] > -2)
        assert lost[inside] == pytest.approx(np.full(inside.sum(), lost.max()), abs=1e-12)
        assert tiers_after[:, gain].max() == 0


@given(situations(max_s=1.0), st.floats(1e-3, 1e3))
@settings(max_examples=50, deadline=None)
def test_a_faster_machine_with_equal_ratios_looks_the_same(situation, factor):
    scaled = dict(situation, step_s=[s * factor for s in situation["step_s"]])
    scaled["prefill_s"] = situation["prefill_s"] * factor
    for before, after in zip(observe(situation), observe(scaled), strict=True):
        assert after == pytest.approx(before, abs=1e-9)


@pytest.mark.parametrize("count", [0.0, 1e12])
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("step_s", [1e-9, 1e9])
def test_no_extreme_gives_a_number_out_of_range(count, share, step_s):
    situation = {
        "batch_size": 1,
        "queue_depth": 2**40,
        "context_tokens": 2**60,
        "kv_use": 1e9,
        "max_running_requests": 1,
        "memory": [0.0] + [1e300] * (NUM_MEMORY - 1),
        "tries": [count] * NUM_COUNTS,
        "successes": [count * share] * NUM_COUNTS,
        "recent_accept_len": [1.0, 8.0],
        "ages": [1e300, 0.0],
        "num_steps": [0, 7],
        "step_s": [step_s, 1.0],
        "prefill_s": step_s,
    }
    low, high = observation_bounds(2)
    values = np.concatenate([part.ravel() for part in observe(situation)])
    assert ((np.array(low) <= values) & (values <= np.array(high))).all()


@pytest.fixture(scope="module")
def simulator():
    """A simulator of three tiers, whose state the test overwrites."""
    costs = [TierCost(name, (1,), (0.01,), 0.0, (0.0,), 1, 1) for name in ("native", "1", "3")]
    prefill = PrefillCost(0.0, 0.0)
    calibration = Calibration("toy", tuple(costs), prefill, prefill)
    deployment = Deployment(calibration, "native,1,3", max_running_requests=64)
    return Simulator([Cell(deployment, Workload("any", ClosedLoop(1, 1)))])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_lists_and_compiled_arrays_agree(simulator, dtype, data):
    """The server computes on lists, the simulator with compiled code on arrays."""
    situation = data.draw(situations(max_s=1.0))
    order = (data.draw(st.permutations(range(len(situation["num_steps"])))) * 3)[:3]
    situation["memory"][memory.CURRENT_TIER] = float(order[0])
    situation = reorder(situation, order)
    situation["num_steps"] = [0, 1, 3]
    situation["batch_size"] = min(situation["batch_size"], 64)
    situation["max_running_requests"] = 64
    state, costs = simulator.state, simulator.costs
    server = state.server[0]
    server.num_running = situation["batch_size"]
    server.num_waiting = situation["queue_depth"]
    server.context_tokens = situation["context_tokens"]
    server.kv_tokens = 3 * server.context_tokens // 2
    situation["kv_use"] = server.kv_tokens / state.config[0].kv_capacity_tokens
    state.memory[0] = situation["memory"]
    state.tries[0] = situation["tries"]
    state.successes[0] = situation["successes"]
    state.recent[0] = situation["recent_accept_len"]
    state.ages[0] = situation["ages"]
    costs.base_s[0] = np.array(situation["step_s"])[:, None]
    costs.prefill_base_s[0] = situation["prefill_s"]
    compiled = np.full((1, observation_size(3)), np.nan, dtype)
    simulator.observe(compiled)
    listed = np.concatenate([part.ravel() for part in observe(situation)])
    assert compiled[0] == pytest.approx(listed, rel=0, abs=1e-6)
    low, high = (np.array(bound, dtype) for bound in observation_bounds(3))
    assert ((low <= compiled[0]) & (compiled[0] <= high)).all()
