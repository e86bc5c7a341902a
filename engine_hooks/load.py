"""The load that a decision sees beside the batch size: context tokens and the use of the KV cache.

Under the overlap schedule SGLang keeps no total of the context on the CPU; then the requests'
lengths are added up. In a server, whose other work empties the caches, that takes some 100
microseconds for a large batch, much more than a decision, and the allocator's add some ten. So the
context is counted now and then only; in between it grows by the tokens of the results, and requests
that leave are taken to have the mean. The use of the KV cache is read more often, since others than
the running requests change it. Results and rounds are the same on all ranks, and so is what is read
when.
"""

from typing import Any

from engine_hooks.symbols import context_tokens, kv_use

READ_EVERY = 8
"""Decisions between two readings of the KV cache, unless requests join or many leave."""
COUNT_EVERY = 128
"""Decisions between two counts of the context, unless requests join or many leave."""
ALWAYS_READ = 4
"""Largest batch that is read at every decision; with so few requests one stands for some rounds."""


class LoadReader:
    """Remembers the last reading, and what came since.

    Attributes:
        exact: Whether to read at every decision, for a trace.
        context_tokens: Context tokens summed over the batch; under overlap one round behind.
        kv_use: Share of the KV cache that requests hold.
    """

    def __init__(self) -> None:
        self.exact = False
        self.context_tokens = 0
        self.kv_use = 0.0
        self._until_read = self._until_count = 0
        self._smallest = self._largest = self._last = 0

    def update(self, scheduler: Any, batch: Any, batch_size: int) -> None:
        """Read the load of a decode batch that is about to be launched, as far as it is time.

        Args:
            scheduler: SGLang's, or None to leave the KV cache alone.
            batch: SGLang's.
            batch_size: Its requests.
        """
        # Many that came or went have other lengths: read at once.
        if self._until_count <= 0 or not self._smallest <= batch_size <= self._largest:
            self.context_tokens = context_tokens(batch)
            self._smallest = batch_size - batch_size // 8
            self._largest = batch_size + batch_size // 8
            always = self.exact or batch_size <= ALWAYS_READ
            self._until_count = 0 if always else COUNT_EVERY - 1
            self._until_read = 0
        else:
            self._until_count -= 1
            if batch_size != self._last:
                self.context_tokens = self.context_tokens * batch_size // self._last
        self._last = batch_size
        if self._until_read <= 0:
            self._until_read = READ_EVERY
            if scheduler is not None:
                self.kv_use = kv_use(scheduler)
        self._until_read -= 1

    def add(self, tokens: int) -> None:
        """Add the tokens of a decode round's result to the context."""
        self.context_tokens += tokens

    def forget(self) -> None:
        """Read at the next batch, whose requests are others."""
        self._until_count = 0
