"""The native tier: a plain target decode in place of SGLang's zero-step round.

SGLang's zero-step round verifies one token a request with a graph of its own, and extends the draft
or stubs its state. A native round decodes that token as a server without speculation does, with the
attention backend and the CUDA graphs of one, and hands on a result of the zero-step round's shape:
the same KV slots, the same lengths, a stub of the draft's state. So the scheduler goes on as after
a cold round, under either loop, and a server flips between all kinds of off from round to round.

Rounds that need what only the verify path has (grammars, hidden states) run cold.
"""

import copy
import logging
from collections.abc import Callable
from typing import Any

from engine_hooks import native_graph, symbols
from engine_hooks.native_graph import PlainDecode

logger = logging.getLogger(__name__)


class NativeDecode:
    """Stands around the worker's forward call of one scheduler process.

    Attributes:
        wanted: Whether zero-step rounds shall run native from now on.
        ran: Whether the last round did.
        failures: Rounds that ended in an error; after the first, all run cold.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.ran = False
        self.failures = 0
        self._plain: PlainDecode | None = None
        self._worker: Any = None
        self._forward: Callable[..., Any] | None = None

    @property
    def available(self) -> bool:
        """Whether native rounds can run."""
        return self._plain is not None

    @property
    def description(self) -> str:
        """What was captured and what it took, for the log."""
        return "none" if self._plain is None else self._plain.description

    def refusal(self, scheduler: Any) -> str:
        """Return why this server cannot run native rounds; empty if nothing is known against it.

        It builds nothing, so that all ranks can be asked before any of them does.
        """
        try:
            faults = symbols.check_native_symbols()
            return faults[0] if faults else native_graph.refusal(scheduler)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def prepare(self, scheduler: Any) -> str:
        """Capture the graphs and stand around the worker. Every rank must call it.

        Returns:
            Why that failed; empty if it did not.
        """
        try:
            self._plain = PlainDecode(scheduler.model_worker)
        except Exception as error:
            logger.debug("specgovernor: no native decode", exc_info=True)
            return f"{type(error).__name__}: {error}"
        self._worker = scheduler.model_worker
        # On the one instance, and only where it is wanted: rounds of other servers pay nothing.
        self._forward = self._worker.forward_batch_generation
        self._worker.forward_batch_generation = self.forward
        return ""

    def remove(self) -> None:
        """Take away what :meth:`prepare` put in place, as when another rank could not."""
        if self._plain is not None:
            self._worker.forward_batch_generation = self._forward
            self._plain = None

    def forward(self, batch: Any, on_publish: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Run a round: native if it is wanted and can be, else as SGLang would."""
        self.ran = False
        if self.wanted and self._plain is not None:
            try:
                if self._fits(batch):
                    result = self._decode(self._plain, batch, on_publish)
                    self.ran = True
                    return result
            except Exception:
                self._failed()
        if self._forward is None:
            raise RuntimeError("expected a call through the worker, after prepare()")
        return self._forward(batch, on_publish, *args, **kwargs)

    def _fits(self, batch: Any) -> bool:
        """Tell whether a round can run native; from what is equal on all ranks."""
        if not batch.forward_mode.is_decode() or batch.is_extend_in_batch:
            return False
        # What is wanted is for zero-step rounds: SGLang says whether this is one.
        self._worker.activate_step_by_batch(len(batch.reqs))
        return (
            self._worker.speculative_num_steps == 0
            and not batch.has_grammar
            and not batch.return_hidden_states
            and batch.spec_info is not None
            and batch.spec_info.bonus_tokens is not None
        )

    def _decode(self, plain: PlainDecode, batch: Any, on_publish: Any) -> Any:
        import torch

        draft_input = batch.spec_info
        size = len(batch.reqs)
        decode = copy.copy(batch)
        decode.spec_info = None
        decode.input_ids = draft_input.bonus_tokens.to(torch.int64)
        # SGLang gave every request slots for the deepest draft, of which this takes the first.
        decode.out_cache_loc = plain.slots(batch.req_pool_indices, batch.seq_lens)
        decode.seq_lens = batch.seq_lens + 1
        if batch.seq_lens_cpu is not None:
            decode.seq_lens_cpu = batch.seq_lens_cpu + 1
        if batch.seq_lens_sum is not None:
            decode.seq_lens_sum = batch.seq_lens_sum + size
        batch.out_cache_loc = decode.out_cache_loc
        if on_publish is not None:
            # How long the requests will be is known before they are: nothing waits for the target.
            on_publish(decode.seq_lens)
        result = plain.run(decode)
        tokens = result.next_token_ids
        result.speculative_num_draft_tokens = 1
        result.accept_lens = torch.ones(size, dtype=torch.int32, device=tokens.device)
        result.new_seq_lens = decode.seq_lens
        result.extra_keep_alive_refs = [decode]
        result.next_draft_input = type(draft_input)(bonus_tokens=tokens.to(torch.int32))
        self._worker._stub_skipped_draft_extend(batch, result)
        logprobs = result.logits_output.next_token_logprobs if batch.return_logprob else None
        if logprobs is not None:
            result.logits_output.next_token_logprobs = logprobs.reshape(size, 1)
        return result

    def _failed(self) -> None:
        """Run cold from now on; say why, once."""
        self.failures += 1
        self._plain = None
        logger.exception(
            "specgovernor: an error in a native round; from now on 'native' runs as 'cold'"
        )
