"""Settings that never look at acceptance: no speculation, one depth, a threshold, a table."""

from dataclasses import dataclass, replace

import numpy as np

from env.simulator import Simulator
from training.baselines.task import Task
from training.controllers import BatchThreshold, Controller, threshold_grid


@dataclass(frozen=True)
class BatchTable:
    """A depth for each range of batch sizes, as vLLM's and TensorRT-LLM's schedules have it.

    Attributes:
        sizes: Smallest batch size of each range, ascending from 1.
        tiers: Index of the tier of each.
        name: Name in tables.
    """

    sizes: tuple[int, ...]
    tiers: tuple[int, ...]
    name: str = "batch table"

    def prepare(self, cells):  # type: ignore[no-untyped-def]
        """Return the cells as they are."""
        return list(cells)

    def tier_by_size(self, width: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return ``(width,)`` the tier of each batch size from 0."""
        at = np.searchsorted(self.sizes, np.arange(width), side="right") - 1
        return np.array(self.tiers, np.int64)[np.maximum(at, 0)]

    def run(self, simulator: Simulator) -> None:
        """Run all servers until they are done."""
        table = self.tier_by_size(simulator.state.running.shape[1])
        simulator.run_tables(np.tile(table, (simulator.num_servers, 1)))


def make_threshold(task: Task) -> Controller:
    """One batch size up to which the server speculates, at one depth: every pair is tried."""
    grid = threshold_grid(task.tier_names, task.deployment.max_running_requests)
    return task.best(grid)


def make_table(task: Task) -> Controller:
    """A depth for each power of two of the batch size, tuned range by range from the largest."""
    limit = task.deployment.max_running_requests
    sizes = tuple(2**i for i in range(limit.bit_length()) if 2**i <= limit)
    # The best single depth is where the search starts.
    fixed = [BatchTable(sizes, (k,) * len(sizes)) for k in range(len(task.tier_names))]
    scores = [task.score(table) for table in fixed]
    best, best_score = fixed[int(np.argmax(scores))], max(scores)
    for _ in range(2):
        before = best
        for i in reversed(range(len(sizes))):
            for k in range(len(task.tier_names)):
                if k == best.tiers[i]:
                    continue
                candidate = replace(best, tiers=(*best.tiers[:i], k, *best.tiers[i + 1 :]))
                score = task.score(candidate)
                if score > best_score:
                    best, best_score = candidate, score
        if best == before:
            break
    return best


__all__ = ["BatchTable", "BatchThreshold", "make_table", "make_threshold"]
