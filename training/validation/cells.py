"""Step time of every (tier, batch size, context level) cell, predicted from the other cells.

All rounds of a cell are removed, every tier is fitted again, and the prediction at the cell's
median context is compared with its median round. A cell at the smallest or largest batch size of
its tier is an edge: where no other context level was measured at that batch size, its prediction
is an extrapolation. A stricter second figure removes the whole batch size of the tier, all context
levels at once.

Rounds of noisy cells are no measure of a model: their errors are listed, and not judged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.calibration import TierCost
from training.fit import Surface, check_enough, fit_surfaces, tier_order
from training.samples import Samples
from training.validation.bounds import CELL_MEDIAN, CELL_P95, QUIET_DEVIATION, Check


class JudgedCell:
    """What every cell with a measured and a predicted round time has.

    Attributes:
        measured_s: Median round.
        deviation: Median of ``|step / median step - 1|``.
        predicted_s: Prediction.
    """

    measured_s: float
    deviation: float
    predicted_s: float

    @property
    def quiet(self) -> bool:
        """Whether the measured median can be trusted."""
        return self.deviation <= QUIET_DEVIATION

    @property
    def error(self) -> float:
        """Relative error of the prediction, with sign."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True)
class CellError(JudgedCell):
    """One cell against its prediction from the others.

    Attributes:
        tier: Tier name.
        batch_size: Padded batch size.
        context_tokens: Median context over the batch.
        lowest_context: Lowest context over the batch.
        rounds: Usable rounds.
        measured_s: Median round.
        deviation: Median of ``|step / median step - 1|``.
        predicted_s: Prediction without the cell.
        without_batch_size_s: Prediction without any round of the tier at this batch size.
        edge: Whether the batch size is the tier's smallest or largest.
    """

    tier: str
    batch_size: int
    context_tokens: int
    lowest_context: int
    rounds: int
    measured_s: float
    deviation: float
    predicted_s: float
    without_batch_size_s: float
    edge: bool

    @property
    def error_without_batch_size(self) -> float:
        """The same without any round of the tier at this batch size."""
        return self.without_batch_size_s / self.measured_s - 1.0


def hold_out_cells(samples: Mapping[str, Samples]) -> tuple[CellError, ...]:
    """Predict every cell of every tier from the others.

    Args:
        samples: Usable rounds by tier name.

    Raises:
        CalibrationError: If a tier has only one batch size, so nothing is left without it.
    """
    errors = []
    for tier in sorted(samples, key=tier_order):
        item = samples[tier]
        sizes = np.unique(item.batch_size)
        without_size: dict[int, TierCost] = {}
        for cell in np.unique(item.cell):
            at = item.cell == cell
            size = int(item.batch_size[at][0])
            if size not in without_size:
                without_size[size] = _fit_without(samples, tier, item.batch_size == size)
            alone = np.array_equal(at, item.batch_size == size)
            cost = without_size[size] if alone else _fit_without(samples, tier, at)
            median_s = float(np.median(item.step_s[at]))
            context = float(np.median(item.context_tokens[at]))
            errors.append(
                CellError(
                    tier=tier,
                    batch_size=size,
                    context_tokens=round(context),
                    lowest_context=int(np.min(item.context_tokens[at])),
                    rounds=int(np.sum(at)),
                    measured_s=median_s,
                    deviation=float(np.median(np.abs(item.step_s[at] / median_s - 1.0))),
                    predicted_s=_predict(cost, size, context),
                    without_batch_size_s=_predict(without_size[size], size, context),
                    edge=size in (sizes[0], sizes[-1]),
                )
            )
    return tuple(errors)


def check_cells(cells: Sequence[CellError]) -> tuple[Check, Check]:
    """Judge the quiet cells, edges included."""
    quiet = [cell.error for cell in cells if cell.quiet]
    median, p95, _ = summary(quiet)
    return (
        Check("step time of held-out quiet cells, median error", median, CELL_MEDIAN),
        Check("step time of held-out quiet cells, p95 error", p95, CELL_P95),
    )


def summary(errors: Sequence[float]) -> tuple[float, float, float]:
    """Return median, 95th percentile and maximum of ``|errors|``; NaN if there are none."""
    if not errors:
        return (float("nan"),) * 3
    size = np.abs(errors)
    return float(np.median(size)), float(np.quantile(size, 0.95)), float(np.max(size))


def _fit_without(
    samples: Mapping[str, Samples], tier: str, left_out: NDArray[np.bool_]
) -> TierCost:
    left = {**samples, tier: samples[tier].where(~left_out)}
    check_enough({tier: left[tier]}, min_rows=1)
    return _cost(tier, fit_surfaces(left)[tier], left[tier])


def _cost(tier: str, surface: Surface, samples: Samples) -> TierCost:
    """Wrap a surface, so that it is evaluated, and extrapolates, as a calibration does."""
    return TierCost(
        tier=tier,
        batch_sizes=tuple(surface.batch_sizes.tolist()),
        base_s=tuple(surface.base_s.tolist()),
        context_s_per_token=surface.slope_s,
        relative_noise=(0.0,) * len(surface.batch_sizes),
        max_context_tokens=int(np.max(samples.context_tokens)),
        num_rows=len(samples),
    )


def _predict(cost: TierCost, padded_batch_size: int, context_tokens: float) -> float:
    return cost.base_at(padded_batch_size) + cost.context_s_per_token * context_tokens
