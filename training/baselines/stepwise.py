"""The base of controllers that choose for all servers at once, one round at a time.

A subclass keeps what it remembers in an object of its own (``start``) and fills the tiers of the
next round (``choose``), in NumPy over all servers or in a kernel of ``env.compiled``. It may read
what a governor in a server could know: batch, queue, context, calibrated costs, and the results
that have been processed (``training.baselines.feedback``), never the accept rates or the clock.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from env.simulator import Cell, Simulator


class Stepwise:
    """Runs every server to its end; subclasses choose the tiers."""

    name: str = "stepwise"

    def prepare(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells as they are."""
        return list(cells)

    def start(self, simulator: Simulator) -> Any:
        """Return the memory of a fresh episode on all servers."""
        raise NotImplementedError

    def choose(self, simulator: Simulator, memory: Any, actions: NDArray[np.int64]) -> None:
        """Fill ``actions`` (``(num_servers,)``), which holds the tiers of the round before.

        Servers that are done may keep any valid tier.
        """
        raise NotImplementedError

    def run(self, simulator: Simulator) -> None:
        """Run all servers until they are done."""
        memory = self.start(simulator)
        actions = np.zeros(simulator.num_servers, np.int64)
        while not simulator.done.all():
            self.choose(simulator, memory, actions)
            simulator.step(actions)


class Compiled(Stepwise):
    """A stepwise controller whose choice is a kernel, which can run whole episodes.

    ``choose_kernel(state, costs, memory, actions)`` chooses once, ``run_kernel(state, costs,
    memory)`` runs every server to its end; what ``start`` returns is a named tuple of arrays.
    """

    choose_kernel: Any = None
    run_kernel: Any = None

    def choose(self, simulator: Simulator, memory: Any, actions: NDArray[np.int64]) -> None:
        """Fill the tiers of the next round."""
        type(self).choose_kernel(simulator.state, simulator.costs, memory, actions)

    def run(self, simulator: Simulator) -> None:
        """Run all servers until they are done."""
        type(self).run_kernel(simulator.state, simulator.costs, self.start(simulator))
