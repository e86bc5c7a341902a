"""How fast a controller follows when acceptance changes at once.

Loss is what ``env/ideal.py`` counts: seconds of a round beyond what the best tier with a warm draft
would have needed for the same expected tokens. A controller has caught up when the loss of ten
rounds in a row is within 2% of their time of what the oracle loses in that phase. Excess regret is
the loss over the next 500 rounds beyond the oracle's share of the same time, in rounds of the
server without speculation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from env.simulator import Cell
from training.controllers import Controller
from training.recording import Recording, record
from training.suite import off_step_s

WINDOW = 10
MARGIN = 0.02
HORIZON = 500
CURVE_ROUNDS = 300


@dataclass(frozen=True)
class Shift:
    """One change of acceptance, as one controller met it.

    Attributes:
        cell: Index of the cell.
        rises: Whether acceptance rose.
        speculating: Whether the controller was drafting when it came.
        rounds: Rounds until it had caught up; ``HORIZON`` if it had not by then.
        excess: Excess regret, in rounds without speculation.
        curve: ``(CURVE_ROUNDS,)`` cumulated loss in rounds without speculation; shorter if the
            phase ended before.
    """

    cell: int
    rises: bool
    speculating: bool
    rounds: int
    excess: float
    curve: NDArray[np.float64]


def phase_starts(start_s: NDArray[np.float64], period_s: float) -> list[tuple[int, int, int]]:
    """Return number, first round and round after the last of each phase that began at a shift.

    Args:
        start_s: ``(rounds,)`` of one server, NaN after its end.
        period_s: Length of a phase.
    """
    ended = np.flatnonzero(np.isnan(start_s))
    length = int(ended[0]) if len(ended) else len(start_s)
    phase = (start_s[:length] / period_s).astype(np.int64)
    edges = np.flatnonzero(np.diff(phase)) + 1
    return [
        (int(phase[first]), int(first), int(last))
        for first, last in zip(edges, [*edges[1:], length], strict=True)
    ]


def rounds_to_catch_up(loss: NDArray[np.float64], time: NDArray[np.float64], share: float) -> int:
    """Return the first round from which ``WINDOW`` rounds lose at most ``share`` of their time.

    Args:
        loss: ``(rounds,)`` seconds lost since the shift.
        time: ``(rounds,)`` seconds.
        share: The limit.
    """
    if len(loss) < WINDOW:
        return HORIZON
    kernel = np.ones(WINDOW)
    over = np.convolve(loss, kernel, "valid") / np.convolve(time, kernel, "valid")
    met = np.flatnonzero(over <= share)
    return min(int(met[0]), HORIZON) if len(met) else HORIZON


def _oracle_shares(recording: Recording, server: int, period_s: float) -> dict[int, float]:
    shares = {}
    for phase, first, last in phase_starts(recording.start_s[:, server], period_s):
        span = slice(first, last)
        total = recording.step_s[span, server].sum()
        shares[phase] = float(recording.lost_s[span, server].sum() / total)
    return shares


def measure_shifts(
    controllers: Sequence[Controller],
    oracle: Controller,
    cells: Sequence[Cell],
    seeds: Sequence[int],
) -> dict[str, list[Shift]]:
    """Return every shift that each controller and the oracle met, by controller name.

    Args:
        controllers: Who is measured.
        oracle: The clairvoyant reference.
        cells: Cells of ``training.protocol.shift_cells``.
        seeds: Episodes of each.
    """
    reference = record(oracle, cells, seeds)
    result = {}
    for controller in (*controllers, oracle):
        run = reference if controller is oracle else record(controller, cells, seeds)
        shifts = []
        for server in range(len(cells) * len(seeds)):
            index = server // len(seeds)
            cell = cells[index]
            period_s = cell.workload.acceptance.period
            load = cell.workload.load
            unit_s = off_step_s(cell.deployment, load.concurrency)  # type: ignore[union-attr]
            shares = _oracle_shares(reference, server, period_s)
            for phase, first, last in phase_starts(run.start_s[:, server], period_s):
                if phase not in shares or last - first < 2 * WINDOW:
                    continue
                span = slice(first, min(last, first + HORIZON))
                loss, time = run.lost_s[span, server], run.step_s[span, server]
                shifts.append(
                    Shift(
                        cell=index,
                        rises=phase % 2 == 0,
                        speculating=bool(run.num_steps[run.tier[first - 1, server]] > 0),
                        rounds=rounds_to_catch_up(loss, time, shares[phase] + MARGIN),
                        excess=float((loss.sum() - shares[phase] * time.sum()) / unit_s),
                        curve=np.cumsum(loss)[:CURVE_ROUNDS] / unit_s,
                    )
                )
        result[controller.name] = shifts
    return result
