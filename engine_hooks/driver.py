"""Feeds the governor and the recorders from the scheduler's calls, and never raises into them.

SGLang launches a batch (``run_batch``) and later has its result (``process_batch_result``), under
the overlap schedule after the next launch. Around these two calls stand the two hooks of
:class:`Driver`; SGLang's own errors pass through, those of the hooks end in :meth:`Driver._failed`.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from controller.errors import SpecGovernorError
from controller.tiers import NATIVE, WARM
from engine_hooks.context import ContextCounter
from engine_hooks.decision_log import DecisionLog
from engine_hooks.governor import Governor
from engine_hooks.guard import Guard
from engine_hooks.metrics import GovernorMetrics, RoundCount
from engine_hooks.params import GovernedParams
from engine_hooks.recorder import TraceFields, TraceRecorder
from engine_hooks.settings import MODES, OFF, ON
from engine_hooks.summary import Summary
from engine_hooks.symbols import (
    count_context,
    kept_context,
    kv_use,
    prefilled_requests,
    requested_mode,
    settings_reply,
)
from engine_hooks.tiers import OffSwitch, RunnableTiers

logger = logging.getLogger(__name__)


MAX_LAUNCHES = 8
"""Launches that are remembered; the overlap schedule has two without a result."""


@dataclass(slots=True)
class Launch:
    """A batch between its launch and its result."""

    result: Any
    decode: bool
    batch_size: int
    context_tokens: int
    queue_depth: int
    kv_use: float
    new_tokens: int | None
    started_s: float
    joined: int = 0
    host_s: float = 0.0
    num_steps: int | None = None
    keeps_warm: bool = True
    off: str | None = None
    asked: int | None = None
    tier: int | None = None
    cold_start: bool = False
    forced: bool = False
    decide_s: float | None = None


class Driver:
    """The hooks' state in one scheduler process.

    Attributes:
        mode: ``"on"``, ``"shadow"`` (decide and log only) or ``"off"``.
        governor: Decides, or None if nothing can be governed.
        params: What SGLang asks for steps, or None if it does not ask.
        guard: Overrules the governor where another tier measures better, or None.
        metrics: Prometheus metrics, or None.
        recorder: Step trace, or None.
        decisions: Decision log, or None.
        summary: Counts the rounds for the log.
        context: Counts context tokens.
        off: Says which kind of off rounds without steps are.
        ignores_queue: Whether the waiting queue may differ between ranks and must not be read.
        fallbacks: Errors of the hooks; each left a round at the static steps.
    """

    def __init__(self) -> None:
        self.mode = OFF
        self.governor: Governor | None = None
        self.guard: Guard | None = None
        self.metrics: GovernorMetrics | None = None
        self.params: GovernedParams | None = None
        self.recorder: TraceRecorder | None = None
        self.decisions: DecisionLog | None = None
        self.summary = Summary()
        self.ignores_queue = False
        self.fallbacks = 0
        self.off = OffSwitch()
        self.context = ContextCounter()
        # Weak: in a server that never decodes them, nothing else would take them out.
        self._prefilled: WeakSet[Any] = WeakSet()
        self._any_prefilled = False  # Asking the set takes longer.
        self._launches: deque[Launch] = deque(maxlen=MAX_LAUNCHES)
        self._last_result_s: float | None = None
        self._last_tier: int | None = None
        self._same_tier_results = 0
        self._to_measure: list[tuple[Any, ...]] = []

    def run_batch(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Decide before the launch; note after it what really runs."""
        launch = None
        started_s = time.perf_counter()
        try:
            # First of all: a rank that left out one of these calls would wait for the others.
            guard = self._acting_guard
            if guard is not None and batch.forward_mode.is_decode():
                self._begin_guarded(guard)
            launch = self._observe(scheduler, batch, started_s)
            if launch is not None and launch.decode and self.governor is not None:
                self._decide(self.governor, scheduler, batch, launch)
                if launch.asked is not None:
                    launch.decide_s = time.perf_counter() - started_s
        except Exception:
            self._failed()
        started_s = time.perf_counter()
        result = original(scheduler, batch, *args, **kwargs)
        if launch is not None:
            try:
                launch.host_s = time.perf_counter() - started_s
                launch.result = result
                self._after(launch)
            except Exception:
                self._failed()
        return result

    def process_batch_result(
        self,
        original: Callable[..., Any],
        scheduler: Any,
        batch: Any,
        result: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Let the scheduler process the result, then learn from it."""
        finished = None
        try:
            if self.decisions is not None:
                finished = [request.finished() for request in batch.reqs]
        except Exception:
            self._failed()
        returned = original(scheduler, batch, result, *args, **kwargs)
        try:
            launch = self._launch_of(result)
            if launch is not None:
                self._learn(launch, batch, finished)
            elif self.governor is not None and batch.forward_mode.is_decode():
                raise RuntimeError("a decode result belongs to no launch that was seen")
        except Exception:
            self._failed()
        return returned

    def set_internal_state(
        self,
        original: Callable[..., Any],
        scheduler: Any,
        request: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Change the mode, if that is what the request is about."""
        try:
            number = requested_mode(request)
            if number is not None:
                if number not in range(len(MODES)):
                    raise SpecGovernorError(f"expected a mode from 0 to 2, got {number!r:.40}")
                self.set_mode(MODES[int(number)])
                return settings_reply(True)
        except (SpecGovernorError, ValueError) as error:
            logger.error("specgovernor: the mode stays %s: %s", self.mode, error)
            return settings_reply(False)
        except Exception:
            self._failed()
        return original(scheduler, request, *args, **kwargs)

    def set_mode(self, mode: str) -> None:
        """Change the mode from the next round on.

        Raises:
            SpecGovernorError: If this server cannot be in that mode.
        """
        if mode != OFF and self.governor is None:
            raise SpecGovernorError(
                "the governor did not start; the reason is in the log's 'does NOT govern' line"
            )
        if mode == ON and self.params is None:
            raise SpecGovernorError(
                "SGLang does not ask this server for draft steps (adaptive speculation is off); "
                "start it with SPECGOVERNOR_MODE=on to see why"
            )
        before, self.mode = self.mode, mode
        self._go_static()
        if self.metrics is not None:
            self.metrics.set_mode(mode)
        if mode != before and self.summary.speaks:
            logger.info("specgovernor: mode changed from %s to %s", before, mode)

    def on_idle(self, original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
        """Note that the time until the next result will not be the time of a batch."""
        self._last_result_s = None
        return original(scheduler, *args)

    def _observe(self, scheduler: Any, batch: Any, started_s: float) -> Launch | None:
        """Return a note of the launch, or None if its result will tell nothing."""
        mode = batch.forward_mode
        decode = bool(mode.is_decode())
        if not decode and not mode.is_idle() and self.governor is not None:
            self._prefilled.update(prefilled_requests(batch))
            self._any_prefilled = True
        if not decode and not mode.is_extend():
            return None
        joined = 0
        if decode and self._any_prefilled:
            joined = self._take_joined(batch.reqs)
            if joined:
                self.context.forget()
        return Launch(
            result=None,
            decode=decode,
            joined=joined,
            batch_size=len(batch.reqs),
            # What the counter remembers must be the same on all ranks: decode rounds only.
            context_tokens=self.context.tokens(batch) if decode else self._prefill_context(batch),
            queue_depth=0 if self.ignores_queue else len(scheduler.waiting_queue),
            kv_use=0.0,
            new_tokens=None if decode else batch.extend_num_tokens,
            started_s=started_s,
        )

    def _begin_guarded(self, guard: Guard) -> None:
        """Count the round; a guard that cannot reach the other ranks is of no use any more."""
        try:
            if guard.judges_next:
                self._add_measured(guard)
            guard.begin_round()
        except Exception:
            self.guard = None
            self._failed()

    def _prefill_context(self, batch: Any) -> int:
        """Return the context tokens of a prefill batch for the trace, on the rank that has one."""
        if self.recorder is None:
            return 0
        total = kept_context(batch)
        return count_context(batch) if total is None else total

    def _decide(self, governor: Governor, scheduler: Any, batch: Any, launch: Launch) -> None:
        if launch.joined:
            governor.joined(launch.joined, launch.batch_size)
        launch.kv_use = kv_use(scheduler)
        if self.mode == OFF:
            return
        launch.asked = governor.decide(
            launch.batch_size, launch.queue_depth, launch.context_tokens, launch.kv_use
        )
        if self.mode == ON and self.params is not None:
            forced = None if self.guard is None else self.guard.tier(launch.batch_size)
            if forced is not None:
                launch.asked, launch.forced = forced, True
            steps = governor.tiers.num_steps[launch.asked]
            if steps == 0:
                self.off.ask(governor.tiers.kinds[launch.asked])
            self.params.next_steps = steps

    def _take_joined(self, requests: list[Any]) -> int:
        """Return how many prefilled requests are in a decode batch for the first time.

        A request in the middle of its chunks joins later; one that is done never does.
        """
        joined = [request for request in requests if request in self._prefilled]
        self._prefilled.difference_update(joined)
        self._any_prefilled = len(self._prefilled) > 0
        return len(joined)

    def _after(self, launch: Launch) -> None:
        if launch.decode:
            width = launch.result.speculative_num_draft_tokens
            launch.num_steps = None if width is None else width - 1
            if launch.num_steps == 0:
                launch.off = self.off.ran
                launch.keeps_warm = launch.off == WARM
            if self.governor is not None and launch.num_steps is not None:
                launch.tier = self._tier_of(self.governor.tiers, launch)
                launch.cold_start = self.governor.launched(
                    launch.tier, launch.num_steps, launch.keeps_warm, launch.batch_size
                )
                ran = self.governor.tiers.tiers[launch.tier].name
                self.summary.add(ran, launch.asked == launch.tier, self.fallbacks)
        self._launches.append(launch)

    @staticmethod
    def _tier_of(tiers: RunnableTiers, launch: Launch) -> int:
        """Return the tier that ran, which is mostly the one that was asked for."""
        asked, steps = launch.asked, launch.num_steps or 0
        if (
            asked is not None
            and tiers.num_steps[asked] == steps
            and (steps or tiers.kinds[asked] == launch.off)
        ):
            return asked
        return tiers.index_of(steps, launch.keeps_warm, asked, launch.off)

    def _launch_of(self, result: Any) -> Launch | None:
        """Take out the launch with this result, and any before it: they will have none."""
        for index, launch in enumerate(self._launches):
            if launch.result is result:
                for _ in range(index + 1):
                    self._launches.popleft()
                return launch
        return None

    def _learn(self, launch: Launch, batch: Any, finished: list[bool] | None) -> None:
        correct = launch.result.num_correct_drafts_per_req_cpu if launch.num_steps else None
        now_s = time.perf_counter()
        # Nothing ran before the first batch after an idle time: it began with its launch.
        before_s = launch.started_s if self._last_result_s is None else self._last_result_s
        self._last_result_s = now_s
        round_s = now_s - before_s
        if self.governor is not None and launch.tier is not None:
            if correct is not None:
                steps = launch.num_steps or 0
                self.governor.result(launch.tier, steps, launch.cold_start, correct)
            if self.metrics is not None:
                self.metrics.put(self._round_count(launch, correct))
        guard = self._acting_guard
        if guard is not None:
            self._measure(guard, launch, correct, round_s)
        if self.recorder is not None:
            self.recorder.put(self._trace_row(launch, correct, round_s))
        if self.decisions is not None and finished is not None and launch.decode:
            self.decisions.put(self._decision_row(launch, batch, finished))

    @property
    def _acting_guard(self) -> Guard | None:
        return self.guard if self.mode == ON else None

    def _measure(
        self, guard: Guard, launch: Launch, correct: list[int] | None, round_s: float
    ) -> None:
        """Let the guard know what a round took, if only decode rounds are in that time."""
        after_decode = self._last_tier is not None
        self._same_tier_results += 1
        if launch.tier != self._last_tier:
            self._same_tier_results = 1
        self._last_tier = launch.tier
        if not guard.measures or launch.tier is None or not after_decode or self.governor is None:
            return
        self._to_measure.append(
            (
                launch.tier,
                launch.batch_size,
                launch.batch_size + (sum(correct) if correct else 0),
                round_s,
                launch.context_tokens,
                launch.asked == launch.tier and not launch.forced,
                # The first result of a tier ends the time of another, and under the overlap
                # schedule the host prepared the second one while that was still running.
                self._same_tier_results >= 3,
            )
        )

    def _add_measured(self, guard: Guard) -> None:
        """Hand over what was measured: many rounds at once run from the caches, one does not."""
        rows, self._to_measure = self._to_measure, []
        if self.governor is None:
            return
        for tier, batch_size, tokens, seconds, context_tokens, chosen, steady in rows:
            predicted_s = self.governor.predicted_s(batch_size, context_tokens)
            guard.measured(tier, batch_size, tokens, seconds, predicted_s, chosen, steady)

    def _round_count(self, launch: Launch, correct: list[int] | None) -> RoundCount:
        steps = launch.num_steps or 0
        num_correct = sum(correct) if correct else 0
        return RoundCount(
            tier=launch.off or str(steps),
            num_steps=steps,
            tokens=launch.batch_size + num_correct,
            wasted_drafts=steps * launch.batch_size - num_correct,
            decision_s=launch.decide_s,
            guard_active=launch.forced,
            guard_forced=0 if self.guard is None else self.guard.forced,
        )

    def _trace_row(self, launch: Launch, correct: list[int] | None, round_s: float) -> TraceFields:
        return (
            "decode" if launch.decode else "prefill",
            None if launch.off == NATIVE else launch.num_steps,
            launch.batch_size,
            launch.context_tokens,
            launch.queue_depth,
            round_s,
            launch.new_tokens,
            launch.host_s,
            sum(correct) / len(correct) if correct else None,
        )

    def _decision_row(self, launch: Launch, batch: Any, finished: list[bool]) -> dict[str, Any]:
        correct = launch.result.num_correct_drafts_per_req_cpu
        asked = None
        if self.governor is not None and launch.asked is not None:
            asked = self.governor.tiers.tiers[launch.asked].name
        return {
            "time": time.time(),
            "decision_us": None if launch.decide_s is None else round(launch.decide_s * 1e6, 1),
            "batch_size": launch.batch_size,
            "context_tokens": launch.context_tokens,
            "queue_depth": launch.queue_depth,
            "kv_use": launch.kv_use,
            "asked": asked,
            "forced": launch.forced,
            "num_steps": launch.num_steps,
            "keeps_warm": launch.keeps_warm,
            "off": launch.off,
            "requests": [request.rid for request in batch.reqs],
            "num_correct": None if correct is None else list(correct),
            "finished_before": finished,
        }

    def _failed(self) -> None:
        """Go back to the static steps for this round; say why, once."""
        self.fallbacks += 1
        self._go_static()
        if self.metrics is not None:
            self.metrics.count_fallback()
        if self.fallbacks == 1:
            logger.exception(
                "specgovernor: an error in the governor; such rounds run at the static steps, and "
                "further errors are only counted"
            )

    def _go_static(self) -> None:
        """Let rounds run as the server was started, until a decision says otherwise."""
        if self.params is not None:
            self.params.next_steps = self.params.static_steps
            self.off.restore()
