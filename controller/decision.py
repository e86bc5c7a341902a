"""One server's decisions: its memory, its estimates and the policy, on plain Python lists.

A NumPy call on a short array costs more than the arithmetic in it, hence the lists.
``controller.compiled_decision`` has the same class in compiled form, for where Numba is installed;
:func:`make_decision` takes that one if it can.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from controller.acceptance import NUM_COUNTS
from controller.features import SCRATCH_SIZE, digest_evidence, fill_digested, observation_size
from controller.memory import (
    NUM_MEMORY,
    record_join,
    record_launch,
    record_result,
    reset_memory,
)
from controller.policy import NumpyPolicy
from controller.tiers import MAX_NUM_STEPS

logger = logging.getLogger(__name__)

_UP_TO = [bytes(range(count + 1)) for count in range(MAX_NUM_STEPS + 1)]
"""Bytes that a row may be, by draft steps."""

REPEAT_BATCH = 4
"""Largest batch at which a decision may stand for several rounds. With so few requests SGLang waits
for its own Python, not for the GPU, so that a decision's time is lost in full."""
REPEAT_ROUNDS = 8
"""Rounds that such a decision stands for, unless requests join or leave, once the same tier was
chosen for as many rounds before: a probe is decided on round by round."""


class Decision(Protocol):
    """What both forms can do; see :class:`ListDecision`."""

    @property
    def accept_len(self) -> Sequence[float] | NDArray[np.float64]:
        """Estimated accept length by scale and depth."""

    @property
    def recent_accept_len(self) -> Sequence[float] | NDArray[np.float64]:
        """Mean accept length of each tier's recent rounds."""

    def choose(self, batch_size: int, queue_depth: int, context_tokens: int, kv_use: float) -> int:
        """Return the policy's tier for the next round."""

    def joined(self, num_joined: int, batch_size: int) -> None:
        """Note that requests joined the batch."""

    def launched(self, tier: int, num_steps: int, keeps_warm: bool, batch_size: int) -> bool:
        """Note a launch; return whether it drafts on a stale draft state."""

    def result(
        self, tier: int, num_steps: int, cold_start: bool, num_correct: Sequence[int]
    ) -> None:
        """Add the result of a round, which the overlap schedule gives one launch later."""


class ListDecision:
    """Memory and network of one server."""

    def __init__(
        self,
        policy: NumpyPolicy,
        num_steps: Sequence[int],
        base_s: NDArray[np.float64],
        context_s: NDArray[np.float64],
        prefill_s: float,
        max_running_requests: int,
        current_tier: int,
    ) -> None:
        """Forget everything.

        Args:
            policy: The network.
            num_steps: ``(K,)`` draft steps of each tier.
            base_s: ``(max_running_requests + 1, K)`` seconds of a round by batch size and tier.
            context_s: ``(K,)`` further seconds a context token.
            prefill_s: Fixed seconds of a prefill batch.
            max_running_requests: The server's limit.
            current_tier: The tier that the server starts with.
        """
        self._policy = policy
        self._prefill_s = prefill_s
        self._max_running_requests = max_running_requests
        self._base_s: list[list[float]] = base_s.tolist()
        self._context_s: list[float] = context_s.tolist()
        self._num_steps = list(num_steps)
        num_tiers = len(self._num_steps)
        self._observation = [0.0] * observation_size(num_tiers)
        self._digest = [0.0] * SCRATCH_SIZE
        self._memory = [0.0] * NUM_MEMORY
        self._tries = [0.0] * NUM_COUNTS
        self._successes = [0.0] * NUM_COUNTS
        self._recent = [1.0] * num_tiers
        self._ages = [0.0] * num_tiers
        reset_memory(
            self._memory, self._tries, self._successes, self._recent, self._ages, current_tier
        )
        self._digest_evidence()

    def _digest_evidence(self) -> None:
        """Prepare what decisions need of the results, so that no launch waits for it."""
        digest_evidence(self._digest, self._tries, self._successes, self._recent, self._num_steps)

    @property
    def accept_len(self) -> list[float]:
        """Estimated accept length by scale and depth; see :mod:`controller.acceptance`."""
        return self._digest

    @property
    def recent_accept_len(self) -> list[float]:
        """``(K,)`` mean accept length of each tier's recent rounds; 1 for a tier never run."""
        return self._recent

    def choose(self, batch_size: int, queue_depth: int, context_tokens: int, kv_use: float) -> int:
        """Return the policy's tier for the next round.

        Args:
            batch_size: Requests of the round, at least 1.
            queue_depth: Waiting requests.
            context_tokens: Context tokens summed over the batch.
            kv_use: Share of the KV cache that is held, 0 to 1.

        Raises:
            SpecGovernorError: If an entry of the observation is not finite.
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
            self._prefill_s,
            self._digest,
        )
        return self._policy.choose(self._observation)

    def joined(self, num_joined: int, batch_size: int) -> None:
        """Note that requests were prefilled into what is now a batch of ``batch_size``."""
        record_join(self._memory, self._tries, self._successes, num_joined, batch_size)
        self._digest_evidence()

    def launched(self, tier: int, num_steps: int, keeps_warm: bool, batch_size: int) -> bool:
        """Note the round that runs now; return whether it drafts on a stale draft state."""
        return record_launch(
            self._memory, self._ages, self._recent, tier, num_steps, keeps_warm, batch_size
        )

    def result(
        self, tier: int, num_steps: int, cold_start: bool, num_correct: Sequence[int]
    ) -> None:
        """Add the result of a round, which the overlap schedule gives one launch later.

        Args:
            tier: The tier that ran.
            num_steps: Draft steps that it really had.
            cold_start: What :meth:`launched` returned for it.
            num_correct: Correct drafts of each row, those of finished requests included.

        Raises:
            ValueError: If a row has more correct drafts than there were.
        """
        if num_steps > MAX_NUM_STEPS:
            return  # Deeper than anything the policy could have asked for: shadow mode only.
        rows = checked_rows(num_correct, num_steps)
        # Counting bytes is many times faster than a loop.
        histogram = [rows.count(value) for value in range(MAX_NUM_STEPS + 1)]
        record_result(
            self._tries, self._successes, self._recent, tier, num_steps, cold_start, histogram
        )
        self._digest_evidence()


def checked_rows(num_correct: Sequence[int], num_steps: int) -> bytes:
    """Return the correct drafts of each row, a byte each.

    Raises:
        ValueError: If one is negative or more than ``num_steps``.
    """
    rows = bytes(num_correct)
    if rows.translate(None, _UP_TO[num_steps]):
        raise ValueError(f"expected 0 to {num_steps} correct drafts a row, got {max(rows)}")
    return rows


def make_decision(
    policy: NumpyPolicy,
    num_steps: Sequence[int],
    base_s: NDArray[np.float64],
    context_s: NDArray[np.float64],
    prefill_s: float,
    max_running_requests: int,
    current_tier: int,
) -> Decision:
    """Return the compiled form, or the one on lists if Numba is missing or fails.

    The arguments are those of :class:`ListDecision`.
    """
    try:
        from controller.compiled_decision import CompiledDecision

        return CompiledDecision(
            policy, num_steps, base_s, context_s, prefill_s, max_running_requests, current_tier
        )
    except ImportError:
        logger.info("Numba is not installed: decisions are made in plain Python")
    except Exception:
        logger.warning("Numba failed: decisions are made in plain Python", exc_info=True)
    return ListDecision(
        policy, num_steps, base_s, context_s, prefill_s, max_running_requests, current_tier
    )
