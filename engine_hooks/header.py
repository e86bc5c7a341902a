"""The header of a step trace: what system a scheduler runs on."""

from typing import Any

from controller import __version__
from controller.errors import ConfigError
from controller.tiers import COLD, NATIVE
from controller.trace import TraceHeader
from engine_hooks import symbols
from engine_hooks.governor import Governor
from engine_hooks.tiers import OffSwitch


def trace_header(scheduler: Any, governor: Governor | None) -> TraceHeader:
    """Return the header for a scheduler.

    Raises:
        ConfigError: If rounds without drafts would be of two kinds, which the schema cannot tell
            apart.
    """
    speculative = symbols.speculates(scheduler)
    draft = symbols.draft_model(scheduler) if speculative else None
    return TraceHeader(
        engine_version=symbols.installed_version(),
        hardware=symbols.hardware(scheduler),
        model=symbols.target_model(scheduler),
        draft=draft or None,
        attention_backend=symbols.attention_backend(scheduler),
        overlap_schedule=bool(scheduler.enable_overlap),
        cuda_graph_batch_sizes=symbols.graph_batch_sizes(scheduler),
        speculative=speculative,
        zero_step=_zero_step(governor) if speculative else None,
        acceptance="simulated" if symbols.simulates_acceptance() else "real",
        recorder=f"specgovernor {__version__}",
        notes="" if governor is None else "tiers chosen by the governor",
    )


def _zero_step(governor: Governor | None) -> str:
    """Return the kind of zero-step round that this server runs; native rounds are none."""
    kinds: set[str] = set()
    if governor is not None:
        kinds = {tier.kind for tier in governor.tiers.tiers if tier.is_off}
        if NATIVE in kinds:
            kinds = kinds - {NATIVE} | {COLD}  # What a native round runs as if it cannot.
    if len(kinds) > 1:
        raise ConfigError(
            f"expected one kind of off in a step trace, got {', '.join(sorted(kinds))}; record "
            "with a policy that has one of them"
        )
    return kinds.pop() if kinds else OffSwitch().ran
