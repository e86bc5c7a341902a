"""Checks in the scheduler process that the hooks sit where they should, and says so in one line.

SGLang logs and swallows a hook that cannot be applied, and another plugin may replace what a hook
was on: so what counts is what is on the target once the scheduler exists.
"""

import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

from controller import __version__
from controller.checkpoint import Checkpoint


def missing_hooks(hooks: Mapping[str, Any]) -> list[str]:
    """Return the targets, dotted paths, that their hook does not sit on.

    Args:
        hooks: The hook by target: a function that SGLang wraps in, or a class that replaces one.
    """
    return [target for target, hook in hooks.items() if not _sits(target, hook)]


def _sits(target: str, hook: Any) -> bool:
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return any(layer is hook or hook in _enclosed(layer) for layer in _layers(found))


def _layers(function: Any) -> Iterator[Any]:
    """Yield a function, what it wraps, what that wraps, and so on."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _enclosed(function: Any) -> list[Any]:
    """Return the functions that a closure holds: SGLang's wrapper holds the hook."""
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if callable(cell.cell_contents)]


def ranks_agree(value: str, group: Any) -> bool:
    """Tell whether all tensor-parallel ranks hold the same value. Every rank must call it.

    Ranks that would decide with different policies, or one without any, would launch rounds of
    different widths and hang.
    """
    import torch.distributed as distributed

    values: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)
    return all(other == value for other in values)


def first_reason(reason: str, group: Any) -> str:
    """Return the first rank's reason that is none of the empty ones, on all ranks alike.

    Every rank of the group must call it.
    """
    import torch.distributed as distributed

    reasons: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(reasons, reason, group=group)
    return next((other for other in reasons if other), "")


def rank() -> int:
    """Return the rank of this process among those of its replica."""
    import torch.distributed as distributed

    return distributed.get_rank() if distributed.is_initialized() else 0


def first_of(group: Any) -> bool:
    """Tell whether this process is the first of a group."""
    import torch.distributed as distributed

    return distributed.get_rank(group) == 0


def start_line(
    sglang_version: str, mode: str, num_hooks: int, checkpoint: Checkpoint, candidates: list[int]
) -> str:
    """Return the line that says that all is well."""
    verb = {"on": "governs", "shadow": "shadows", "off": "is off, and can be switched on, in"}[mode]
    return (
        f"specgovernor {__version__} {verb} SGLang {sglang_version}: {num_hooks} hooks verified, "
        f"policy {checkpoint.directory.name} sha256 {checkpoint.sha256[:12]}, calibration "
        f"{checkpoint.calibration.name}, tiers "
        f"{', '.join(tier.name for tier in checkpoint.tiers)}, candidate steps {candidates}"
    )


def refusal_line(sglang_version: str, reason: str) -> str:
    """Return the line that says why nothing is governed."""
    return (
        f"specgovernor {__version__} does NOT govern SGLang {sglang_version or '(none)'}, which "
        f"runs as it was started: {reason}"
    )
