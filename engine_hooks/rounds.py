"""What is remembered of a batch between its launch and its result, and the records made of it."""

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from controller.tiers import NATIVE
from engine_hooks.metrics import RoundCount
from engine_hooks.recorder import TraceFields
from engine_hooks.tiers import RunnableTiers


@dataclass(slots=True)
class Launch:
    """A batch between its launch and its result.

    Attributes:
        decode: Whether it is a decode round; else it is a prefill batch.
        batch_size: Requests.
        context_tokens: Context tokens summed over the batch.
        queue_depth: Waiting requests.
        kv_use: Share of the KV cache that was held.
        started_s: Clock when the hook was entered.
        decided_s: Clock when SGLang's own launch began.
        result: SGLang's result, whose numbers come later.
        new_tokens: Tokens of a prefill batch.
        host_s: Seconds that SGLang's own launch took; only for a trace.
        num_steps: Draft steps that the round really has, or None if it is no speculative server's.
        keeps_warm: Whether the round extends the draft's KV.
        off: Kind of off that a round without steps is, or None.
        asked: The tier that was decided on, or None.
        tier: The tier that the round counts as, or None.
        cold_start: Whether it drafts on a stale draft state.
        forced: Whether the guard chose.
        repeats: Whether it repeats the decision before it.
        correct: Correct drafts of each row, once known.
        round_s: Seconds since the result before, once known.
    """

    decode: bool
    batch_size: int
    context_tokens: int
    queue_depth: int
    kv_use: float
    started_s: float
    decided_s: float = 0.0
    result: Any = None
    new_tokens: int | None = None
    host_s: float = 0.0
    num_steps: int | None = None
    keeps_warm: bool = True
    off: str | None = None
    asked: int | None = None
    tier: int | None = None
    cold_start: bool = False
    forced: bool = False
    repeats: bool = False
    correct: list[int] | None = None
    round_s: float = 0.0

    @property
    def decide_s(self) -> float | None:
        """Seconds from the snapshot to the tier, or None if nothing was decided."""
        if self.asked is None or self.repeats:
            return None
        return self.decided_s - self.started_s

    @property
    def num_correct(self) -> int:
        """Correct drafts of all rows."""
        return sum(self.correct) if self.correct else 0

    @property
    def tokens(self) -> int:
        """Tokens that a decode round generated."""
        return self.batch_size + self.num_correct


class Processed(NamedTuple):
    """What is kept of a result that has been processed, under SGLang's names."""

    speculative_num_draft_tokens: int | None
    num_correct_drafts_per_req_cpu: list[int] | None


def round_count(launch: Launch, guard_forced: int) -> RoundCount:
    """Return what a decode round adds to the metrics."""
    steps = launch.num_steps or 0
    return RoundCount(
        tier=launch.off or str(steps),
        num_steps=steps,
        tokens=launch.tokens,
        wasted_drafts=steps * launch.batch_size - launch.num_correct,
        decision_s=launch.decide_s,
        guard_active=launch.forced,
        guard_forced=guard_forced,
    )


def trace_row(launch: Launch) -> TraceFields:
    """Return the row of a batch in the step trace."""
    correct = launch.correct
    return (
        "decode" if launch.decode else "prefill",
        None if launch.off == NATIVE else launch.num_steps,
        launch.batch_size,
        launch.context_tokens,
        launch.queue_depth,
        launch.round_s,
        launch.new_tokens,
        launch.host_s,
        sum(correct) / len(correct) if correct else None,
    )


def decision_row(
    launch: Launch, tiers: RunnableTiers | None, requests: list[Any], finished: list[bool]
) -> dict[str, Any]:
    """Return the line of a decode round in the decision log.

    Args:
        launch: The round, with its result.
        tiers: The governor's.
        requests: Those of the batch.
        finished: Which of them were done before the result.
    """
    asked = None
    if tiers is not None and launch.asked is not None:
        asked = tiers.tiers[launch.asked].name
    correct = launch.result.num_correct_drafts_per_req_cpu
    decide_s = launch.decide_s
    return {
        "time": time.time(),
        "decision_us": None if decide_s is None else round(decide_s * 1e6, 1),
        "batch_size": launch.batch_size,
        "context_tokens": launch.context_tokens,
        "queue_depth": launch.queue_depth,
        "kv_use": launch.kv_use,
        "asked": asked,
        "forced": launch.forced,
        "repeats": launch.repeats,
        "num_steps": launch.num_steps,
        "keeps_warm": launch.keeps_warm,
        "off": launch.off,
        "requests": [request.rid for request in requests],
        "num_correct": None if correct is None else list(correct),
        "finished_before": finished,
    }
