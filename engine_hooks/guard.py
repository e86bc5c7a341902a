"""The guard over the policy: what was measured overrules what was learned.

The first rank measures how long rounds take, tier by tier and by batch size. Every
:data:`SYNC_ROUNDS` decode rounds it compares the tokens/s that the policy's rounds made with what
the other tiers would make now, and shares its order with the other ranks, so that all of them
follow it from the same round on. All else a rank does here is counting rounds.

Tokens/s of a tier is its accept length over its measured round time. Times are kept relative to
the calibrated ones, so that rounds of other batch sizes and contexts of the bucket compare; the
accept length is the lower of the running estimate and what the tier last made, so that neither a
stale nor a guessed figure alone can overrule the policy. A tier that was not measured yet is tried
for a few rounds if the calibration thinks it better, and the server's static tier and the first
off tier are tried once in every bucket, whatever the calibration thinks.
"""

import logging
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

SYNC_ROUNDS = 25
"""Decode rounds between two verdicts."""
TOLERANCE = 0.05
"""Share of the best tier's tokens/s that the policy may lack."""
PATIENCE_ROUNDS = 200
"""Rounds that it may lack more, without a break."""
FORCE_ROUNDS = 1000
"""Rounds for which the best tier is then forced."""
PROBE_ROUNDS = 12
"""Rounds for which an unmeasured tier is tried; the first few after a switch are not measured."""
MAX_TRIES = 3
"""Times that a tier is tried in a bucket; a batch may leave the bucket before it is measured."""
MIN_MEASURED = 6
"""Rounds from which on a measured time counts."""
MEMORY = 0.05
"""Weight of a new round in a measured time."""
MAX_OUTLIER = 3.0
"""A round that takes longer than so many usual ones, such as one that waited for the host, counts
as this many."""

NO_ORDER, PROBE, FORCE, RELEASE = range(4)
Order = tuple[int, ...]
"""Kind, tier, bucket, rounds; integers, as it is sent to the other ranks."""
NOTHING: Order = (NO_ORDER, 0, 0, 0)


def bucket_of(batch_size: int) -> int:
    """Return the bucket of a batch size: 1, 2, 3 to 4, 5 to 8, 9 to 16 and so on.

    >>> [bucket_of(size) for size in (1, 2, 3, 4, 5, 256, 257)]
    [0, 1, 2, 2, 3, 8, 9]
    """
    return (batch_size - 1).bit_length()


class _Window:
    """The measured rounds in one bucket since the last verdict."""

    def __init__(self, num_tiers: int) -> None:
        self.rows = 0
        self.predicted_s = [0.0] * num_tiers
        """``(K,)`` what the rounds would have taken by the calibration, tier by tier."""
        # The same, of rounds whose tier the policy chose.
        self.chosen_rounds = [0] * num_tiers
        self.chosen_tokens = 0
        self.chosen_s = 0.0


class _Bucket:
    """What is known of one range of batch sizes."""

    def __init__(self, num_tiers: int) -> None:
        self.window = _Window(num_tiers)
        self.measured = [0] * num_tiers
        self.slowness = [1.0] * num_tiers
        """Measured over calibrated round time."""
        self.behind_rounds = 0
        self.tries = [0] * num_tiers

    def usual_slowness(self) -> float:
        """Return what to take for a tier that was not measured: the mean of the others."""
        known = [s for s, n in zip(self.slowness, self.measured, strict=True) if n >= MIN_MEASURED]
        return sum(known) / len(known) if known else 1.0


