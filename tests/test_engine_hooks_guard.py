"""The guard: what is measured overrules the policy, on all ranks from the same round on."""

import random

import pytest

from engine_hooks.guard import (
    FORCE_ROUNDS,
    MAX_TRIES,
    PATIENCE_ROUNDS,
    PROBE,
    PROBE_ROUNDS,
    SYNC_ROUNDS,
    Guard,
    bucket_of,
)

NUM_STEPS = (0, 1, 3)
NAMES = ("cold", "1", "3")
STATIC = 2
PREDICTED_S = [0.010, 0.012, 0.016]
ACCEPT_LEN = (1.0, 1.6, 2.4)


class Ranks:
    """Two ranks, and the rounds that a server would run under their guards."""

    def __init__(self, times_s, estimates=None, policy=0):
        self.times_s = times_s
        self.policy = policy
        self.estimates = estimates or (lambda tier: (ACCEPT_LEN[tier], ACCEPT_LEN[tier]))
        self.sent = []
        self.noise = random.Random(0)
        self.first = self.make(True, self.send)
        self.second = self.make(False, lambda order: self.sent[-1])
        self.last = None

    def make(self, measures, share):
        return Guard(NUM_STEPS, NAMES, STATIC, lambda t: self.estimates(t), share, measures)

    def send(self, order):
        self.sent.append(order)
        return order

    def round(self, batch_size=8):
        """Run a round; return its tier and whether the guard chose it."""
        forced = []
        for guard in (self.first, self.second):
            guard.begin_round(lambda: None)
            forced.append(guard.tier(batch_size))
        assert forced[0] == forced[1]
        tier = self.policy if forced[0] is None else forced[0]
        self.first.measured(
            tier,
            batch_size,
            round(batch_size * ACCEPT_LEN[tier]),
            self.times_s[tier] * self.noise.uniform(0.95, 1.05),
            PREDICTED_S,
            forced[0] is None,
            tier == self.last,
        )
        self.last = tier
        return tier, forced[0] is not None

    def run(self, rounds, batch_size=8):
        return [self.round(batch_size) for _ in range(rounds)]


def test_a_policy_that_sticks_to_the_worst_tier_is_overruled():
    ranks = Ranks([0.010, 0.012, 0.016], policy=0)  # 3 steps make 1.5 times as much
    rounds = ranks.run(300)
    assert ranks.first.forced == ranks.second.forced == 1
    start = next(i for i, (tier, _) in enumerate(rounds) if (tier, _) == (2, True) and i > 100)
    assert start <= 300
    assert rounds[start:] == [(2, True)] * (300 - start)
    rounds += ranks.run(start + FORCE_ROUNDS - 300)
    assert rounds[start:] == [(2, True)] * FORCE_ROUNDS
    assert ranks.round() == (0, False)
    tried = [tier for tier, forced in rounds[:start] if forced]
    assert set(tried) <= {1, 2}
    assert len(tried) in (PROBE_ROUNDS, 2 * PROBE_ROUNDS)


def test_a_good_policy_is_left_alone_but_for_one_look_at_the_static_tier_and_at_off():
    ranks = Ranks([0.010, 0.012, 0.013], policy=2)
    rounds = ranks.run(3000)
    assert ranks.first.forced == 0
    # The static tier is the policy's own; off is the other one.
    assert [tier for tier, forced in rounds if forced] == [0] * PROBE_ROUNDS


def test_a_calibration_that_is_wrong_is_found_out_by_the_static_tier():
    """By the calibration off is best; in truth it takes three times as long."""
    ranks = Ranks([0.048, 0.012, 0.016], policy=0)
    rounds = ranks.run(PATIENCE_ROUNDS + 4 * SYNC_ROUNDS)
    assert ranks.first.forced == 1
    assert rounds[-1] == (2, True)


def test_within_the_tolerance_nothing_is_forced():
    same = 0.010 * ACCEPT_LEN[2]
    ranks = Ranks([0.0104, 0.0104 * ACCEPT_LEN[1], same], policy=0)  # 4% behind at most
    ranks.run(3000)
    assert ranks.first.forced == 0


def test_a_break_in_the_lag_starts_the_count_anew():
    ranks = Ranks([0.010, 0.012, 0.016], policy=0)
    for _ in range(20):
        ranks.policy = 0
        ranks.run(2 * SYNC_ROUNDS)
        ranks.policy = 2
        ranks.run(2 * SYNC_ROUNDS)
    assert ranks.first.forced == 0


