"""The guard over the policy: what was measured overrules what was learned.

The first rank measures how long rounds take, tier by tier and by batch size. Every
:data:`SYNC_ROUNDS` decode rounds it compares the tokens/s that the policy's rounds made with what
the other tiers would make now, and shares one order with the other ranks, so that all of them
follow it from the same round on. All else a rank does here is counting rounds. Batch sizes fall
into buckets, each with its own measurements, verdicts and orders.

Tokens/s of a tier is its accept length over its measured round time. Times are kept relative to
the calibrated ones, so that rounds of other batch sizes and contexts of the bucket compare; the
accept length is the lower of the running estimate and what the tier last made, so that neither a
stale nor a guessed figure alone can overrule the policy. A tier that was not measured yet is tried
for a few rounds if the calibration thinks it better, and the server's static tier and the first
off tier are tried once in every bucket, whatever the calibration thinks.
"""

import logging
import statistics
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

SYNC_ROUNDS = 25
"""Decode rounds between two verdicts; where decisions are repeated, it is the next one's round."""
TOLERANCE = 0.05
"""Share of the best tier's tokens/s that the policy may lack."""
PATIENCE_ROUNDS = 200
"""Rounds of a bucket in which it may lack more, without a break."""
MIN_WINDOW = 12
"""Rounds of the policy from which a bucket is judged."""
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
ANY = -1
"""In place of a bucket: a tier is tried at all batch sizes, since only rounds in a row can be
measured and a batch may just go back and forth between two buckets."""
NOTHING: Order = (NO_ORDER, 0, 0, 0)


def bucket_of(batch_size: int) -> int:
    """Return the bucket of a batch size: 1, 2, 3 to 4, 5 to 8, 9 to 16 and so on.

    >>> [bucket_of(size) for size in (1, 2, 3, 4, 5, 256, 257)]
    [0, 1, 2, 2, 3, 8, 9]
    """
    return (batch_size - 1).bit_length()