class Guard:
    """Watches the rounds of one scheduler process.

    Attributes:
        forced: Times that a tier was forced.
        probes: Times that a tier was tried.
        measures: Whether this is the first rank, which measures for all.
    """

    def __init__(
        self,
        num_steps: Sequence[int],
        tier_names: Sequence[str],
        static_tier: int,
        accept_len: Callable[[int], tuple[float, float]],
        share: Callable[[Order], Order],
        measures: bool,
    ) -> None:
        """Start with nothing measured.

        Args:
            num_steps: ``(K,)`` draft steps of each tier.
            tier_names: ``(K,)`` for the log.
            static_tier: The tier that the server was started with.
            accept_len: Returns a tier's estimated accept length and the one that it last made.
            share: Sends the first rank's order to all ranks and returns it; each rank calls it at
                the same round.
            measures: Whether this is the first rank, which measures for all.
        """
        self.forced = 0
        self.probes = 0
        self._num_steps = list(num_steps)
        self._names = list(tier_names)
        self._static_tier = static_tier
        self._accept_len = accept_len
        self._share = share
        self.measures = measures
        self._buckets: dict[int, _Bucket] = {}
        self._round = 0
        self._order = NOTHING
        self._until_round = 0
        self._overruled = static_tier
        """The tier that the policy mostly chose before it was overruled."""

    @property
    def active(self) -> bool:
        """Whether a tier is being forced or tried, at the batch sizes that it is meant for."""
        return self._order[0] != NO_ORDER

    def begin_round(self) -> None:
        """Count a decode round that is about to be launched; all ranks share an order now and then.

        Every rank must call it before every such round, whatever else goes wrong on it.
        """
        self._round += 1
        if self.active and self._round >= self._until_round:
            self._order = NOTHING
        if self._round % SYNC_ROUNDS:
            return
        order = NOTHING
        if self.measures:
            try:
                order = self._judge()
            except Exception:
                logger.exception("specgovernor: the guard made no verdict")
        order = self._share(order)
        if order[0] == NO_ORDER:
            return
        self._order = NOTHING if order[0] == RELEASE else order
        self._until_round = self._round + order[3]
        self.forced += order[0] == FORCE
        self.probes += order[0] == PROBE

    def tier(self, batch_size: int) -> int | None:
        """Return the tier that this round must run, or None if the policy may choose."""
        kind, tier, bucket, _ = self._order
        return tier if kind != NO_ORDER and bucket_of(batch_size) == bucket else None

    def measured(
        self,
        tier: int,
        batch_size: int,
        tokens: int,
        seconds: float,
        predicted_s: Sequence[float],
        chosen: bool,
    ) -> None:
        """Add a round whose time is that of a round of its tier. The first rank only.

        Args:
            tier: The tier that ran.
            batch_size: Rows.
            tokens: What it generated.
            seconds: What it took.
            predicted_s: ``(K,)`` what each tier would take by the calibration.
            chosen: Whether the policy chose the tier.
        """
        index = bucket_of(batch_size)
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = _Bucket(len(self._num_steps))
        count = bucket.measured[tier]
        ratio = seconds / predicted_s[tier]
        usual = bucket.slowness[tier]
        if count >= MIN_MEASURED and ratio > MAX_OUTLIER * usual:
            ratio = MAX_OUTLIER * usual
            seconds = ratio * predicted_s[tier]
        bucket.measured[tier] = count + 1
        bucket.slowness[tier] += max(1.0 / (count + 1), MEMORY) * (ratio - usual)
        window = bucket.window
        window.rows += batch_size
        for k, value in enumerate(predicted_s):
            window.predicted_s[k] += value
        if chosen:
            window.chosen_rounds[tier] += 1
            window.chosen_tokens += tokens
            window.chosen_s += seconds

    def _judge(self) -> Order:
        """Return the first rank's order, from what was measured since the last one."""
        if not self._buckets:
            return NOTHING
        if self.active:
            index = self._order[2]
        else:
            index = max(self._buckets, key=lambda i: sum(self._buckets[i].window.chosen_rounds))
        bucket = self._buckets.get(index)
        order = NOTHING
        if bucket is not None and bucket.window.rows:
            order = self._review(bucket) if self.active else self._compare(index, bucket)
        for bucket in self._buckets.values():
            bucket.window = _Window(len(self._num_steps))
        return order

    def _rate(self, bucket: _Bucket, tier: int) -> float:
        """Return the tokens/s that a tier would have made in the window."""
        tokens, slowness = 1.0, bucket.slowness[tier]
        known = bucket.measured[tier] >= MIN_MEASURED
        if not known:
            slowness = bucket.usual_slowness()
        if self._num_steps[tier] > 0:
            estimated, recent = self._accept_len(tier)
            tokens = min(estimated, recent) if known else estimated
        return bucket.window.rows * tokens / (bucket.window.predicted_s[tier] * slowness)

    def _best_measured(self, bucket: _Bucket) -> tuple[int, float]:
        """Return the tier that would make the most tokens/s, of those measured, and how many."""
        rates = [
            (self._rate(bucket, tier), -tier)
            for tier, count in enumerate(bucket.measured)
            if count >= MIN_MEASURED
        ]
        rate, tier = max(rates, default=(0.0, 0))
        return -tier, rate

    def _review(self, bucket: _Bucket) -> Order:
        """Release a forced tier once the one that the policy liked would make as much."""
        kind, tier, _, _ = self._order
        if kind != FORCE or self._rate(bucket, self._overruled) < self._rate(bucket, tier):
            return NOTHING
        logger.info(
            "specgovernor: guard: the policy chooses again; tier %s, which it had chosen, would "
            "make as much as the forced %s now",
            self._names[self._overruled],
            self._names[tier],
        )
        return (RELEASE, 0, 0, 0)

    def _compare(self, index: int, bucket: _Bucket) -> Order:
        """Force a tier that the policy has left aside for long, or try one."""
        window = bucket.window
        if sum(window.chosen_rounds) < MIN_MEASURED:
            return NOTHING
        made = window.chosen_tokens / window.chosen_s
        best, rate = self._best_measured(bucket)
        if made < (1.0 - TOLERANCE) * rate:
            bucket.behind_rounds += SYNC_ROUNDS
        else:
            bucket.behind_rounds = 0
        if bucket.behind_rounds >= PATIENCE_ROUNDS:
            bucket.behind_rounds = 0
            self._overruled = window.chosen_rounds.index(max(window.chosen_rounds))
            logger.warning(
                "specgovernor: guard: at batch sizes %d to %d the policy made %.1f tokens/s for %d "
                "rounds where tier %s makes %.1f by measured times: it is forced for %d rounds",
                2**index // 2 + 1,
                2**index,
                made,
                PATIENCE_ROUNDS,
                self._names[best],
                rate,
                FORCE_ROUNDS,
            )
            return (FORCE, best, index, FORCE_ROUNDS)
        untried = self._worth_trying(bucket, made)
        if untried is None:
            return NOTHING
        bucket.tries[untried] += 1
        return (PROBE, untried, index, PROBE_ROUNDS)

    def _worth_trying(self, bucket: _Bucket, made: float) -> int | None:
        """Return a tier without a measured time that should have one, the most promising first."""
        unknown = [
            tier
            for tier, count in enumerate(bucket.measured)
            if count < MIN_MEASURED and bucket.tries[tier] < MAX_TRIES
        ]
        rates = {tier: self._rate(bucket, tier) for tier in unknown}
        better = [tier for tier in unknown if (1.0 - TOLERANCE) * rates[tier] > made]
        if better:
            return max(better, key=lambda tier: rates[tier])
        first_off = self._num_steps.index(0) if 0 in self._num_steps else self._static_tier
        return next((t for t in (self._static_tier, first_off) if t in unknown), None)
