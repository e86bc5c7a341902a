"""The simulator from end to end: decode throughput per batch against the trace's own.

For every (tier, batch size, context level) cell of the traces, as many simulated clients as the
batch size decode at that tier. They start at the cell's lowest context and stop after its highest,
with a constant accept rate whose expected accept length is the trace's mean. Both sides are tokens
over time in steady decode, without prefill.

The calibration was fitted on the same rounds, so this judges what the simulator makes of it (batch,
context growth, accept draws, scatter), not how well the fit predicts; ``cells.py`` does that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controller.calibration import Calibration
from controller.tiers import tier_of
from controller.trace import TraceHeader, TraceRow
from env.acceptance_process import Acceptance
from env.deployment import Deployment
from env.simulator import Cell, Simulator
from env.workload import ClosedLoop, Lengths, Workload
from training.fit import tier_order
from training.samples import Samples
from training.validation.measured import MeasuredCell, measure_cells

SEEDS = range(8)
UNLIMITED_TOKENS = 2**40
"""KV capacity: nothing but the rounds themselves is to matter."""
SHORTEST_SHARE = 0.05
"""Share of its output that a closed loop leaves a first request at least."""


@dataclass(frozen=True)
class CellThroughput(MeasuredCell):
    """One cell, measured and simulated.

    Attributes:
        simulated: Output tokens a second of the simulator, over all seeds.
    """

    simulated: float

    @property
    def error(self) -> float:
        """Relative error of the simulation, with sign."""
        return self.simulated / self.throughput - 1.0


def accept_rate_of(accept_len: float, num_steps: int) -> float:
    """Return the rate ``p`` with ``1 + p + ... + p**num_steps = accept_len``, by bisection.

    Example:
        >>> round(accept_rate_of(1.75, 2), 6)
        0.5
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        total = sum(middle**i for i in range(num_steps + 1))
        low, high = (middle, high) if total < accept_len else (low, middle)
    return 0.5 * (low + high)


def simulate_cells(
    calibration: Calibration,
    traces: Sequence[tuple[TraceHeader, Sequence[TraceRow]]],
    samples: Mapping[str, Samples],
) -> tuple[CellThroughput, ...]:
    """Compare every cell whose accept length is known.

    Args:
        calibration: Has a cost for every tier of ``samples``.
        traces: Header and rows of the traces.
        samples: Their usable rounds by tier name.
    """
    cells = measure_cells(traces, samples)
    results: list[CellThroughput] = []
    for tier in sorted(samples, key=tier_order):
        results += _simulate(calibration, tier, [cell for cell in cells if cell.tier == tier])
    return tuple(results)


def _simulate(
    calibration: Calibration, tier: str, cells: Sequence[MeasuredCell]
) -> list[CellThroughput]:
    """Run all cells of a tier side by side, one server for each cell and seed."""
    if not cells:
        return []
    deployment = Deployment(
        calibration,
        tiers=tier,
        max_running_requests=max(cell.batch_size for cell in cells),
        kv_capacity_tokens=UNLIMITED_TOKENS,
    )
    simulator = Simulator([Cell(deployment, _workload(cell)) for cell in cells for _ in SEEDS])
    simulator.reset([seed for _ in cells for seed in SEEDS])
    server = simulator.state.server
    end = np.repeat([max(cell.context_tokens) for cell in cells], len(SEEDS))
    start_s, start_tokens = server.now_s.copy(), server.output_tokens.copy()
    end_s, end_tokens = np.zeros(len(end)), np.zeros(len(end))
    running = np.ones(len(end), np.bool_)
    actions = np.zeros(len(end), np.int64)
    while running.any():
        simulator.step(actions)
        end_s[running], end_tokens[running] = server.now_s[running], server.output_tokens[running]
        running &= (server.context_tokens <= end) & ~simulator.done
    time_s = (end_s - start_s).reshape(len(cells), -1).sum(axis=1)
    tokens = (end_tokens - start_tokens).reshape(len(cells), -1).sum(axis=1)
    return [
        CellThroughput(**vars(cell), simulated=float(rate))
        for cell, rate in zip(cells, tokens / time_s, strict=True)
    ]


def _workload(cell: MeasuredCell) -> Workload:
    """Clients whose requests outlast the cell's context range, so that the batch never changes."""
    low, high = cell.context_tokens
    num_steps = tier_of(cell.tier).num_steps
    prompt = max(low // cell.batch_size, 1)
    enough = (high - low) // cell.batch_size + 8 * (num_steps + 1)
    output = int(enough / SHORTEST_SHARE) + 1
    rate = accept_rate_of(cell.accept_len, num_steps)
    return Workload(
        name=f"{cell.tier} at {cell.batch_size}",
        load=ClosedLoop(cell.batch_size, cell.batch_size * output),
        acceptance=Acceptance("shared", rate, rate),
        prompts=Lengths(prompt, 0.0, prompt, prompt),
        outputs=Lengths(output, 0.0, output, output),
    )