class _Window:
    """The rounds in one bucket since its last verdict."""

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
        self.first: list[list[float]] = [[] for _ in range(num_tiers)]
        """The first of them, until their median can be taken."""
        self.behind_rounds = 0
        self.tries = [0] * num_tiers
        self.overruled: int | None = None
        """The tier that the policy mostly chose when it was overruled."""

    def add(self, tier: int, ratio: float) -> None:
        """Add a measured over a calibrated time."""
        count = self.measured[tier] = self.measured[tier] + 1
        if count <= MIN_MEASURED:
            self.first[tier].append(ratio)
            self.slowness[tier] = statistics.median(self.first[tier])
        else:
            usual = self.slowness[tier]
            self.slowness[tier] += MEMORY * (min(ratio, MAX_OUTLIER * usual) - usual)

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
        self._orders: dict[int, tuple[int, int, int]] = {}
        """By bucket, or ``ANY``: kind, tier, round in which it ends."""

    @property
    def active(self) -> bool:
        """Whether a tier is being forced or tried, at the batch sizes that it is meant for."""
        return bool(self._orders)

    def begin_round(self, collect: Callable[[], None], rounds: int = 1) -> bool:
        """Count a decode round that is about to be launched; all ranks share an order now and then.

        Every rank must call it before the same rounds, whatever else goes wrong on it.

        Args:
            collect: Called before a verdict; adds what was measured since the last one.
            rounds: Rounds since the last call, this one included.

        Returns:
            Whether a tier is being forced or tried: then :meth:`tier` must be asked, and the next
            round must be counted by a call of its own.
        """
        verdicts = self._round // SYNC_ROUNDS
        self._round += rounds
        if self._orders:
            ended = [b for b, (_, _, end) in self._orders.items() if self._round >= end]
            for bucket in ended:
                del self._orders[bucket]
        if self._round // SYNC_ROUNDS > verdicts:
            self._share_order(collect)
        return bool(self._orders)

    def _share_order(self, collect: Callable[[], None]) -> None:
        """Follow the first rank's order, as all ranks do."""
        order = NOTHING
        if self.measures:
            try:
                collect()
                order = self._judge()
            except Exception:
                logger.exception("specgovernor: the guard made no verdict")
        kind, tier, bucket, rounds = self._share(order)
        if kind == RELEASE:
            self._orders.pop(bucket, None)
        elif kind != NO_ORDER:
            self._orders[bucket if kind == FORCE else ANY] = (kind, tier, self._round + rounds)
        self.forced += kind == FORCE
        self.probes += kind == PROBE

    def tier(self, batch_size: int) -> int | None:
        """Return the tier that this round must run, or None if the policy may choose."""
        if not self._orders:
            return None
        order = self._orders.get(ANY) or self._orders.get(bucket_of(batch_size))
        return None if order is None else order[1]

    def measured(
        self,
        tier: int,
        batch_size: int,
        tokens: int,
        seconds: float,
        predicted_s: Sequence[float],
        chosen: bool,
        steady: bool = True,
    ) -> None:
        """Add a round. The first rank only.

        Args:
            tier: The tier that ran.
            batch_size: Rows.
            tokens: What it generated.
            seconds: What it took.
            predicted_s: ``(K,)`` what each tier would take by the calibration.
            chosen: Whether the policy chose the tier.
            steady: Whether the time is that of a round of its tier alone, no switch beside it.
        """
        index = bucket_of(batch_size)
        bucket = self._buckets.get(index)
        if bucket is None:
            bucket = self._buckets[index] = _Bucket(len(self._num_steps))
        ratio = seconds / predicted_s[tier]
        if bucket.measured[tier] >= MIN_MEASURED:
            # A round that waited for the host says little.
            seconds = min(seconds, MAX_OUTLIER * bucket.slowness[tier] * predicted_s[tier])
        if steady:
            bucket.add(tier, ratio)
        window = bucket.window
        window.rows += batch_size
        for k, value in enumerate(predicted_s):
            window.predicted_s[k] += value
        if chosen:
            window.chosen_rounds[tier] += 1
            window.chosen_tokens += tokens
            window.chosen_s += seconds

    def _judge(self) -> Order:
        """Return the first rank's order, from what was measured since the last one.

        Buckets with the most rounds come first; those after an order keep theirs for the next time.
        """
        busiest = sorted(self._buckets, key=lambda i: -self._buckets[i].window.rows)
        for index in busiest:
            bucket = self._buckets[index]
            active = self._orders.get(index)
            enough = sum(bucket.window.chosen_rounds) >= MIN_WINDOW
            if not bucket.window.rows or not (active or enough):
                continue
            if active is None:
                order = self._compare(index, bucket)
            else:
                order = self._review(index, bucket, active)
            bucket.window = _Window(len(self._num_steps))
            if order[0] != NO_ORDER:
                return order
        return NOTHING

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

    def _review(self, index: int, bucket: _Bucket, active: tuple[int, int, int]) -> Order:
        """Release a forced tier once the one that the policy liked would make as much."""
        kind, tier, _ = active
        liked = bucket.overruled
        if kind != FORCE or liked is None or liked == tier:
            return NOTHING
        if self._rate(bucket, liked) < self._rate(bucket, tier):
            return NOTHING
        logger.info(
            "specgovernor: guard: the policy chooses again; tier %s, which it had chosen, would "
            "make as much as the forced %s now",
            self._names[liked],
            self._names[tier],
        )
        return (RELEASE, 0, index, 0)

    def _compare(self, index: int, bucket: _Bucket) -> Order:
        """Force a tier that the policy has left aside for long, or try one."""
        window = bucket.window
        made = window.chosen_tokens / window.chosen_s
        best, rate = self._best_measured(bucket)
        if made < (1.0 - TOLERANCE) * rate:
            bucket.behind_rounds += sum(window.chosen_rounds)
        else:
            bucket.behind_rounds = 0
        if bucket.behind_rounds >= PATIENCE_ROUNDS:
            bucket.behind_rounds = 0
            bucket.overruled = window.chosen_rounds.index(max(window.chosen_rounds))
            logger.warning(
                "specgovernor: guard: at batch sizes %d to %d the policy made %.1f tokens/s in its "
                "last rounds where tier %s makes %.1f by measured times, as it has for %d rounds: "
                "%s is forced for %d rounds",
                2**index // 2 + 1,
                2**index,
                made,
                self._names[best],
                rate,
                PATIENCE_ROUNDS,
                self._names[best],
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
