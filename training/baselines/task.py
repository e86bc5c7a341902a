"""What a baseline gets to tune itself with: one server's tuning workloads, and a scale.

Every baseline gets the same: the deployment with its calibration, the tuning part of the suite (its
cells and seeds are never tested on), and as many trial runs as it likes, which are counted and
printed in the report.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from controller.errors import ConfigError
from env.deployment import Deployment
from env.simulator import Cell
from training.controllers import Controller
from training.evaluation import evaluate


class Task:
    """The tuning workloads of one server.

    Args:
        cells: Tuning cells, all with one deployment.
        seeds: ``(num_cells, num_seeds)``, or ``(num_seeds,)`` for all cells.

    Attributes:
        deployment: The server.
        tier_names: Its tiers in the order of the actions, off first.
        trials: Settings tried so far.
    """

    def __init__(
        self, cells: Sequence[Cell], seeds: Sequence[int] | Sequence[Sequence[int]]
    ) -> None:
        self.deployment: Deployment = cells[0].deployment
        self.tier_names = tuple(tier.name for tier in self.deployment.resolved_tiers())
        self.num_steps = tuple(tier.num_steps for tier in self.deployment.resolved_tiers())
        self.trials = 0
        self._cells = list(cells)
        self._seeds = seeds

    def score(self, controller: Controller) -> float:
        """Return the mean log objective of a controller over the tuning cells.

        The objective is throughput in a closed loop and 1 / mean time in system in an open one.
        """
        self.trials += 1
        return float(np.log(evaluate(controller, self._cells, self._seeds).objective).mean())

    def best(self, candidates: Iterable[Controller]) -> Controller:
        """Return the candidate with the best score, the first one of equals."""
        best, best_score = None, -np.inf
        for candidate in candidates:
            score = self.score(candidate)
            if best is None or score > best_score:
                best, best_score = candidate, score
        if best is None:
            raise ConfigError("tuning: expected at least one candidate, got none")
        return best
