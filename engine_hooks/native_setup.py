"""Sets native rounds up in every rank of a server, or in none."""

import logging
from collections.abc import Callable
from typing import Any

from engine_hooks.native import NativeDecode
from engine_hooks.verify import first_reason, rank

logger = logging.getLogger(__name__)

NOT_WANTED = "not wanted"
"""The reason of a rank whose policy has no native tier; nothing to tell anybody."""


def set_up(native: NativeDecode, scheduler: Any, wants: Callable[[Any], bool]) -> bool:
    """Prepare native rounds if every rank can run them. Every rank must call it; it never raises.

    Args:
        native: This rank's.
        scheduler: SGLang's, whose worker has captured its own graphs.
        wants: Whether the policy asks for native rounds, of the scheduler.

    Returns:
        Whether all ranks can run them now.
    """
    group = scheduler.tp_cpu_group
    try:
        wanted = wants(scheduler)
        reason = native.refusal(scheduler) if wanted else NOT_WANTED
    except Exception as error:  # Said again, and louder, where the policy is loaded to be used.
        logger.debug("specgovernor: no native decode", exc_info=True)
        reason = f"{type(error).__name__}: {error}"
    reason = first_reason(reason, group)
    if not reason:
        # Captures run collectives: a rank that fails alone can leave the others waiting, here as
        # in SGLang's own.
        reason = first_reason(native.prepare(scheduler), group)
        if reason:
            native.remove()
    if reason and reason != NOT_WANTED and rank() == 0:
        logger.warning("specgovernor: 'native' cannot run here and runs as 'cold': %s", reason)
    if not reason and rank() == 0:
        logger.info("specgovernor: native rounds: %s", native.description)
    return not reason