def test_a_forced_tier_that_falls_behind_is_released():
    ranks = Ranks([0.010, 0.012, 0.016], policy=0)
    ranks.run(300)
    assert ranks.first.active
    ranks.estimates = lambda tier: (1.05, 1.05) if tier else (1.0, 1.0)  # acceptance collapses
    rounds = ranks.run(SYNC_ROUNDS + 1)
    assert rounds[-1] == (0, False)
    assert not ranks.second.active


def test_an_order_is_for_its_batch_sizes_only():
    ranks = Ranks([0.010, 0.012, 0.016], policy=0)
    ranks.run(300)
    assert ranks.round(8) == (2, True)
    assert ranks.round(5) == (2, True)
    assert ranks.round(4) == (0, False)
    assert ranks.round(9) == (0, False)


def test_stale_and_guessed_acceptance_do_not_overrule_alone():
    for estimates in ((2.4, 1.2), (1.2, 2.4)):
        ranks = Ranks(
            [0.010, 0.012, 0.016], estimates=lambda tier, e=estimates: e if tier else (1.0, 1.0)
        )
        ranks.run(2000)
        assert ranks.first.forced == 0


def test_a_tier_that_cannot_be_measured_is_not_tried_for_ever():
    ranks = Ranks([0.010, 0.012, 0.016], policy=0)
    for _ in range(6000):
        # As soon as it is tried, the batch leaves the bucket.
        ranks.round(16 if ranks.first.active else 8)
    tried = [order for order in ranks.sent if order[0] == PROBE and order[2] == bucket_of(8)]
    assert [order[1] for order in tried].count(2) == MAX_TRIES


def test_a_round_that_waited_for_the_host_hardly_counts():
    ranks = Ranks([0.010, 0.0164, 0.0245], policy=2)  # all are as good
    ranks.run(200)
    usual = ranks.times_s
    for _ in range(40):
        ranks.times_s = [0.010, 0.0164, 2.0]
        ranks.run(1)
        ranks.times_s = usual
        ranks.run(49)
    assert ranks.first.forced == 0


def test_a_verdict_that_fails_is_no_verdict_and_the_other_ranks_get_it(caplog):
    ranks = Ranks([0.010, 0.012, 0.016], policy=0)

    def fails(tier):
        raise RuntimeError("planted")

    ranks.estimates = fails
    ranks.run(2 * SYNC_ROUNDS)
    assert ranks.sent == [(0, 0, 0, 0)] * 2
    assert "planted" in caplog.text


@pytest.mark.parametrize(("size", "bucket"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6)])
def test_buckets(size, bucket):
    assert bucket_of(size) == bucket


def test_every_batch_size_has_its_own_verdict():
    ranks = Ranks([0.010, 0.012, 0.016], policy=0)
    chance = random.Random(5)
    sizes = [chance.choice((8, 8, 8, 16, 16)) for _ in range(4000)]
    forced = {8: 0, 16: 0}
    for size in sizes:
        forced[size] += ranks.round(size) == (2, True)
    for size, count in forced.items():
        assert count > 0.55 * sizes.count(size)


def test_a_policy_that_mixes_good_and_bad_rounds_is_overruled_for_long():
    ranks = Ranks([0.010, 0.012, 0.016], policy=0)
    rounds = []
    for index in range(3000):
        ranks.policy = 2 if index % 5 < 3 else 0  # mostly the best tier, but not enough
        rounds.append(ranks.round())
    assert ranks.first.forced <= 3
    assert rounds.count((2, True)) > 2000


def test_a_policy_that_switches_every_round_is_overruled():
    ranks = Ranks([0.010, 0.0155, 0.016], policy=0)
    for index in range(1000):
        ranks.policy = index % 2
        ranks.round()
    assert ranks.first.forced >= 1
    assert ranks.round() == (2, True)


def test_a_stall_while_a_tier_is_tried_does_not_condemn_it():
    ranks = Ranks([0.010, 0.012, 0.016], policy=0)
    usual, stalls = ranks.times_s, 1
    for _ in range(400):
        tried = ranks.first.tier(8) == 2
        ranks.times_s = [0.010, 0.012, 2.0] if tried and stalls else usual
        stalls -= tried and ranks.last == 2 and stalls > 0
        ranks.round()
    assert stalls == 0
    assert ranks.first.forced == 1
