"""The simulated server, against scenarios that are worked out by hand."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from controller.calibration import Calibration, PrefillCost, TierCost
from controller.features import GLOBAL_FEATURES
from env.acceptance_process import Acceptance, DraftRecovery
from env.deployment import Deployment
from env.simulator import Cell, Simulator
from env.workload import ClosedLoop, Lengths, OpenLoop, RequestTable, Workload

pytestmark = pytest.mark.usefixtures("one_thread")

ALWAYS = Acceptance("shared", 1.0, 1.0)
NEVER = Acceptance("shared", 0.0, 0.0)
NO_SWITCHING_COST = DraftRecovery(cold_start_share=1.0, worst_loss=0.0)


def calibration(sizes=(1,), base_s=(0.010,), **changes):
    """Return a system whose tiers all take the same time, without noise."""
    costs = tuple(
        TierCost(name, sizes, base_s, 0.0, (0.0,) * len(sizes), 10**9, 1)
        for name in ("native", "cold", "warm", "1", "3")
    )
    prefill = PrefillCost(0.1, 0.001)
    return Calibration("toy", costs, prefill, prefill, **changes)


def deployment(tiers="native,3", system=None, **changes):
    """Return a server with a one-million-token cache and no overlap, unless changed."""
    return Deployment(system or calibration(), tiers, **{"overlap": False, **changes})


@dataclass(frozen=True)
class FixedRequests(Workload):
    """Requests given one by one, as tuples of arrival, prompt tokens and output tokens."""

    requests: tuple[tuple[float, int, int], ...] = ()

    def max_requests(self):
        return len(self.requests)

    def sample(self, seed):
        arrival, prompt, output = zip(*self.requests, strict=True)
        return RequestTable(
            np.array(arrival, float),
            np.array(prompt, np.int32),
            np.array(output, np.int32),
            self.outputs.high,
        )


class Run:
    """One server under fixed requests; open loop, or closed with some clients."""

    def __init__(self, server, requests, clients=None, acceptance=NEVER, max_new=1000, seed=0):
        load = OpenLoop(1.0, 1.0, 1.0, len(requests))
        if clients is not None:
            load = ClosedLoop(clients, sum(output for _, _, output in requests))
        high = max(prompt for _, prompt, _ in requests)
        workload = FixedRequests(
            "fixed",
            load,
            acceptance,
            Lengths(1, 0, 1, high),
            Lengths(1, 0, 1, max_new),
            tuple(requests),
        )
        self.simulator = Simulator([Cell(server, workload)])
        self.simulator.reset([seed])
        self.state = self.simulator.state

    @property
    def server(self):
        return self.state.server[0]

    @property
    def request(self):
        return self.state.request[0]

    @property
    def running(self):
        return self.state.running[0, : self.server.num_running].tolist()

    @property
    def first_tries(self):
        """Decayed tries of the first draft position, at the fast scale."""
        return self.state.tries[0, 0]

    def step(self, tier=0, times=1):
        for _ in range(times):
            assert not self.server.done
            self.simulator.step(np.array([tier]))
        return self

    def finish(self, tier=0, check=lambda run: None):
        while not self.server.done:
            check(self)
            self.step(tier)
        return self

    def feature(self, name):
        out = np.zeros((1, self.simulator.observation_size), np.float32)
        self.simulator.observe(out)
        return out[0, [f.name for f in GLOBAL_FEATURES].index(name)]


# Time


def test_one_request_takes_its_prefill_and_a_round_for_every_further_token():
    run = Run(deployment(), [(0.0, 100, 5)])
    assert run.server.now_s == pytest.approx(0.1 + 100 * 0.001), "the prefill is over"
    assert run.request[0].generated == 1, "and gave the first token"
    run.finish()
    assert run.server.num_rounds == 4
    assert run.request[0].first_token_s == pytest.approx(0.2)
    assert run.request[0].finish_s == pytest.approx(0.2 + 4 * 0.010)


def test_a_perfect_draft_of_three_gives_four_tokens_a_round():
    run = Run(deployment(), [(0.0, 100, 9)], acceptance=ALWAYS).finish(tier=1)
    assert run.server.num_rounds == 2
    assert run.request[0].finish_s == pytest.approx(0.22)
    assert (run.server.num_proposed, run.server.num_correct) == (6, 6)


def test_tokens_beyond_the_last_one_are_thrown_away():
    run = Run(deployment(), [(0.0, 100, 7)], acceptance=ALWAYS).finish(tier=1)
    assert run.server.num_rounds == 2
    assert run.request[0].generated == 7
    assert run.server.output_tokens == 7


def test_the_clock_jumps_over_idle_time():
    run = Run(deployment(), [(1.5, 100, 2), (5.0, 100, 2)])
    assert run.server.now_s == pytest.approx(1.7)
    run.finish()
    assert run.request[0].finish_s == pytest.approx(1.71)
    assert run.request[1].finish_s == pytest.approx(5.21)
    assert run.server.area == pytest.approx(2 * 0.21), "nobody waits while nobody is there"


def test_expected_tokens_are_the_mean_of_those_drawn():
    run = Run(
        deployment("native,3", max_running_requests=400),
        [(0.0, 1, 3)] * 400,
        acceptance=Acceptance("shared", 0.5, 0.5),
    )
    before = run.server.expected_tokens
    run.step(tier=1)
    # Two tokens are left: 1 + 0.5 of them are expected, for any depth.
    assert (run.server.expected_tokens - before) / 400 == pytest.approx(1.5)


def test_round_time_has_a_context_term():
    system = calibration()
    costs = tuple(replace(cost, context_s_per_token=1e-4) for cost in system.costs)
    run = Run(deployment(system=replace(system, costs=costs)), [(0.0, 100, 3)]).finish()
    # The rounds read 101 and 102 tokens.
    assert run.request[0].finish_s == pytest.approx(0.2 + 0.010 + 0.0101 + 0.010 + 0.0102)


@pytest.mark.parametrize(("batch", "padded"), [(31, 32), (32, 32), (33, 64), (64, 64), (65, 65)])
def test_a_batch_costs_as_much_as_the_next_captured_graph(batch, padded):
    graphs = tuple(2**i for i in range(7))
    system = calibration((1, 128), (0.001, 0.128), cuda_graph_batch_sizes=graphs)
    run = Run(deployment(system=system), [(0.0, 1, 2)] * batch)
    before = run.server.now_s
    run.step()
    assert run.server.now_s - before == pytest.approx(padded * 0.001)


def test_noise_scatters_round_times_and_can_be_left_out():
    system = calibration()
    costs = tuple(replace(cost, relative_noise=(0.1,)) for cost in system.costs)
    system = replace(system, costs=costs)
    exact, noisy, again = (
        Run(deployment(system=system, noise=noise), [(0.0, 100, 401)]).finish()
        for noise in (False, True, True)
    )
    assert exact.request[0].finish_s == pytest.approx(0.2 + 4.0)
    mean_s = (noisy.request[0].finish_s - 0.2) / 400
    assert mean_s != 0.010
    assert mean_s == pytest.approx(0.010, rel=3 * 0.1 / 400**0.5)
    assert again.server.now_s == noisy.server.now_s


# Closed loop and the overlap schedule


def test_closed_loop_of_two_clients():
    run = Run(deployment(), [(0.0, 100, 3)] * 4, clients=2).finish()
    # Both are prefilled together (0.3 s) and need two rounds, twice.
    assert run.request.finish_s == pytest.approx([0.32, 0.32, 0.64, 0.64])
    assert run.request.arrival_s == pytest.approx([0.0, 0.0, 0.32, 0.32])
    assert run.request.first_token_s == pytest.approx([0.3, 0.3, 0.62, 0.62])


@pytest.mark.parametrize(("overlap", "last_s"), [(False, 0.34), (True, 0.35)])
def test_under_overlap_a_finished_request_costs_one_more_row(overlap, last_s):
    system = calibration((1, 2), (0.010, 0.020))
    run = Run(deployment(system=system, overlap=overlap), [(0.0, 100, 2), (0.0, 100, 4)])
    run.step()
    assert run.request[0].finish_s == pytest.approx(0.32)
    assert run.running == ([0, 1] if overlap else [1])
    run.step()
    assert run.running == [1]
    run.finish()
    assert run.request[0].generated == 2, "the further row gives nothing"
    assert run.request[1].finish_s == pytest.approx(last_s)


@pytest.mark.parametrize(("overlap", "rows"), [(False, 1), (True, 2)])
def test_the_row_of_a_finished_request_is_in_the_accept_results(overlap, rows):
    run = Run(deployment(overlap=overlap), [(0.0, 100, 2), (0.0, 100, 9)], acceptance=NEVER)
    run.step(tier=1, times=2)
    assert run.state.histogram[0].sum() == rows


def test_without_overlap_a_decision_sees_the_last_round():
    run = Run(deployment(overlap=False), [(0.0, 100, 90)], acceptance=ALWAYS)
    assert run.feature("evidence_fast") == 0
    run.step(tier=1)
    assert run.first_tries == 1
    assert run.feature("evidence_fast") > 0


def test_under_overlap_a_decision_sees_the_round_before_the_last():
    run = Run(deployment(overlap=True), [(0.0, 100, 90)], acceptance=ALWAYS)
    run.step(tier=1)
    assert run.first_tries == 0
    assert run.feature("evidence_fast") == 0
    run.step(tier=0)
    assert run.first_tries == 1
    assert run.feature("evidence_fast") > 0
    run.step(tier=0)
    assert run.first_tries == 1, "off rounds add nothing and forget nothing"


def test_under_overlap_a_client_waits_one_round_to_be_seen():
    runs = [Run(deployment(overlap=o), [(0.0, 100, 2)] * 2, clients=1) for o in (False, True)]
    for run in runs:
        run.finish()
    # The next request arrives at 0.21; under overlap a round with the old row is under way.
    assert [run.request[1].first_token_s for run in runs] == pytest.approx([0.41, 0.42])


# Prefill


def test_prefill_is_split_in_chunks_and_the_last_one_is_filled_up():
    run = Run(deployment(chunk_tokens=64), [(0.0, 150, 2), (0.0, 20, 2)])
    assert run.server.num_rounds == 0, "no decoding between the chunks"
    # 64 + 64 + (22 + 20) tokens.
    assert run.server.now_s == pytest.approx(3 * 0.1 + 0.170)
    assert run.request.first_token_s == pytest.approx([0.47, 0.47])
    assert run.server.num_batches == 3


def test_a_request_that_does_not_fit_in_the_chunk_is_begun():
    run = Run(deployment(chunk_tokens=64), [(0.0, 40, 2), (0.0, 40, 2)])
    # 40 + 24, then the other 16: the first request is served while the second is not.
    assert run.request.first_token_s == pytest.approx([0.164, 0.28])
    assert run.running == [0, 1]


@pytest.mark.parametrize(("overlap", "rounds_before"), [(False, 1), (True, 2)])
def test_prefill_goes_before_decoding(overlap, rounds_before):
    run = Run(deployment(overlap=overlap), [(0.0, 100, 10), (0.205, 100, 2)])
    run.step(times=rounds_before)
    # The arrival during the first round is seen after it, or a round later under overlap.
    seen_s = 0.2 + rounds_before * 0.010
    assert run.request[1].first_token_s == pytest.approx(seen_s + 0.2)
    run.finish()
    assert run.request[0].finish_s == pytest.approx(0.2 + 0.2 + 9 * 0.010)


def test_arrivals_during_a_prefill_are_prefilled_next():
    run = Run(deployment(), [(0.0, 100, 3), (0.05, 100, 3), (0.15, 100, 3)])
    assert run.server.num_rounds == 0
    assert run.request.first_token_s == pytest.approx([0.2, 0.5, 0.5])


def test_max_running_requests_is_respected_first_come_first_served():
    def check(run):
        assert run.server.num_running <= 2
        assert run.server.num_running + run.server.num_waiting + run.server.num_finished == 5

    run = Run(deployment(max_running_requests=2), [(0.0, 100, 3 + i) for i in range(5)])
    assert (run.server.num_running, run.server.num_waiting) == (2, 3)
    run.finish(check=check)
    assert (np.diff(run.request.first_token_s) >= 0).all()
    assert run.server.num_finished == 5


# KV cache


@pytest.mark.parametrize(("capacity", "running"), [(1721, [0]), (1722, [0, 1])])
def test_admission_reserves_for_what_the_running_requests_may_still_add(capacity, running):
    # The first holds 10 + 1 tokens and a slot, and is expected to add 70% of the 999 that it may.
    # The second needs 10 + 1000 tokens and a slot: 12 + 699 + 1011 = 1722.
    server = deployment("native", kv_capacity_tokens=capacity)
    assert Run(server, [(0.0, 10, 60)] * 2).running == running


def test_a_request_that_was_refused_waits_until_another_leaves():
    run = Run(deployment("native", kv_capacity_tokens=1715), [(0.0, 10, 60)] * 2)
    while run.server.num_finished == 0:
        assert run.running == [0]
        run.step()
    assert run.running == [1]


def test_the_last_chunk_of_a_prompt_is_not_free_for_others():
    # Chunks of 64, 64, 64 and 8; beside the last one the second request would just fit if the 8
    # tokens did not count: 254 - 193 held - 10 allowed = 51 = 40 + 10 allowed + 1 slot.
    requests = [(0.0, 200, 10), (0.0, 40, 10)]
    server = deployment("native", chunk_tokens=64, kv_capacity_tokens=254)
    run = Run(server, requests, max_new=10)
    assert run.running == [0]


def test_retraction_takes_the_request_with_the_fewest_output_tokens():
    seen = []

    def check(run):
        run.state.config[0].kv_capacity_tokens = 1715
        assert run.server.kv_tokens <= 1715
        if run.server.num_retracted > len(seen):
            seen.append((run.running, run.request.generated.tolist()))

    requests = [(0.0, 10, 1000), (0.115, 10, 1000)]
    run = Run(deployment("native", kv_capacity_tokens=4000), requests).step(times=2)
    assert run.running == [0, 1]
    run.finish(check=check)
    assert len(seen) == run.server.num_retracted >= 1
    running, generated = seen[0]
    assert running == [0]
    assert generated[0] > generated[1] > 0, "the one with fewer went, and kept its tokens"
    # Both held 10 + g + 1; a round adds two tokens, and these were too many.
    assert sum(generated) + 22 in (1716, 1717)
    assert run.request.generated.tolist() == [1000, 1000]
    assert run.request[1].finish_s > run.request[0].finish_s
    assert run.request[1].first_token_s < run.request[0].finish_s, "its first token stays first"


def test_of_equally_many_output_tokens_the_longest_prompt_is_retracted():
    requests = [(0.0, 20, 100), (0.0, 40, 100), (0.0, 30, 100)]
    run = Run(deployment("native", kv_capacity_tokens=4 * 141), requests, max_new=100)
    assert run.running == [0, 1, 2]
    run.step(times=20)
    # All three have 21 tokens; let the cache shrink below what they hold.
    run.state.config[0].kv_capacity_tokens = run.server.kv_tokens
    run.step()
    assert run.running == [0, 2]
    assert run.server.num_retracted == 1


def test_of_equal_requests_the_last_of_the_batch_is_retracted():
    requests = [(0.0, 20, 100)] * 3
    run = Run(deployment("native", kv_capacity_tokens=4 * 141), requests, max_new=100)
    run.step(times=20)
    run.state.config[0].kv_capacity_tokens = run.server.kv_tokens
    run.step()
    assert run.running == [0, 1]


def test_a_retracted_request_prefills_its_prompt_and_output_anew():
    requests = [(0.0, 20, 100), (0.0, 40, 100)]
    run = Run(deployment("native", kv_capacity_tokens=141 * 2), requests, max_new=100)
    run.step(times=20)
    run.state.config[0].kv_capacity_tokens = run.server.kv_tokens
    run.step()
    assert run.running == [0]
    run.state.config[0].kv_capacity_tokens = 10_000
    before_s = run.server.now_s
    run.step()
    # The round, then a prefill of 40 + 22 tokens that gives one more.
    assert run.server.now_s - before_s == pytest.approx(0.010 + 0.1 + 0.062)
    assert run.request[1].generated == 23


def test_retraction_estimates_the_new_token_ratio_as_sglang_does():
    requests = [(0.0, 20, 100), (0.0, 40, 100)]
    run = Run(deployment("native", kv_capacity_tokens=141 * 2), requests, max_new=100)
    run.step(times=20)
    run.state.config[0].kv_capacity_tokens = run.server.kv_tokens
    run.step()
    assert run.server.new_token_ratio == pytest.approx((22 + 20) / (100 + 1))


# Draft state


@pytest.mark.parametrize("off", ["native", "cold"])
def test_the_first_draft_after_a_cold_stretch_accepts_nothing(off):
    run = Run(deployment(f"{off},3"), [(0.0, 100, 500)], acceptance=ALWAYS)
    run.step(tier=0, times=6)
    assert run.request[0].stale_tokens == 6
    before = run.request[0].generated
    run.step(tier=1)
    assert run.request[0].generated == before + 1, "nothing but the bonus token"
    assert run.request[0].stale_tokens == 0
    assert run.first_tries == 0, "and the estimate leaves the round out"
    run.step(tier=1)
    assert run.first_tries == 1


def test_warm_off_keeps_the_draft_current():
    run = Run(deployment("warm,3"), [(0.0, 100, 500)], acceptance=ALWAYS)
    run.step(tier=0, times=6)
    run.step(tier=1)
    assert run.request[0].generated == 1 + 6 + 4
    assert run.request[0].deficit == 0
    assert run.first_tries == 1


def test_no_switching_cost_when_the_recovery_says_so():
    server = deployment("native,3", recovery=NO_SWITCHING_COST)
    run = Run(server, [(0.0, 100, 500)], acceptance=ALWAYS)
    run.step(tier=0, times=6).step(tier=1)
    assert run.request[0].generated == 1 + 6 + 4


def test_a_longer_gap_leaves_a_larger_deficit_that_drafting_makes_up():
    recovery = DraftRecovery(cold_start_share=0.0, worst_loss=0.5, gap_scale_tokens=32.0)
    deficits = []
    for gap in (8, 32, 96):
        run = Run(deployment(recovery=recovery), [(0.0, 100, 900)], acceptance=ALWAYS)
        run.step(tier=0, times=gap).step(tier=1)
        deficits.append(float(run.request[0].deficit))
    assert deficits == pytest.approx([0.2, 0.5, 0.75])
    path = [deficits[-1]]
    for _ in range(30):
        run.step(tier=1)
        path.append(float(run.request[0].deficit))
    assert (np.diff(path) < 0).all()
    assert path[-1] < 0.02


def test_the_accept_rate_is_short_by_the_share_of_the_deficit():
    recovery = DraftRecovery(0.0, worst_loss=0.5, gap_scale_tokens=50.0, recovery_tokens=1e9)
    server = deployment("native,1", recovery=recovery, max_running_requests=400)
    run = Run(server, [(0.0, 1, 900)] * 400, acceptance=Acceptance("shared", 0.8, 0.8))
    run.step(tier=0, times=50).step(tier=1)
    before = run.server.num_correct
    run.step(tier=1, times=10)
    # Deficit 50 / (50 + 50), so 0.8 * (1 - 0.5 * 0.5) = 0.6 of 4,000 drafts; 3 sigma is 0.023.
    assert (run.server.num_correct - before) / 4000 == pytest.approx(0.6, abs=0.023)


def test_half_of_the_deficit_is_left_after_the_recovery_tokens_however_they_come():
    recovery = DraftRecovery(worst_loss=0.0, gap_scale_tokens=32.0, recovery_tokens=8.0)
    left = []
    for acceptance, rounds in ((NEVER, 8), (ALWAYS, 2)):
        server = deployment(recovery=recovery)
        run = Run(server, [(0.0, 100, 900)], acceptance=acceptance)
        run.step(tier=0, times=96).step(tier=1)
        before = float(run.request[0].deficit)
        run.step(tier=1, times=rounds)
        left.append(float(run.request[0].deficit) / before)
    assert left == pytest.approx([0.5, 0.5])


def test_a_second_gap_does_not_heal_the_first():
    recovery = DraftRecovery(gap_scale_tokens=32.0, recovery_tokens=1e9)
    run = Run(deployment(recovery=recovery), [(0.0, 100, 900)], acceptance=ALWAYS)
    run.step(tier=0, times=96).step(tier=1)
    run.step(tier=0, times=2).step(tier=1)
    assert run.request[0].deficit == pytest.approx(0.75)


def test_a_request_that_joins_has_a_current_draft():
    run = Run(deployment("native,3"), [(0.0, 100, 300), (0.225, 100, 300)], acceptance=ALWAYS)
    run.step(tier=0, times=3)
    assert run.running == [0, 1]
    assert run.request[0].stale_tokens > 0
    assert run.request[1].stale_tokens == 0
    before = run.request.generated.tolist()
    run.step(tier=1)
    assert (run.request.generated - before).tolist() == [1, 4]


# Requests and accept rates


def test_rates_drift_between_their_bounds_and_hold_for_half_a_period():
    from env.acceptance_process import accept_rate  # compiled: import where it is used

    run = Run(deployment(), [(0.0, 1, 2)], acceptance=Acceptance("shared", 0.3, 0.9, 4.0))
    config = run.state.config[0]
    rates = np.array([accept_rate(config, 0, 0, t / 10) for t in range(4000)])
    assert 0.3 <= rates.min() < 0.35
    assert 0.85 < rates.max() <= 0.9
    held = rates.reshape(-1, 40)[:, :20]
    assert (held == held[:, :1]).all()
    assert np.abs(np.diff(rates)).max() < 0.6 / 20 + 1e-9, "no jumps"


def test_arrivals_follow_the_swing():
    load = OpenLoop(1.0, 9.0, 60.0, 20_000)
    times = load.arrivals(np.random.default_rng(1))
    assert (np.diff(times) > 0).all()
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.03)
    phase = np.histogram(times % 60.0, bins=6, range=(0, 60))[0] / (times[-1] / 60.0) / 10.0
    middle = np.array([5, 15, 25, 35, 45, 55]) / 60.0
    # Mean of the raised cosine over a sixth of the swing.
    expected = 5.0 - 4.0 * np.cos(2 * np.pi * middle) * np.sinc(1 / 6)
    assert phase == pytest.approx(expected, rel=0.1)


def test_lengths_have_the_mean_that_they_claim():
    lengths = Lengths(median=448, sigma=0.5, low=16, high=1000)
    drawn = lengths.sample(np.random.default_rng(2), 200_000)
    assert drawn.min() >= 16
    assert drawn.max() == 1000
    assert drawn.mean() == pytest.approx(lengths.mean(), rel=0.005)


@pytest.mark.parametrize("clients", [1, 3, 50])
def test_a_closed_loop_never_runs_out_of_requests(clients):
    load = ClosedLoop(clients, tokens=2_000)
    workload = Workload("closed", load, NEVER, Lengths(10, 0.5, 1, 50), Lengths(20, 1.0, 1, 200))
    simulator = Simulator([Cell(deployment(), workload)])
    for seed in range(20):
        simulator.reset([seed])
        simulator.run_tables(np.zeros((1, 300), np.int64))
        server = simulator.state.server[0]
        assert server.output_tokens >= 2_000
        assert server.num_in_system == clients, "every client still has a request"
