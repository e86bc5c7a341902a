"""The context tokens of a decode batch, without waiting for the GPU.

Most attention backends keep the context lengths on the CPU. FA3 under the overlap schedule does
not; then they are counted from the requests, which takes some 20 microseconds for 256 of them. So
large batches are counted every few rounds only, and in between each request is taken to have the
mean of the last count: a few rounds add a few tokens to hundreds. Rounds are the same on all ranks,
and so is what is counted when.
"""

from typing import Any

from engine_hooks.symbols import context_sum, count_context

ALWAYS_COUNTED = 32
"""Largest batch that is counted every round."""
COUNT_EVERY = 8
"""Rounds between two counts of a larger batch."""


class ContextCounter:
    """Remembers the last count."""

    def __init__(self) -> None:
        self._rounds_left = 0
        self._mean = 0.0
        self._largest = 0

    def tokens(self, batch: Any) -> int:
        """Return the context tokens summed over the batch; under overlap one round behind."""
        total = context_sum(batch)
        if total is not None:
            return total
        batch_size = len(batch.reqs)
        if self._rounds_left > 0 and ALWAYS_COUNTED < batch_size <= self._largest:
            self._rounds_left -= 1
            return int(self._mean * batch_size)
        total = count_context(batch)
        self._mean = total / batch_size
        self._largest = batch_size + batch_size // 8  # More newcomers than that: count at once.
        self._rounds_left = COUNT_EVERY - 1
        return total
