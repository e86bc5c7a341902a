"""The decision path: what the scheduler holds -> observation -> policy -> tier.

One object a scheduler process. It holds plain Python lists, because a NumPy call on a short array
costs more than the arithmetic in it. All it is told are counts that are equal on all
tensor-parallel ranks, and it reads no clock and draws no random number: every rank decides alike.
What is remembered, and when, is as in ``env/server_loop.py``.
"""

from collections.abc import Sequence

from controller.acceptance import NUM_COUNTS
from controller.checkpoint import Checkpoint
from controller.features import (
    SCRATCH_SIZE,
    digest_evidence,
    fill_digested,
    observation_size,
)
from controller.memory import (
    NUM_MEMORY,
    record_join,
    record_launch,
    record_result,
    reset_memory,
)
from controller.tiers import MAX_NUM_STEPS
from engine_hooks.tiers import RunnableTiers, costed_tiers, runnable


class Governor:
    """Chooses the tier of the next decode round.

    Attributes:
        tiers: What the policy's logits stand for in this server.
        static_tier: The tier that the server was started with.
    """

    def __init__(
        self, checkpoint: Checkpoint, max_running_requests: int, initial_steps: int
    ) -> None:
        """Prepare the lists.

        Args:
            checkpoint: The policy and the calibration that it sees costs of.
            max_running_requests: The server's limit.
            initial_steps: Draft steps that the server was started with.
        """
        self.tiers: RunnableTiers = runnable(checkpoint.tiers, checkpoint.calibration)
        self.static_tier = self.tiers.index_of(initial_steps, True)
        num_tiers = len(self.tiers.num_steps)
        costed = costed_tiers(checkpoint.tiers, self.tiers.tiers, checkpoint.calibration)
        table = checkpoint.calibration.table(costed, max_running_requests)
        self._policy = checkpoint.policy
        self._max_running_requests = max_running_requests
        self._base_s: list[list[float]] = table.base_s.T.tolist()
        self._context_s: list[float] = table.context_s_per_token.tolist()
        self._num_steps = list(self.tiers.num_steps)
        self._observation = [0.0] * observation_size(num_tiers)
        self._digest = [0.0] * SCRATCH_SIZE
        self._memory = [0.0] * NUM_MEMORY
        self._tries = [0.0] * NUM_COUNTS
        self._successes = [0.0] * NUM_COUNTS
        self._recent = [1.0] * num_tiers
        self._ages = [0.0] * num_tiers
        reset_memory(
            self._memory,
            self._tries,
            self._successes,
            self._recent,
            self._ages,
            self.static_tier,
        )
        self._digest_evidence()

    def _digest_evidence(self) -> None:
        """Prepare what decisions need of the results, so that no launch waits for it."""
        digest_evidence(self._digest, self._tries, self._successes, self._recent, self._num_steps)

    def decide(self, batch_size: int, queue_depth: int, context_tokens: int, kv_use: float) -> int:
        """Return the tier of the decode round that is about to be launched.

        Args:
            batch_size: Requests of the round, at least 1.
            queue_depth: Waiting requests.
            context_tokens: Context tokens summed over the batch.
            kv_use: Share of the KV cache that is held, 0 to 1.

        Raises:
            ValueError: If the policy gives anything but one of the tiers.
        """
        base_s = self._base_s[min(batch_size, self._max_running_requests)]
        step_s = [b + c * context_tokens for b, c in zip(base_s, self._context_s, strict=True)]
        fill_digested(
            self._observation,
            batch_size,
            queue_depth,
            context_tokens,
            kv_use,
            self._max_running_requests,
            self._memory,
            self._ages,
            self._num_steps,
            step_s,
            self._digest,
        )
        tier = self._policy.choose(self._observation)
        if not 0 <= tier < len(self._num_steps):
            raise ValueError(f"expected a tier from 0 to {len(self._num_steps) - 1}, got {tier}")
        return tier

    def joined(self, num_joined: int, batch_size: int) -> None:
        """Note that requests were prefilled into what is now a batch of ``batch_size``."""
        record_join(self._memory, self._tries, self._successes, num_joined, batch_size)
        self._digest_evidence()

    def launched(self, tier: int, num_steps: int, keeps_warm: bool) -> bool:
        """Note the round that runs now.

        Returns:
            Whether it drafts on a stale draft state; :meth:`result` needs it.
        """
        return record_launch(self._memory, self._ages, tier, num_steps, keeps_warm)

    def result(
        self, tier: int, num_steps: int, cold_start: bool, num_correct: Sequence[int]
    ) -> None:
        """Add the result of a round, which the overlap schedule gives one launch later.

        Args:
            tier: The tier that ran.
            num_steps: Draft steps that it really had.
            cold_start: What :meth:`launched` returned for it.
            num_correct: Correct drafts of each row, those of finished requests included.
        """
        if num_steps > MAX_NUM_STEPS:
            return  # Deeper than anything the policy could have asked for: shadow mode only.
        counts = bytes(num_correct)  # Counting bytes is many times faster than a loop.
        histogram = [counts.count(value) for value in range(MAX_NUM_STEPS + 1)]
        record_result(
            self._tries, self._successes, self._recent, tier, num_steps, cold_start, histogram
        )
        self._digest_evidence()
