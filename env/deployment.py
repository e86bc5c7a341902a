"""A server to simulate: its calibration, the tiers it may choose from, and its limits."""

from dataclasses import dataclass, field

import numpy as np

from controller.calibration import Calibration
from controller.errors import ConfigError
from controller.tiers import DEFAULT_TIERS, Tier, resolve_tiers
from env.acceptance_process import DraftRecovery
from env.state import Costs

SPECULATIVE_MAX_RUNNING = 48
"""SGLang's ``max_running_requests`` with speculation, unless the operator sets it."""


@dataclass(frozen=True)
class Deployment:
    """One server.

    Attributes:
        calibration: Costs of its system.
        tiers: Tier list such as ``"off,1,3"``; resolved against the calibration.
        off: What ``off`` means in ``tiers``: ``"auto"``, ``"native"``, ``"cold"`` or ``"warm"``.
        max_running_requests: Limit of the running batch. SGLang's own default with speculation is
            48, which caps the throughput of ``off`` too; the default here is what an operator of a
            governed server should set.
        kv_capacity_tokens: Tokens that the KV cache holds; None takes the calibration's.
        chunk_tokens: Most new tokens of a prefill batch; None takes the calibration's, or 8192.
        overlap: Whether the overlap schedule is on.
        noise: Whether round times scatter as measured. No observation depends on a round's time,
            so leaving the scatter out changes no policy's merit, only how fast one learns.
        recovery: What an off stretch costs the acceptance afterwards.
    """

    calibration: Calibration
    tiers: str = DEFAULT_TIERS
    off: str = "auto"
    max_running_requests: int = 256
    kv_capacity_tokens: int | None = None
    chunk_tokens: int | None = None
    overlap: bool = True
    noise: bool = True
    recovery: DraftRecovery = field(default_factory=DraftRecovery)

    def __post_init__(self) -> None:
        if not 1 <= self.max_running_requests <= 8192:
            raise ConfigError(
                f"max_running_requests {self.max_running_requests}: expected 1 to 8192"
            )
        for name in ("kv_capacity_tokens", "chunk_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value}: expected a positive number, or None")
        self.resolved_tiers()

    def resolved_tiers(self) -> tuple[Tier, ...]:
        """Return the tiers in the order of the actions."""
        return resolve_tiers(self.tiers, self.calibration.tier_names, self.off)

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache in tokens; one million if nobody knows it."""
        return self.kv_capacity_tokens or self.calibration.kv_capacity_tokens or 1_000_000

    @property
    def prefill_chunk(self) -> int:
        """Most new tokens of a prefill batch."""
        return self.chunk_tokens or self.calibration.chunk_tokens or 8192

    @property
    def reserved_tokens(self) -> int:
        """KV slots held for the next rounds of each running request.

        SGLang reserves twice the deepest verify width (``get_alloc_reserve_per_decode``), whatever
        tier runs; a server without speculation holds one slot.
        """
        deepest = max(tier.num_steps for tier in self.resolved_tiers())
        return 2 * (deepest + 1) if deepest else 1

    @property
    def initial_tier(self) -> int:
        """Index of the tier a server starts with: the deepest, as SGLang's buffers require."""
        return len(self.resolved_tiers()) - 1


def stack_costs(deployments: list[Deployment]) -> Costs:
    """Tabulate the costs of deployments that share one tier list, one row each.

    Raises:
        ConfigError: If their tiers differ in draft steps or in which kinds of off go stale.
    """
    tiers = deployments[0].resolved_tiers()
    shape = [(tier.num_steps, tier.keeps_draft_warm) for tier in tiers]
    for other in deployments[1:]:
        if [(t.num_steps, t.keeps_draft_warm) for t in other.resolved_tiers()] != shape:
            raise ConfigError(
                "servers simulated side by side need one tier list, got "
                f"{[t.name for t in tiers]} and {[t.name for t in other.resolved_tiers()]}"
            )
    size = max(deployment.max_running_requests for deployment in deployments)
    tables = [d.calibration.table(d.resolved_tiers(), size) for d in deployments]
    drafts = any(tier.num_steps for tier in tiers)
    prefill = [
        d.calibration.prefill_speculative if drafts else d.calibration.prefill_native
        for d in deployments
    ]
    return Costs(
        num_steps=np.array([tier.num_steps for tier in tiers], np.int64),
        keeps_warm=np.array([tier.keeps_draft_warm for tier in tiers], np.bool_),
        base_s=np.stack([table.base_s for table in tables]),
        context_s=np.stack([table.context_s_per_token for table in tables]),
        noise=np.stack(
            [t.relative_noise * float(d.noise) for t, d in zip(tables, deployments, strict=True)]
        ),
        prefill_base_s=np.array([cost.base_s for cost in prefill]),
        prefill_token_s=np.array([cost.s_per_token for cost in prefill]),
    )
