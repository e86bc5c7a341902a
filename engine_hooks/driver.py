"""Feeds the governor and the recorders from the scheduler's calls, and never raises into them.

SGLang launches a batch (``run_batch``) and later has its result (``process_batch_result``), under
the overlap schedule after the next launch. Around these two calls stand the two hooks of
:class:`Driver`; SGLang's own errors pass through, those of the hooks end in :meth:`Driver._failed`.

At small batches the GPU waits for the scheduler's own Python, so that every microsecond here is one
that a round takes longer; and since the caches hold other things by then, what counts is how much
code and data a round touches. So a round only does what the next decision needs. All else is done
for many rounds at once (:meth:`Driver._hand_over`), where it runs from the caches.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from controller.decision import REPEAT_BATCH
from controller.errors import SpecGovernorError
from controller.tiers import WARM
from engine_hooks.decision_log import DecisionLog
from engine_hooks.governor import Governor
from engine_hooks.guard import Guard
from engine_hooks.load import LoadReader
from engine_hooks.metrics import GovernorMetrics
from engine_hooks.params import GovernedParams
from engine_hooks.recorder import TraceRecorder
from engine_hooks.rounds import Launch, Processed, decision_row, round_count, trace_row
from engine_hooks.settings import MODES, OFF, ON
from engine_hooks.summary import Summary
from engine_hooks.symbols import (
    context_tokens,
    prefilled_requests,
    requested_mode,
    settings_reply,
)
from engine_hooks.tiers import OffSwitch

logger = logging.getLogger(__name__)


MAX_LAUNCHES = 8
"""Launches that are remembered; the overlap schedule has two without a result."""
HAND_OVER_ROUNDS = 25
"""Results after which summary, guard and metrics are told of them."""
MIN_STEADY = 3
"""Results of a tier in a row from which its round times count. The first ends the time of another
tier, and under the overlap schedule the host prepared the second while that was still running."""


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
        off: Says which kind of off rounds without steps are.
        load: Reads context tokens and the use of the KV cache.
        repeat_rounds: Rounds that a decision stands for at up to ``REPEAT_BATCH`` requests, unless
            some join or leave, once the same was decided for as many.
        ignores_queue: Whether the waiting queue may differ between ranks and must not be read.
        fallbacks: Errors of the hooks; one in a decision left its round at the static steps.
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
        self.repeat_rounds = 1
        self.ignores_queue = False
        self.fallbacks = 0
        self.off = OffSwitch()
        self.load = LoadReader()
        # Weak: in a server that never decodes them, nothing else would take them out.
        self._prefilled: WeakSet[Any] = WeakSet()
        self._any_prefilled = False  # Asking the set takes longer.
        # By the identity of its result, which the launch keeps alive.
        self._launches: dict[int, Launch] = {}
        # What was decided last, and for how many rounds before.
        self._last_asked: int | None = None
        self._same_asked = 0
        # Rounds that repeat a decision: how many were planned and are left, of how many requests;
        # the launch that decided; and of each since: result, clock at its launch, seconds of its
        # launch, clock when its result had been processed, requests and which of them were done.
        self._repeats_planned = 0
        self._repeats_left = 0
        self._repeat_batch = 0
        self._decided: Launch | None = None
        self._repeats: list[list[Any]] = []
        self._last_result_s: float | None = None
        self._done: list[Launch] = []
        # As far as they were handed over: the tier of the last result, how many had it in a row.
        self._last_tier: int | None = None
        self._same_tier_results = 0

    def run_batch(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Decide before the launch; note after it what really runs."""
        launch, repeats = None, False
        started_s = time.perf_counter()
        try:
            if not batch.forward_mode.is_decode():
                launch = self._begin_prefill(scheduler, batch, started_s)
            elif self._repeats_left and len(batch.reqs) == self._repeat_batch:
                self._repeats_left -= 1
                repeats = True
            else:
                launch = self._begin_round(scheduler, batch, started_s)
            if launch is not None:
                launch.decided_s = time.perf_counter()
        except Exception:
            self._failed()
        result = original(scheduler, batch, *args, **kwargs)
        if repeats:
            host_s = 0.0 if self.recorder is None else time.perf_counter() - started_s
            self._repeats.append([result, started_s, host_s, None, None, None])
        elif launch is not None:
            try:
                self._launched(launch, result)
            except Exception:
                self._failed(static=False)
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
        if self.decisions is not None:
            try:
                finished = [request.finished() for request in batch.reqs]
            except Exception:
                self._failed(static=False)
        returned = original(scheduler, batch, result, *args, **kwargs)
        try:
            for repeat in self._repeats:
                if repeat[0] is result:
                    # The result itself holds tensors.
                    repeat[0] = Processed(
                        result.speculative_num_draft_tokens, result.num_correct_drafts_per_req_cpu
                    )
                    repeat[3] = time.perf_counter()
                    if finished is not None:
                        repeat[4:] = batch.reqs, finished
                    return returned
            launch = self._launches.pop(id(result), None)
            if launch is not None:
                self._learn(launch, batch.reqs, finished, time.perf_counter())
            elif self.governor is not None and batch.forward_mode.is_decode():
                raise RuntimeError("a decode result belongs to no launch that was seen")
        except Exception:
            self._failed(static=False)
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
        try:
            self._hand_over()
        except Exception:
            self._failed(static=False)
        self._repeat_batch = -1
        before, self.mode = self.mode, mode
        self._go_static()
        if self.metrics is not None:
            self.metrics.set_mode(mode)
        if mode != before and self.summary.speaks:
            logger.info("specgovernor: mode changed from %s to %s", before, mode)

    def on_idle(self, original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
        """Note that the time until the next result will not be the time of a batch."""
        if self._done or self._repeats:
            try:
                self._hand_over()
            except Exception:
                self._failed(static=False)
        self._last_result_s = None
        return original(scheduler, *args)

    def _begin_round(self, scheduler: Any, batch: Any, started_s: float) -> Launch:
        """Decide on a decode round; return a note of its launch."""
        # First of all: a rank that left out one of these calls would wait for the others.
        rounds = 1 + self._repeats_planned - self._repeats_left
        self._same_asked += rounds
        self._repeats_planned = self._repeats_left = 0
        guard = self.guard
        guarded = guard is not None and self.mode == ON and self._begin_guarded(guard, rounds)
        governor = self.governor
        requests = batch.reqs
        batch_size = self._repeat_batch = len(requests)
        if self._repeats:
            self._learn_repeats()
        if self._any_prefilled:
            joined = self._take_joined(requests)
            if joined:
                self.load.forget()
                if governor is not None:
                    governor.joined(joined, batch_size)
        load = self.load
        load.update(None if governor is None else scheduler, batch, batch_size)
        launch = Launch(
            True,
            batch_size,
            load.context_tokens,
            0 if self.ignores_queue else len(scheduler.waiting_queue),
            load.kv_use,
            started_s,
        )
        self._decided = launch
        failed = False
        if governor is not None and self.mode != OFF:
            try:
                self._decide(governor, launch, guarded)
            except Exception:
                launch.asked, failed = None, True
                self._failed()
        if failed or launch.asked != self._last_asked:
            self._last_asked, self._same_asked = launch.asked, 0
        elif batch_size <= REPEAT_BATCH and not guarded and self._same_asked >= self.repeat_rounds:
            self._repeats_planned = self._repeats_left = self.repeat_rounds - 1
        return launch

    def _begin_prefill(self, scheduler: Any, batch: Any, started_s: float) -> Launch | None:
        """Return a note of the launch of anything else, or None if its result tells nothing."""
        self._repeat_batch = -1  # Whoever joins wants a new decision.
        if self._repeats:
            self._learn_repeats()
        mode = batch.forward_mode
        if self.governor is not None and not mode.is_idle():
            self._prefilled.update(prefilled_requests(batch))
            self._any_prefilled = True
        if not mode.is_extend():
            return None
        return Launch(
            False,
            len(batch.reqs),
            self._prefill_context(batch),
            0 if self.ignores_queue else len(scheduler.waiting_queue),
            0.0,
            started_s,
            new_tokens=batch.extend_num_tokens,
        )

    def _begin_guarded(self, guard: Guard, rounds: int) -> bool:
        """Count the round, and return whether the guard may overrule the policy in it.

        A guard that cannot reach the other ranks is of no use any more.
        """
        try:
            return guard.begin_round(self._hand_over, rounds)
        except Exception:
            self.guard = None
            self._failed()
        return False

    def _prefill_context(self, batch: Any) -> int:
        """Return the context tokens of a prefill batch for the trace, on the rank that has one.

        The reader is left out of it: what it remembers must be the same on all ranks.
        """
        return 0 if self.recorder is None else context_tokens(batch)

    def _decide(self, governor: Governor, launch: Launch, guarded: bool) -> None:
        asked = governor.policy_tier(
            launch.batch_size, launch.queue_depth, launch.context_tokens, launch.kv_use
        )
        tiers = governor.tiers
        if not 0 <= asked < len(tiers.num_steps):
            raise ValueError(f"expected a tier from 0 to {len(tiers.num_steps) - 1}, got {asked}")
        params = self.params
        if params is not None and self.mode == ON:
            if guarded and self.guard is not None:
                forced = self.guard.tier(launch.batch_size)
                if forced is not None:
                    asked, launch.forced = forced, True
            steps = tiers.num_steps[asked]
            if steps == 0:
                self.off.ask(tiers.kinds[asked])
            params.next_steps = steps
        launch.asked = asked

    def _take_joined(self, requests: list[Any]) -> int:
        """Return how many prefilled requests are in a decode batch for the first time.

        A request in the middle of its chunks joins later; one that is done never does.
        """
        joined = [request for request in requests if request in self._prefilled]
        self._prefilled.difference_update(joined)
        self._any_prefilled = len(self._prefilled) > 0
        return len(joined)

    def _launched(self, launch: Launch, result: Any) -> None:
        """Note which tier runs, and wait for the result."""
        launch.result = result
        if self.recorder is not None:
            launch.host_s = time.perf_counter() - launch.decided_s
        if launch.decode:
            self._note_tier(launch)
        self._await(launch)

    def _await(self, launch: Launch) -> None:
        launches = self._launches
        launches[id(launch.result)] = launch
        if len(launches) > MAX_LAUNCHES:
            del launches[next(iter(launches))]  # The oldest will have no result any more.

    def _note_tier(self, launch: Launch) -> None:
        """Note which tier a launch runs."""
        width = launch.result.speculative_num_draft_tokens
        if width is None:
            return
        steps = launch.num_steps = width - 1
        if steps == 0:
            launch.off = self.off.ran
            launch.keeps_warm = launch.off == WARM
        governor = self.governor
        if governor is not None:
            tiers, tier = governor.tiers, launch.asked
            # Mostly the tier that was asked for.
            if (
                tier is None
                or tiers.num_steps[tier] != steps
                or (steps == 0 and tiers.kinds[tier] != launch.off)
            ):
                tier = tiers.index_of(steps, launch.keeps_warm, tier, launch.off)
            launch.tier = tier
            launch.cold_start = governor.launched(tier, steps, launch.keeps_warm, launch.batch_size)

    def _learn_repeats(self) -> None:
        """Catch up with the rounds that repeated a decision, before there is another one."""
        repeats, self._repeats = self._repeats, []
        decided = before = self._decided
        for result, started_s, host_s, result_s, requests, finished in repeats:
            try:
                launch = Launch(True, self._repeat_batch, 0, 0, 0.0, started_s, repeats=True)
                launch.result, launch.host_s = result, host_s
                if decided is not None and before is not None:
                    launch.batch_size, launch.asked = decided.batch_size, decided.asked
                    launch.queue_depth, launch.kv_use = decided.queue_depth, decided.kv_use
                    launch.context_tokens = before.context_tokens + before.tokens
                self._note_tier(launch)
                if result_s is None:  # Under the overlap schedule the last is still to come.
                    self._await(launch)
                else:
                    self._learn(launch, requests, finished, result_s)
                before = launch
            except Exception:
                self._failed(static=False)

    def _learn(
        self, launch: Launch, requests: list[Any], finished: list[bool] | None, now_s: float
    ) -> None:
        """Learn from a result what the next decision needs.

        Args:
            launch: Of the result.
            requests: Of the batch; only for the decision log.
            finished: Which of them were done before; only for the decision log.
            now_s: Clock when the result had been processed.
        """
        # Nothing ran before the first batch after an idle time: it began with its launch.
        before_s = launch.started_s if self._last_result_s is None else self._last_result_s
        self._last_result_s = now_s
        launch.round_s = now_s - before_s
        if launch.num_steps:
            correct = launch.correct = launch.result.num_correct_drafts_per_req_cpu
            if correct is not None and launch.tier is not None and self.governor is not None:
                self.governor.result(launch.tier, launch.num_steps, launch.cold_start, correct)
        if launch.decode:
            self.load.add(launch.tokens)
        try:
            self._record(launch, requests, finished)
        except Exception:  # Only some ranks record: it must change nothing that they share.
            self._failed(static=False)

    def _record(self, launch: Launch, requests: list[Any], finished: list[bool] | None) -> None:
        """Record a round; the arguments are those of :meth:`_learn`."""
        if self.recorder is not None:
            self.recorder.put(trace_row(launch))
        if finished is not None and self.decisions is not None and launch.decode:
            tiers = None if self.governor is None else self.governor.tiers
            self.decisions.put(decision_row(launch, tiers, requests, finished))
        launch.result = None  # It holds tensors.
        if self.governor is not None:
            self._done.append(launch)
            if len(self._done) >= HAND_OVER_ROUNDS:
                self._hand_over()

    def _hand_over(self) -> None:
        """Tell summary, metrics and guard of the results since the last time."""
        self._learn_repeats()
        rows, self._done = self._done, []
        governor, metrics = self.governor, self.metrics
        if governor is None:
            return
        guard = self.guard if self.mode == ON else None
        guard_forced = 0 if self.guard is None else self.guard.forced
        for launch in rows:
            tier = launch.tier
            before = self._last_tier
            self._same_tier_results = 1 if tier != before else self._same_tier_results + 1
            self._last_tier = tier
            if tier is None:
                continue
            name = governor.tiers.tiers[tier].name
            self.summary.add(name, launch.asked == tier, self.fallbacks)
            if metrics is not None:
                metrics.put(round_count(launch, guard_forced))
            # After anything but a decode round its time was not that of a decode round alone.
            if guard is not None and guard.measures and before is not None:
                guard.measured(
                    tier,
                    launch.batch_size,
                    launch.tokens,
                    launch.round_s,
                    governor.predicted_s(launch.batch_size, launch.context_tokens),
                    launch.asked == tier and not launch.forced,
                    self._same_tier_results >= MIN_STEADY,
                )

    def _failed(self, static: bool = True) -> None:
        """Count an error; say what it was, once.

        Args:
            static: Whether it left a round without a decision, which then runs at the static steps.
                An error beside the decisions must change none: it may be one rank's alone.
        """
        self.fallbacks += 1
        if static:
            self._go_static()
        if self.metrics is not None:
            with contextlib.suppress(Exception):
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
