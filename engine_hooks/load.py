"""The load that a decision sees beside the batch size: context tokens and the use of the KV cache.

Under the overlap schedule SGLang keeps no total of the context on the CPU; then the requests'
lengths are added up. In a server, whose other work empties the caches, that takes some 100
microseconds for a large batch, much more than a decision, and even a small batch's count and the
allocator's add some ten. So both are read every few rounds only, and in between each request is
taken to have the mean of the last count: a few rounds add a few tokens to hundreds. Rounds are the
same on all ranks, and so is what is read when.
"""

from typing import Any

from engine_hooks.symbols import context_tokens, kv_use

READ_EVERY = 8
"""Decisions between two readings, unless requests join or many leave."""
ALWAYS_READ = 4
"""Largest batch that is read at every decision; with so few requests one stands for some rounds."""


class LoadReader:
    """Remembers the last reading.

    Attributes:
        exact: Whether to read at every decision, for a trace.
        context_tokens: Context tokens summed over the batch; under overlap one round behind.
        kv_use: Share of the KV cache that requests hold.
    """

    def __init__(self) -> None:
        self.exact = False
        self.context_tokens = 0
        self.kv_use = 0.0
        self._rounds_left = 0
        self._mean = 0.0
        self._smallest = self._largest = self._last = 0

    def update(self, scheduler: Any, batch: Any, batch_size: int) -> None:
        """Read the load of a decode batch that is about to be launched, if it is time.

        Args:
            scheduler: SGLang's, or None to leave the KV cache alone.
            batch: SGLang's.
            batch_size: Its requests.
        """
        if self._rounds_left > 0 and self._smallest <= batch_size <= self._largest:
            self._rounds_left -= 1
            if batch_size != self._last:
                self._last = batch_size
                self.context_tokens = int(self._mean * batch_size)
            return
        self.context_tokens = context_tokens(batch)
        self._mean = self.context_tokens / batch_size if batch_size else 0.0
        # Many that came or went have other lengths: read at once.
        self._smallest = batch_size - batch_size // 8
        self._largest = batch_size + batch_size // 8
        self._last = batch_size
        always = self.exact or batch_size <= ALWAYS_READ
        self._rounds_left = 0 if always else READ_EVERY - 1
        if scheduler is not None:
            self.kv_use = kv_use(scheduler)

    def forget(self) -> None:
        """Read at the next batch, whose requests are others."""
        self._rounds_left = 0
