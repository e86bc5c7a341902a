"""Draw a calibration: measured points over fitted curves, and where speculation breaks even."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from controller.calibration import Calibration
from controller.errors import ConfigError
from training.cli import check_apart
from training.fitting import Fitted
from training.report import break_even, off_tier

MAX_POINTS = 2000
"""Rounds drawn a tier; more only make the file larger."""
FEW_POINTS = 50
"""Rounds below which none hides another, so that they are drawn opaque."""
MAX_SIZES = 500
"""Batch sizes at which a curve is drawn; no eye tells more."""
CONTEXT_PER_REQUEST = 512
"""Context of the break-even curves, where the calibration has a context axis."""
DPI = 120
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def plot(fitted: Fitted, path: Path) -> None:
    """Write a PNG with one panel a tier and one of the break-even accept length.

    In a tier's panel every point is a measured round, as measured. The line is the fitted round
    time at the median context of each batch size, and the band spans its fewest to most context.

    Raises:
        ConfigError: As :func:`check_plot`, or if the file cannot be written.
    """
    # Without a display, and slow to import: only when something is drawn.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    check_plot(path, ())
    calibration = fitted.calibration
    count = len(calibration.costs) + 1
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.5 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, cost in zip(axes, calibration.costs, strict=False):
        batch, context, step_s = _measured(fitted, cost.tier)
        alpha = 0.9 if len(batch) < FEW_POINTS else 0.35
        axis.plot(batch, 1e3 * step_s, ".", markersize=6, alpha=alpha, label="measured")
        low, high = cost.measured_batch_sizes[0], cost.measured_batch_sizes[-1]
        inside, outside = drawn_sizes(low, high), drawn_sizes(high, 2 * high)
        for sizes, style, label in (
            (inside, "-", "fitted, median context" if cost.max_context_tokens else "fitted"),
            (outside, ":", "extrapolated"),
        ):
            least, median, most = (
                [
                    1e3 * (cost.base_at(int(size)) + cost.context_s_per_token * tokens)
                    for size, tokens in zip(sizes, row, strict=True)
                ]
                for row in _contexts(batch, context, sizes)
            )
            axis.plot(sizes, median, style, color="black", linewidth=1.2, label=label)
            if cost.max_context_tokens:
                band = "fitted, all contexts" if style == "-" else None
                axis.fill_between(sizes, least, most, color="black", alpha=0.12, lw=0, label=band)
        axis.set(title=f"tier {cost.tier}", xlabel="batch size", ylabel="round time, ms")
        axis.set_ylim(bottom=0.0)
        axis.legend(fontsize="small", loc="upper left")
    _draw_break_even(axes[count - 1], calibration)
    for axis in axes[:count]:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axis.tick_params(axis="x", labelsize="small")
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


def _measured(fitted: Fitted, tier: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return batch sizes, context tokens and seconds of a tier's rounds, as measured."""
    if tier in fitted.samples:
        samples = fitted.samples[tier]
        every = -(-len(samples) // MAX_POINTS)
        columns = (samples.batch_size, samples.context_tokens, samples.step_s)
        batch, context, step_s = (column[::every] for column in columns)
        return batch, context, step_s
    points = [point for point in fitted.points if point.tier == tier][:MAX_POINTS]
    batch = np.array([point.batch_size for point in points])
    context = np.array([point.context_tokens or 0 for point in points])
    return batch, context, np.array([point.step_s for point in points])


def _contexts(batch: np.ndarray, context: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the fewest, median and most context tokens at each size, from the measured ones.

    Between and beyond the measured batch sizes the context of a request is interpolated.

    Args:
        batch: ``(num_rounds,)`` batch sizes.
        context: ``(num_rounds,)`` context tokens, summed over the batch.
        sizes: ``(num_sizes,)`` batch sizes to return it for.

    Returns:
        ``(3, num_sizes)``.
    """
    measured = np.unique(batch)
    of_request = [np.quantile(context[batch == size] / size, (0.0, 0.5, 1.0)) for size in measured]
    return np.array([sizes * np.interp(sizes, measured, row) for row in np.transpose(of_request)])


def _draw_break_even(axis: Any, calibration: Calibration) -> None:
    """Draw the accept length from which each depth beats no speculation, by batch size."""
    off = off_tier(calibration)
    speculative = [cost for cost in calibration.costs if cost.tier.isdecimal()]
    if off is None or not speculative:
        text = "no break-even: it needs\na native or cold tier and a depth"
        axis.set_axis_off()
        axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
        return
    axis.set(
        title=f"accept length to break even with {off}",
        xlabel="batch size",
        ylabel="accept length",
    )
    for cost in speculative:
        context = CONTEXT_PER_REQUEST if cost.max_context_tokens else 0
        sizes = drawn_sizes(cost.measured_batch_sizes[0], cost.measured_batch_sizes[-1]).tolist()
        values = [break_even(calibration, cost.tier, size, size * context) for size in sizes]
        axis.plot(sizes, values, linewidth=1.2, label=cost.tier)
    axis.axhline(1.0, color="gray", linewidth=0.8)
    axis.legend(fontsize="small", title="tier")
