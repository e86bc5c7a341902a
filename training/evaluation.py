"""Run a controller on cells under paired seeds, and measure what users would see."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from env.simulator import Cell, Simulator
from training.controllers import BatchThreshold, Controller

METRICS = (
    "throughput_tok_s",
    "time_in_system_mean_s",
    "time_in_system_p99_s",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "tpot_p50_s",
    "tpot_p99_s",
    "slo_goodput_rps",
    "switches_per_min",
)
SLO_TTFT_S = 2.0
SLO_TPOT_S = 0.05
"""Time to first token and time per output token of a request that counts in the goodput."""


@dataclass(frozen=True)
class Outcome:
    """What a controller achieved.

    Attributes:
        metrics: ``(num_cells, num_seeds)`` for each name in ``METRICS``.
        objective: ``(num_cells, num_seeds)``, larger is better: throughput in a closed loop,
            1 / mean time in system in an open one.
        tier_share: ``(num_cells, num_tiers)`` share of the rounds that ran each tier.
    """

    metrics: dict[str, NDArray[np.float64]]
    objective: NDArray[np.float64]
    tier_share: NDArray[np.float64]


def evaluate(
    controller: Controller, cells: Sequence[Cell], seeds: Sequence[int] | Sequence[Sequence[int]]
) -> Outcome:
    """Run every cell once under every seed.

    Args:
        controller: Who chooses.
        cells: Deployments with workloads.
        seeds: ``(num_seeds,)`` for all cells, or ``(num_cells, num_seeds)``. The same for all
            controllers makes their results comparable pair by pair.
    """
    table = np.broadcast_to(np.asarray(seeds, np.int64), (len(cells), np.shape(seeds)[-1]))
    prepared = controller.prepare(cells)
    simulator = Simulator([cell for cell in prepared for _ in range(table.shape[1])])
    simulator.reset(table.ravel().tolist())
    controller.run(simulator)
    return measure(simulator, *table.shape)


def measure(simulator: Simulator, num_cells: int, num_seeds: int) -> Outcome:
    """Read the outcome off a simulator that has run to its end, cell-major."""
    shape = (num_cells, num_seeds)
    values = {name: np.zeros(simulator.num_servers) for name in METRICS}
    objective = np.zeros(simulator.num_servers)
    for e in range(simulator.num_servers):
        server = simulator.state.server[e]
        requests = simulator.requests_of(e)
        throughput = server.output_tokens / server.now_s
        values["throughput_tok_s"][e] = throughput
        values["switches_per_min"][e] = 60.0 * server.num_switches / server.now_s
        if len(requests):
            in_system = requests["finish_s"] - requests["arrival_s"]
            ttft = requests["first_token_s"] - requests["arrival_s"]
            gaps = np.maximum(requests["generated"] - 1, 1)
            tpot = (requests["finish_s"] - requests["first_token_s"]) / gaps
            values["time_in_system_mean_s"][e] = in_system.mean()
            values["time_in_system_p99_s"][e] = np.quantile(in_system, 0.99)
            values["ttft_mean_s"][e], values["tpot_mean_s"][e] = ttft.mean(), tpot.mean()
            met = np.count_nonzero((ttft <= SLO_TTFT_S) & (tpot <= SLO_TPOT_S))
            values["slo_goodput_rps"][e] = met / server.now_s
            values["ttft_p50_s"][e], values["ttft_p99_s"][e] = np.quantile(ttft, (0.5, 0.99))
            values["tpot_p50_s"][e], values["tpot_p99_s"][e] = np.quantile(tpot, (0.5, 0.99))
        closed = simulator.cells[e].workload.is_closed
        objective[e] = throughput if closed else 1.0 / values["time_in_system_mean_s"][e]
    rounds = simulator.state.tier_rounds.reshape(*shape, -1).sum(axis=1)
    return Outcome(
        {name: value.reshape(shape) for name, value in values.items()},
        objective.reshape(shape),
        rounds / rounds.sum(axis=1, keepdims=True),
    )


def tune_threshold(
    grid: Sequence[BatchThreshold],
    cells: Sequence[Cell],
    seeds: Sequence[int],
    watch: Callable[[Sequence[BatchThreshold]], Iterable[BatchThreshold]] = iter,
) -> BatchThreshold:
    """Return the pair of threshold and depth with the best mean log objective over all cells.

    Args:
        grid: Every pair to try.
        cells: The workloads that it must serve with one setting.
        seeds: Tuning seeds, apart from those that the comparison uses.
        watch: Wraps the grid to show progress.
    """
    scores = [np.log(evaluate(each, cells, seeds).objective).mean() for each in watch(grid)]
    return grid[int(np.argmax(scores))]
