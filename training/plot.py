"""Draw a calibration: measured points over fitted curves, and where speculation breaks even."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from controller.calibration import Calibration
from controller.errors import ConfigError
from controller.tiers import NATIVE
from training.cli import check_apart
from training.fitting import Fitted
from training.report import break_even

MAX_POINTS = 2000
"""Rounds drawn a tier; more only make the file larger."""
MAX_SIZES = 500
"""Batch sizes at which a curve is drawn; no eye tells more."""
CONTEXT_PER_REQUEST = 512
"""Context of the break-even curves, where the calibration has a context axis."""
DPI = 120
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def plot(fitted: Fitted, path: Path) -> None:
    """Write a PNG with one panel a tier and one of the break-even accept length.

    In a tier's panel the line is the fitted round time at zero context, and every point a measured
    round less the fitted cost of its context, so that points at all contexts fall on one line.

    Raises:
        ConfigError: As :func:`check_plot`, or if the file cannot be written.
    """
    # Without a display, and slow to import: only when something is drawn.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    check_plot(path, ())
    calibration = fitted.calibration
    count = len(calibration.costs) + 1
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.5 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, cost in zip(axes, calibration.costs, strict=False):
        batch, step_s = _measured(fitted, cost.tier, cost.context_s_per_token)
        axis.plot(batch, 1e3 * step_s, ".", markersize=3, alpha=0.4, label="measured")
        low, high = cost.measured_batch_sizes[0], cost.measured_batch_sizes[-1]
        inside, outside = drawn_sizes(low, high), drawn_sizes(high, 2 * high)
        for sizes, style, label in ((inside, "-", "fitted"), (outside, ":", "extrapolated")):
            line = [1e3 * cost.base_at(int(size)) for size in sizes]
            axis.plot(sizes, line, style, color="black", linewidth=1.2, label=label)
        axis.set(
            title=f"tier {cost.tier}", xscale="log", xlabel="batch size", ylabel="round time, ms"
        )
        axis.legend(fontsize="small")
    _draw_break_even(axes[count - 1], calibration)
    for axis in axes[:count]:
        axis.xaxis.set_major_formatter(ScalarFormatter())
    for axis in axes[count:]:
        axis.set_axis_off()
    figure.suptitle(calibration.name)
    try:
        figure.savefig(path, dpi=DPI, metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written ({error.strerror})") from error


def drawn_sizes(low: int, high: int) -> np.ndarray:
    """Return the batch sizes at which a curve is drawn: all, or ``MAX_SIZES`` evenly in the log.

    Returns:
        ``(n,)`` ascending integers from ``low`` to ``high``, both included.
    """
    if high - low < MAX_SIZES:
        return np.arange(low, high + 1)
    sizes = np.rint(np.geomspace(low, high, MAX_SIZES)).astype(np.int64)
    sizes[0], sizes[-1] = low, high
    return np.unique(sizes)


def check_plot(path: Path, others: Iterable[Path]) -> None:
    """Refuse a plot that is no PNG, whose folder is missing, or that would destroy something.

    Args:
        path: File to draw.
        others: Files that the command reads or writes otherwise.

    Raises:
        ConfigError: Saying what is in the way.
    """
    check_apart(path, others, f"--plot {path}")
    if path.is_dir():
        raise ConfigError(f"--plot {path}: expected a file, got a folder; give a file")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: expected a file name that ends in .png")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--plot {path}: its folder does not exist; make it first")
    if path.exists() and not _is_png(path):
        raise ConfigError(f"--plot {path} exists and is something else; give another file")


def _is_png(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(PNG_MAGIC)) == PNG_MAGIC


def _measured(
    fitted: Fitted, tier: str, context_s_per_token: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return batch sizes and seconds of a tier's rounds, their fitted cost of context taken off."""
    if tier in fitted.samples:
        samples = fitted.samples[tier]
        every = -(-len(samples) // MAX_POINTS)
        step_s = samples.step_s - context_s_per_token * samples.context_tokens
        return samples.batch_size[::every], step_s[::every]
    points = [point for point in fitted.points if point.tier == tier][:MAX_POINTS]
    batch = np.array([point.batch_size for point in points])
    context = np.array([point.context_tokens or 0 for point in points])
    return batch, np.array([point.step_s for point in points]) - context_s_per_token * context


def _draw_break_even(axis: Any, calibration: Calibration) -> None:
    """Draw the accept length from which each depth beats no speculation, by batch size."""
    speculative = [cost for cost in calibration.costs if cost.tier != NATIVE]
    axis.set(
        title="accept length to break even",
        xscale="log",
        xlabel="batch size",
        ylabel="accept length",
    )
    if NATIVE not in calibration.tier_names or not speculative:
        axis.text(0.5, 0.5, "needs a native tier and another", ha="center")
        return
    for cost in speculative:
        context = CONTEXT_PER_REQUEST if cost.max_context_tokens else 0
        sizes = drawn_sizes(cost.measured_batch_sizes[0], cost.measured_batch_sizes[-1]).tolist()
        values = [break_even(calibration, cost.tier, size, size * context) for size in sizes]
        axis.plot(sizes, values, linewidth=1.2, label=cost.tier)
    axis.axhline(1.0, color="gray", linewidth=0.8)
    axis.legend(fontsize="small", title="tier")
