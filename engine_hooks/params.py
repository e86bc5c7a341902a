"""What SGLang asks for the steps of a round, instead of its own ``AdaptiveSpeculativeParams``.

It answers with what the governor decided for the batch that is being launched, and with the steps
that the server was started with whenever there is no such decision.
"""

from collections.abc import Sequence
from typing import Any

from engine_hooks.symbols import candidate_steps_of


class GovernedParams:
    """SGLang's policy interface; newer versions may pass more arguments, which are ignored.

    Attributes:
        static_steps: Steps that the server was started with.
        next_steps: Steps of the next round.
        candidate_steps: Steps that SGLang has made buffers and graphs for, from its config file.
    """

    def __init__(self, initial_steps: int, cfg_path: str | None = None, **_: Any) -> None:
        """Take over from SGLang's class, with its arguments."""
        self.static_steps = initial_steps
        self.next_steps = initial_steps
        self.candidate_steps: list[int] = candidate_steps_of(cfg_path)
        self._cuda_graph_bs: list[int] | None = None

    def set_cuda_graph_bs(self, cuda_graph_bs: Sequence[int] | None, **_: Any) -> None:
        """Remember the batch sizes that get a CUDA graph."""
        self._cuda_graph_bs = sorted(cuda_graph_bs) if cuda_graph_bs else None

    def cuda_graph_bs_for_step(self, step: int, **_: Any) -> list[int] | None:
        """Return the batch sizes to capture for a step: all, since any step may come at any."""
        return None if self._cuda_graph_bs is None else list(self._cuda_graph_bs)

    def get_steps_for_batch(self, batch_size: int, **_: Any) -> int:
        """Return the steps of the round that is being launched."""
        return self.next_steps

    def on_verify_complete(
        self, num_correct_drafts_per_req: Sequence[int], batch_size: int = 0, **_: Any
    ) -> int | None:
        """Ask for no switch: results reach the governor through the scheduler."""
        return None
