"""Prometheus metrics of the governor, beside SGLang's own on ``/metrics``.

========================  =========  ==========================================================
``mode``                  gauge      0 off, 1 shadow, 2 on
``num_steps``             gauge      draft steps of the last decode round
``rounds_total``          counter    decode rounds, by tier
``tokens_total``          counter    tokens that they generated, by tier
``switches_total``        counter    decode rounds of another tier than the one before
``wasted_drafts_total``   counter    drafts that were not accepted
``decision_seconds``      histogram  time of a decision, from snapshot to tier
``fallbacks_total``       counter    errors of the governor; each left a round static
``guard_active``          gauge      1 while the guard forces or tries a tier
``guard_forced_total``    counter    times that the guard forced a tier
========================  =========  ==========================================================

All names begin with ``sglang:governor_``. Labels are those of SGLang's scheduler metrics. A thread
counts, once a second; a round only hands over a tuple.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine_hooks.background import BackgroundWriter
from engine_hooks.settings import MODES

PREFIX = "sglang:governor_"
DECISION_BUCKETS_S = (
    5e-6, 1e-5, 1.5e-5, 2e-5, 3e-5, 4e-5, 6e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2,
)  # fmt: skip


class RoundCount(NamedTuple):
    """What one decode round adds.

    Attributes:
        tier: Name of the tier that ran.
        num_steps: Its draft steps.
        tokens: Tokens that it generated.
        wasted_drafts: Drafts that were not accepted.
        decision_s: What the decision took, or None if there was none.
        guard_active: Whether the guard chose.
        guard_forced: Times that the guard forced a tier since the start.
    """

    tier: str
    num_steps: int
    tokens: int
    wasted_drafts: int
    decision_s: float | None
    guard_active: bool
    guard_forced: int


class GovernorMetrics:
    """The metrics of one scheduler process."""

    def __init__(self, labels: Mapping[str, Any]) -> None:
        """Register them.

        Args:
            labels: SGLang's, name to value.

        Raises:
            ImportError: If ``prometheus_client`` is missing, without which SGLang has no metrics.
        """
        # Only here: SGLang sets up the folder of a multi-process server before this import.
        from prometheus_client import Counter, Gauge, Histogram

        names = list(labels)

        def gauge(name: str, text: str) -> Any:
            metric = Gauge(PREFIX + name, text, names, multiprocess_mode="mostrecent")
            return metric.labels(**labels)

        def counter(name: str, text: str) -> Any:
            return Counter(PREFIX + name, text, names).labels(**labels)

        self._labels = dict(labels)
        self._mode = gauge("mode", "Mode of the governor: 0 off, 1 shadow, 2 on.")
        self._num_steps = gauge("num_steps", "Draft steps of the last decode round.")
        self._guard_active = gauge("guard_active", "1 while the guard forces or tries a tier.")
        self._switches = counter("switches", "Decode rounds of another tier than the one before.")
        self._wasted = counter("wasted_drafts", "Drafts that were not accepted.")
        self._fallbacks = counter("fallbacks", "Errors of the governor.")
        self._guard_forced = counter("guard_forced", "Times that the guard forced a tier.")
        self._rounds = Counter(PREFIX + "rounds", "Decode rounds by tier.", [*names, "tier"])
        self._tokens = Counter(PREFIX + "tokens", "Generated tokens by tier.", [*names, "tier"])
        self._decision = Histogram(
            PREFIX + "decision_seconds",
            "Time of a decision, from snapshot to tier.",
            names,
            buckets=DECISION_BUCKETS_S,
        ).labels(**labels)
        self._last_tier: str | None = None
        self._seen_forced = 0
        self._writer: BackgroundWriter[RoundCount] = BackgroundWriter(
            self._count, "specgovernor metrics"
        )
        self.put = self._writer.put

    def set_mode(self, mode: str) -> None:
        """Show a mode."""
        self._mode.set(MODES.index(mode))

    def count_fallback(self) -> None:
        """Count an error of the governor, at once: there may be no round to count it with."""
        self._fallbacks.inc()

    def close(self) -> None:
        """Count what is queued, and end the thread."""
        self._writer.close()

    def _count(self, rows: list[RoundCount]) -> None:
        by_tier: dict[str, list[int]] = {}
        switches = 0
        for row in rows:
            sums = by_tier.setdefault(row.tier, [0, 0])
            sums[0] += 1
            sums[1] += row.tokens
            switches += self._last_tier is not None and row.tier != self._last_tier
            self._last_tier = row.tier
            if row.decision_s is not None:
                self._decision.observe(row.decision_s)
        for tier, (rounds, tokens) in by_tier.items():
            self._rounds.labels(**self._labels, tier=tier).inc(rounds)
            self._tokens.labels(**self._labels, tier=tier).inc(tokens)
        self._switches.inc(switches)
        self._wasted.inc(sum(row.wasted_drafts for row in rows))
        last = rows[-1]
        self._guard_forced.inc(last.guard_forced - self._seen_forced)
        self._seen_forced = last.guard_forced
        self._num_steps.set(last.num_steps)
        self._guard_active.set(last.guard_active)
