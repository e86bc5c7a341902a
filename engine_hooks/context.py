"""The context tokens of a decode batch, without waiting for the GPU.

Under the overlap schedule SGLang keeps no total on the CPU; then the requests' lengths are added
up. In a server, whose other work empties the caches, that takes some 100 microseconds, much more
than a decision. So large batches are counted every few rounds only, and in between each request is
taken to have the mean of the last count: a few rounds add a few tokens to hundreds. Rounds are the
same on all ranks, and so is what is counted when.
"""

from typing import Any

from engine_hooks.symbols import count_context, kept_context

ALWAYS_COUNTED = 4
"""Largest batch that is counted every round."""
COUNT_EVERY = 8
"""Rounds between two counts of a larger batch."""


class ContextCounter:
    """Remembers the last count.

    Attributes:
        exact: Whether to count every batch, for a trace.
    """

    def __init__(self) -> None:
        self.exact = False
        self._rounds_left = 0
        self._mean = 0.0
        self._smallest = self._largest = 0

    def tokens(self, batch: Any) -> int:
        """Return the context tokens summed over the batch; under overlap one round behind."""
        total = kept_context(batch)
        if total is not None:
            return total
        batch_size = len(batch.reqs)
        if (
            self._rounds_left > 0
            and max(self._smallest, ALWAYS_COUNTED + 1) <= batch_size <= self._largest
            and not self.exact
        ):
            self._rounds_left -= 1
            return int(self._mean * batch_size)
        total = count_context(batch)
        self._mean = total / batch_size if batch_size else 0.0
        # Many that came or went have other lengths: count at once.
        self._smallest = batch_size - batch_size // 8
        self._largest = batch_size + batch_size // 8
        self._rounds_left = COUNT_EVERY - 1
        return total

    def forget(self) -> None:
        """Count the next batch, whose requests are others."""
        self._rounds_left = 0
