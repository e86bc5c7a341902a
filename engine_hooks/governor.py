"""The decision path: what the scheduler holds -> observation -> policy -> tier.

One object a scheduler process. All it is told are counts that are equal on all tensor-parallel
ranks, and it reads no clock and draws no random number: every rank decides alike. What is
remembered, and when, is as in ``env/server_loop.py``.
"""

from controller.checkpoint import Checkpoint
from controller.decision import ListDecision, make_decision
from controller.tiers import MAX_NUM_STEPS
from engine_hooks.tiers import RunnableTiers, costed_tiers, runnable


class Governor:
    """Chooses the tier of the next decode round.

    Attributes:
        tiers: What the policy's logits stand for in this server.
        static_tier: The tier that the server was started with.
        compiled: Whether decisions run as machine code; all ranks of a server must agree in it.
        joined: Tells the memory that requests joined; see :class:`controller.decision.Decision`.
        launched: Tells it which round runs now.
        result: Tells it of a result.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        max_running_requests: int,
        initial_steps: int,
        native: bool = False,
    ) -> None:
        """Prepare the memory; compiles the decision path if Numba is installed.

        Args:
            checkpoint: The policy and the calibration that it sees costs of.
            max_running_requests: The server's limit.
            initial_steps: Draft steps that the server was started with.
            native: Whether the server can run native rounds.
        """
        self.tiers: RunnableTiers = runnable(checkpoint.tiers, checkpoint.calibration, native)
        self.static_tier = self.tiers.index_of(initial_steps, True)
        costed = costed_tiers(checkpoint.tiers, self.tiers.tiers, checkpoint.calibration)
        table = checkpoint.calibration.table(costed, max_running_requests)
        self.decision = make_decision(
            checkpoint.policy,
            self.tiers.num_steps,
            table.base_s.T,
            table.context_s_per_token,
            checkpoint.calibration.prefill_speculative.base_s,
            max_running_requests,
            self.static_tier,
        )
        # Without a call in between: each takes microseconds where its code is in no cache.
        self.joined = self.decision.joined
        self.launched = self.decision.launched
        self.result = self.decision.result
        self.compiled = not isinstance(self.decision, ListDecision)
        self._max_running_requests = max_running_requests
        self._base_s: list[list[float]] = table.base_s.T.tolist()
        self._context_s: list[float] = table.context_s_per_token.tolist()

    def policy_tier(
        self, batch_size: int, queue_depth: int, context_tokens: int, kv_use: float
    ) -> int:
        """Return the policy's tier for the decode round that is about to be launched.

        Args:
            batch_size: Requests of the round, at least 1.
            queue_depth: Waiting requests.
            context_tokens: Context tokens summed over the batch.
            kv_use: Share of the KV cache that is held, 0 to 1.

        Raises:
            SpecGovernorError: If an entry of the observation is not finite.
        """
        return self.decision.choose(batch_size, queue_depth, context_tokens, kv_use)

    def predicted_s(self, batch_size: int, context_tokens: int) -> list[float]:
        """Return the calibrated seconds of a round, ``(K,)``."""
        base_s = self._base_s[min(batch_size, self._max_running_requests)]
        return [b + c * context_tokens for b, c in zip(base_s, self._context_s, strict=True)]

    def accept_len(self, tier: int) -> tuple[float, float]:
        """Return a tier's estimated accept length (medium scale) and that of its last rounds."""
        estimated = self.decision.accept_len[MAX_NUM_STEPS + 1 + self.tiers.num_steps[tier]]
        return float(estimated), float(self.decision.recent_accept_len[tier])
