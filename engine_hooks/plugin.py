"""The entry point that SGLang calls in each of its processes, before a server is built."""

import logging
import multiprocessing
from typing import Any

from controller.errors import ConfigError
from engine_hooks import symbols
from engine_hooks.settings import Settings, asks_for_strict
from engine_hooks.verify import refusal_line

logger = logging.getLogger("engine_hooks")


def register() -> None:
    """Register the hooks that the settings ask for; with neither policy nor trace, none.

    Raises:
        SystemExit: If the server cannot be governed and the operator said strict.
    """
    try:
        settings = Settings.from_environment()
    except ConfigError as error:
        _refuse(str(error))
        return
    if settings.idle:
        return
    version = symbols.installed_version()
    try:
        faults = symbols.check_symbols()
    except (OSError, SyntaxError) as error:
        faults = [f"its source cannot be read ({error})"]
    if faults:
        _refuse("; ".join(faults))
        return
    if symbols.version_key(version) > symbols.version_key(symbols.LAST_SUPPORTED):
        _say(f"specgovernor: SGLang {version} is newer than any that was tried; it has all symbols")
    try:
        install(settings)
    except Exception as error:  # SGLang would swallow it, and start without a word.
        _refuse(f"{type(error).__name__}: {error}")


def _refuse(reason: str) -> None:
    """Say why nothing is governed, and end the process if the operator said strict.

    SGLang swallows any other exception of a plugin.
    """
    line = refusal_line(symbols.installed_version(), reason)
    if asks_for_strict():
        raise SystemExit(line)
    _say(line)


def install(settings: Settings) -> None:
    """Register the hooks with SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from engine_hooks.attach import Attachment
    from engine_hooks.driver import Driver
    from engine_hooks.params import GovernedParams
    from engine_hooks.server_setup import ServerSetup

    driver = Driver()
    verified: dict[str, Any] = {
        symbols.RUN_BATCH: driver.run_batch,
        symbols.PROCESS_RESULT: driver.process_batch_result,
        symbols.ON_IDLE: driver.on_idle,
    }
    if settings.policy is not None:
        verified[symbols.SET_STATE] = driver.set_internal_state
        verified[symbols.PARAMS] = GovernedParams
    attachment = Attachment(settings, driver, verified)
    around = {
        symbols.INIT: attachment.init,
        symbols.resolution_target(): ServerSetup(settings).resolve,
    }
    for target, hook in {**verified, **around}.items():
        kind = HookType.REPLACE if isinstance(hook, type) else HookType.AROUND
        HookRegistry.register(target, hook, kind)


def _say(line: str) -> None:
    """Log an error once a server: its processes all come by here."""
    if multiprocessing.parent_process() is None:
        logger.error(line)
