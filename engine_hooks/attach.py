"""Ties the driver to a scheduler once that exists: governor, logs, checks, start line."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from controller.checkpoint import Checkpoint
from controller.errors import ConfigError, SpecGovernorError
from controller.tiers import NATIVE
from engine_hooks import symbols
from engine_hooks.decision_log import DecisionLog
from engine_hooks.driver import Driver
from engine_hooks.governor import Governor
from engine_hooks.guard import Guard
from engine_hooks.header import trace_header
from engine_hooks.metrics import GovernorMetrics
from engine_hooks.native_setup import set_up
from engine_hooks.params import GovernedParams
from engine_hooks.recorder import TraceRecorder
from engine_hooks.settings import ON, Settings
from engine_hooks.verify import (
    first_of,
    missing_hooks,
    rank,
    ranks_agree,
    refusal_line,
    start_line,
)

logger = logging.getLogger("engine_hooks")


class Attachment:
    """Builds what a scheduler process needs, once its scheduler is built."""

    def __init__(self, settings: Settings, driver: Driver, hooks: Mapping[str, Any]) -> None:
        """Note what is to be verified.

        Args:
            settings: The operator's.
            driver: Gets the governor and the logs.
            hooks: The hook by target.
        """
        self._settings = settings
        self._driver = driver
        self._hooks = hooks

    def init(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Build the scheduler, then attach to it.

        Raises:
            ConfigError: If it cannot be governed and the operator said strict.
        """
        original(scheduler, *args, **kwargs)
        # On every rank, although one records: they must all see the same.
        self._driver.load.exact = self._settings.trace is not None
        if self._settings.policy is not None:
            self._govern(scheduler)
        for record in (self._log_decisions, self._record):
            try:
                record(scheduler)
            except Exception:
                logger.exception("specgovernor: it cannot be recorded")

    def _govern(self, scheduler: Any) -> None:
        version = symbols.installed_version()
        checkpoint: Checkpoint | None = None
        # Every rank gets through this, and to the comparison, whatever goes wrong on it.
        native = set_up(self._driver.off.native, scheduler, self._wants_native)
        try:
            checkpoint = self._checked(scheduler)
            governor = self._governor(scheduler, checkpoint, native)
            symbols.kv_use(scheduler)  # What every decision reads must be readable.
            state = (
                f"{checkpoint.sha256} {checkpoint.calibration.sha256} {self._settings.mode} "
                f"{governor.tiers.num_steps} {governor.tiers.kinds} "
                f"{governor.compiled} {self._settings.guard} {self._settings.trace is None} "
                f"{self._settings.repeat}"
            )
            reason = ""
        except SpecGovernorError as error:
            state = reason = str(error)
        except Exception as error:
            logger.debug("specgovernor: cannot attach", exc_info=True)
            state = reason = f"{type(error).__name__}: {error}"
        if symbols.num_ranks(scheduler.tp_cpu_group) > 1:
            logger.info(
                "specgovernor: comparing the tensor-parallel ranks; a rank whose environment lacks "
                "the plugin or its settings makes the others wait here"
            )
        # Every rank gets here, whatever went wrong on it, so that none waits for another.
        if not ranks_agree(state, scheduler.tp_cpu_group):
            reason = reason or (
                "the tensor-parallel ranks differ in policy, calibration, tiers, mode, guard, "
                "trace, repeated rounds or Numba"
            )
        if reason or checkpoint is None:
            self._refuse(version, reason)
            return
        driver = self._driver
        driver.ignores_queue = symbols.queues_differ_between_ranks(version)
        driver.governor = governor
        driver.repeat_rounds = self._settings.repeat
        params = symbols.governed_params(scheduler)
        if isinstance(params, GovernedParams):
            driver.params = params
            # SGLang prints every switch; the driver sums them up.
            logging.getLogger(symbols.WORKER_LOGGER).addFilter(_is_no_switch)
            if self._settings.guard:
                driver.guard = self._guard(scheduler, governor)
        driver.mode = self._settings.mode
        driver.summary.speaks = rank() == 0
        self._export(scheduler)
        if driver.summary.speaks:
            candidates = [] if driver.params is None else list(driver.params.candidate_steps)
            logger.info(
                start_line(version, self._settings.mode, len(self._hooks), checkpoint, candidates)
            )
            self._remark(scheduler, governor)

    def _guard(self, scheduler: Any, governor: Governor) -> Guard:
        group = scheduler.tp_cpu_group
        return Guard(
            governor.tiers.num_steps,
            [tier.name for tier in governor.tiers.tiers],
            governor.static_tier,
            governor.accept_len,
            lambda order: symbols.from_first_rank(order, group),
            first_of(group),
        )

    def _export(self, scheduler: Any) -> None:
        """Export metrics, if this scheduler exports any."""
        try:
            labels = symbols.metrics_labels(scheduler)
            if labels is not None:
                self._driver.metrics = GovernorMetrics(labels)
                self._driver.metrics.set_mode(self._driver.mode)
        except Exception:
            logger.exception("specgovernor: its metrics are not exported")

    def _checked(self, scheduler: Any) -> Checkpoint:
        """Load the policy and check that hooks and buffers are there.

        Raises:
            SpecGovernorError: If the policy does not load or something is missing.
        """
        checkpoint = self._settings.load_policy()
        missing = missing_hooks(self._hooks)
        if missing:
            raise ConfigError(f"no hook sits on {', '.join(missing)}; another plugin may be on it")
        return checkpoint

    def _wants_native(self, scheduler: Any) -> bool:
        """Tell whether the policy has a native tier, and the server can change tiers."""
        tiers = self._settings.load_policy().tiers
        governed = isinstance(symbols.governed_params(scheduler), GovernedParams)
        return governed and any(tier.kind == NATIVE for tier in tiers)

    def _governor(self, scheduler: Any, checkpoint: Checkpoint, native: bool) -> Governor:
        params = symbols.governed_params(scheduler)
        governed = isinstance(params, GovernedParams)
        if self._settings.mode == ON and not governed:
            raise ConfigError(
                "SGLang does not ask the governor for steps; adaptive speculation is off or "
                f"{type(params).__name__} has taken its place"
            )
        initial = params.static_steps if governed else symbols.initial_steps(scheduler)
        governor = Governor(checkpoint, scheduler.max_running_requests, initial, native)
        if governed:
            lacking = sorted(set(governor.tiers.num_steps) - set(params.candidate_steps))
            if lacking:
                raise ConfigError(
                    f"the candidate steps {params.candidate_steps} that SGLang has buffers for "
                    f"lack {lacking}; start the server with `python -m engine_hooks.launch`"
                )
        return governor

    def _refuse(self, version: str, reason: str) -> None:
        self._driver.off.native.remove()
        line = refusal_line(version, reason)
        if self._settings.strict:
            raise ConfigError(line)
        logger.error(line)

    def _remark(self, scheduler: Any, governor: Governor) -> None:
        """Say what runs otherwise than the operator may think."""
        for note in governor.tiers.notes:
            logger.warning("specgovernor: %s", note)
        if not governor.compiled:
            logger.warning(
                "specgovernor: without Numba a decision costs some three times as much; install "
                "specgovernor[sglang]"
            )
        if self._driver.ignores_queue:
            logger.warning(
                "specgovernor: the queue depth is taken as 0, since in this SGLang each rank drops "
                "requests that wait too long by its own clock; unset %s to use it",
                symbols.WAITING_TIMEOUT,
            )
        reserved = 2 * max(governor.tiers.num_steps) * scheduler.max_running_requests
        if self._driver.params is not None and reserved > 0.02 * scheduler.max_total_num_tokens:
            logger.warning(
                "specgovernor: %d of %d KV tokens are kept for the deepest draft at %d running "
                "requests, which a server without speculation would use; lower "
                "--max-running-requests, raise --mem-fraction-static, or train with fewer steps",
                reserved,
                scheduler.max_total_num_tokens,
                scheduler.max_running_requests,
            )

    def _log_decisions(self, scheduler: Any) -> None:
        if self._settings.decisions is not None and self._driver.governor is not None:
            self._driver.decisions = DecisionLog(self._settings.decisions, rank())

    def _record(self, scheduler: Any) -> None:
        if self._settings.trace is not None and rank() == 0:
            header = trace_header(scheduler, self._driver.governor)
            self._driver.recorder = TraceRecorder(self._settings.trace, header)
            logger.info("specgovernor: step trace goes to %s", self._driver.recorder.files[0])


def _is_no_switch(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(symbols.SWITCH_MESSAGE)
