"""Sets SGLang's flags for the governor while a server resolves its arguments.

SGLang makes buffers and CUDA graphs for the steps in a config file, and when adaptive speculation
is not possible it switches that off with a mere warning. Here the file is written, the flags are
set, and what is not possible is an error.
"""

import atexit
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from controller.errors import ConfigError, SpecGovernorError
from engine_hooks import symbols
from engine_hooks.settings import MODE, ON, Settings
from engine_hooks.tiers import runnable
from engine_hooks.verify import refusal_line

logger = logging.getLogger("engine_hooks")


class ServerSetup:
    """The hook around the resolution of a server's arguments."""

    def __init__(self, settings: Settings) -> None:
        """Note the settings; nothing is read until a server starts."""
        self._settings = settings

    def resolve(
        self, original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Set the flags, let SGLang resolve them, and check what has become of them.

        Raises:
            ConfigError: If the mode is on and adaptive speculation cannot run on a server that
                speculates, or the policy cannot be loaded and the operator said strict.
        """
        governed = (
            self._settings.policy is not None
            and not symbols.is_resolved(server_args)
            and self._ask(server_args)
        )
        asked_max = getattr(server_args, "max_running_requests", None)
        returned = original(server_args, *args, **kwargs)
        if governed:
            reason = symbols.unsupported_reason(server_args)
            if reason is not None and self._settings.mode == ON:
                raise ConfigError(
                    f"specgovernor: SGLang cannot change the draft steps of this server: {reason}; "
                    f"change that, or set {MODE}=off"
                )
            if reason is not None:
                logger.warning(
                    "specgovernor: this server cannot be switched on later, since SGLang cannot "
                    "change its draft steps: %s",
                    reason,
                )
            elif asked_max is None:
                logger.warning(
                    "specgovernor: with speculation SGLang runs at most %d requests at a time "
                    "unless --max-running-requests says otherwise, also while the governor is off "
                    "speculation; set it to what the server ran without speculation",
                    symbols.DEFAULT_MAX_RUNNING_REQUESTS,
                )
        return returned

    def _ask(self, server_args: Any) -> bool:
        """Set the flags; return whether they were."""
        try:
            if not server_args.speculative_algorithm:
                raise ConfigError("it was started without --speculative-algorithm")
            if getattr(server_args, "pp_size", 1) > 1:
                raise ConfigError("SGLang cannot change draft steps with pipeline parallelism")
            checkpoint = self._settings.load_policy()
            steps = set(runnable(checkpoint.tiers, checkpoint.calibration).num_steps)
        except SpecGovernorError as error:
            line = refusal_line(symbols.installed_version(), str(error))
            if self._settings.strict:
                raise ConfigError(line) from error
            logger.error(line)
            return False
        if server_args.speculative_adaptive_config:
            logger.warning(
                "specgovernor: --speculative-adaptive-config is not used; the policy's tiers are"
            )
        if server_args.speculative_num_steps is not None:
            steps.add(server_args.speculative_num_steps)
        symbols.ask_for_adaptive(server_args, str(write_candidate_steps(steps)))
        return True


def write_candidate_steps(steps: Iterable[int]) -> Path:
    """Write SGLang's config file for these steps at every batch size; it goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix="specgovernor-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "candidate_steps.json"
    path.write_text(json.dumps({"1": {"candidate_steps": sorted(steps)}}), encoding="utf-8")
    return path
