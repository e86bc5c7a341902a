"""What a plain decode needs beside a speculative server: an attention backend and CUDA graphs.

They are made as SGLang makes those of a tier, but with the target told that nothing speculates, so
that the graphs are those of plain decoding. Each is swapped in for the time of one forward call.
"""

import logging
import time
from typing import Any

from engine_hooks import symbols

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 2 << 30
"""Free GPU memory below which no graphs are captured."""


def refusal(scheduler: Any) -> str:
    """Return what of this server native rounds were not made for; empty if nothing."""
    feature = symbols.native_obstacle(scheduler)
    if feature:
        return feature
    free = symbols.free_bytes(scheduler.tp_worker.model_runner)
    if free is not None and free < MIN_FREE_BYTES:
        return (
            f"{free / 2**30:.1f} GiB of GPU memory are free, of which its CUDA graphs may need "
            f"{MIN_FREE_BYTES / 2**30:.0f}; lower --mem-fraction-static"
        )
    return ""


class PlainDecode:
    """Runs decode batches on the target as a server without speculation does.

    Attributes:
        captured: Batch sizes with a CUDA graph; empty without graphs.
    """

    def __init__(self, worker: Any) -> None:
        """Make the backend and capture the graphs, for as many batch sizes as any tier has.

        Args:
            worker: The speculative worker, whose own graphs are captured.
        """
        self._worker = worker
        self._runner = worker.target_worker.model_runner
        started_s, before = time.perf_counter(), symbols.free_bytes(self._runner)
        with symbols.target_without_speculation(self._runner):
            self._backend = symbols.new_attention_backend(self._runner)
            self._graphs = symbols.capture_decode_graphs(self._runner, self._backend)
        self.captured: tuple[int, ...] = tuple(getattr(self._graphs, "capture_bs", ()))
        after = symbols.free_bytes(self._runner)
        self.memory_bytes = None if before is None or after is None else before - after
        self.seconds = time.perf_counter() - started_s
        self._table = worker.req_to_token_pool.req_to_token
        self._event = symbols.ReadEvent(worker, self._runner)

    @property
    def description(self) -> str:
        """What was captured and what it took, for the log."""
        graphs = f"CUDA graphs for batch sizes {list(self.captured)}" if self.captured else "eager"
        if self.memory_bytes is None:
            return graphs
        return f"{graphs}, {self.memory_bytes / 2**30:.2f} GiB, {self.seconds:.1f} s"

    def slots(self, pool_indices: Any, lengths: Any) -> Any:
        """Return the KV slots ``(B,)`` of the next token of each request."""
        return self._table[pool_indices, lengths].to(lengths.dtype)

    def run(self, batch: Any) -> Any:
        """Decode and sample one token for each request of a plain decode batch."""
        runner = self._runner
        kept = runner.attn_backend, runner.decode_cuda_graph_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = self._backend, self._graphs
        self._event.clear()
        try:
            result = self._worker.target_worker.forward_batch_generation(batch)
        finally:
            runner.attn_backend, runner.decode_cuda_graph_runner = kept
        self._event.hand_over()
        return result
