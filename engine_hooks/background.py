"""Writes rows on a thread of its own, so that the scheduler never waits for a disk.

The queue is bounded: when the disk does not keep up, rows are dropped and counted. Everything is
handed to the operating system every second, so a killed server loses that second at most.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Row = TypeVar("Row")

MAX_QUEUED = 65_536
FLUSH_S = 1.0


class BackgroundWriter(Generic[Row]):
    """Hands rows over to a thread.

    Attributes:
        dropped: Rows that did not fit the queue.
    """

    def __init__(
        self,
        write: Callable[[list[Row]], None],
        name: str,
        max_queued: int = MAX_QUEUED,
        flush_s: float = FLUSH_S,
    ) -> None:
        """Start the thread.

        Args:
            write: Writes rows and flushes them; called on the thread only. Its first error ends
                the writing, not the server.
            name: Name of the thread, for messages.
            max_queued: Rows that may wait.
            flush_s: Seconds between two calls of ``write``.
        """
        self.dropped = 0
        self._write = write
        self._name = name
        self._max_queued = max_queued
        self._flush_s = flush_s
        self._rows: deque[Row] = deque()
        self._stop = threading.Event()
        self._broken = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        """Queue a row; never blocks and never raises."""
        if self._broken or len(self._rows) >= self._max_queued:
            self.dropped += 1
        else:
            self._rows.append(row)

    def close(self) -> None:
        """Write what is queued and end the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.wait(self._flush_s)
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            if not rows or self._broken:
                continue
            try:
                self._write(rows)
            except Exception:
                self._broken = True
                self.dropped += len(rows) + len(self._rows)
                self._rows.clear()
                logger.exception("%s: writing failed and ends here; the server goes on", self._name)
