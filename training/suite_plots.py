"""The plots of a report, each as the text of an SVG image."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from training.targets import (
    ORACLE,
    POLICY,
    THRESHOLD,
    best_of,
    fixed_names,
    mean_objective,
    share_of_oracle,
)

COLOURS = {POLICY: "#1f5fbf", ORACLE: "#222222", THRESHOLD: "#c0392b", "greedy": "#e08e0b"}
matplotlib.rcParams["svg.hashsalt"] = "specgovernor"


def svg(figure: Figure) -> str:
    """Return a figure as SVG, the same text every time, without the XML header."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def plot_maps(systems: Sequence[Mapping[str, Any]]) -> str:
    """Draw the mean depth over batch size and accept rate, policy above, oracle below."""
    figure = Figure(figsize=(2.6 * len(systems) + 1.0, 5.6), layout="constrained")
    axes = figure.subplots(2, len(systems), squeeze=False)
    image = None
    for column, system in enumerate(systems):
        for row, who in enumerate((POLICY, ORACLE)):
            ax: Axes = axes[row, column]
            image = ax.imshow(
                np.array(system["map"][who]), origin="lower", aspect="auto", vmin=0, vmax=7
            )
            ax.set_title(f"{system['system']}\n{who}", fontsize=7)
            ax.set_xticks(range(len(system["map"]["rates"])), system["map"]["rates"], fontsize=6)
            ax.set_yticks(range(len(system["map"]["sizes"])), system["map"]["sizes"], fontsize=6)
            if row == 1:
                ax.set_xlabel("accept rate", fontsize=7)
            if column == 0:
                ax.set_ylabel("batch size", fontsize=7)
    if image is not None:
        figure.colorbar(image, ax=axes, label="mean draft steps (0: off)", shrink=0.7)
    return svg(figure)


def plot_time_line(line: Mapping[str, Any]) -> str:
    """Draw load, acceptance, depth and queue over time."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True)
    time_s = line["time_s"]
    for ax, name, label in zip(
        axes,
        ("running", "accept_rate", "num_steps", "waiting"),
        ("running requests", "true accept rate", "draft steps", "queue"),
        strict=True,
    ):
        ax.plot(time_s, line[name], linewidth=0.9, drawstyle="steps-post", color=COLOURS[POLICY])
        ax.set_ylabel(label, fontsize=8)
        ax.grid(alpha=0.3)
    axes[-1].set_xlabel("seconds")
    return svg(figure)


def plot_regret(systems: Sequence[Mapping[str, Any]]) -> str:
    """Draw the loss after acceptance falls or rises at once, cumulated over rounds."""
    figure = Figure(figsize=(3.4 * len(systems), 6), layout="constrained")
    axes = figure.subplots(2, len(systems), squeeze=False)
    for column, system in enumerate(systems):
        for row, (direction, title) in enumerate((("fall", "falls"), ("rise", "rises"))):
            ax = axes[row, column]
            for name, curves in system["shifts"]["curves"].items():
                if direction in curves:
                    style = {"linewidth": 1.8} if name in COLOURS else {"linewidth": 0.8}
                    ax.plot(curves[direction], label=name, color=COLOURS.get(name), **style)
            low, high = ax.get_ylim()
            if high - low < 1.0:  # nothing but rounding
                ax.set_ylim(-1.0, 1.0)
            ax.set_title(f"{system['system']}\nacceptance {title}", fontsize=7)
            ax.tick_params(labelsize=6)
            ax.grid(alpha=0.3)
            if column == 0:
                ax.set_ylabel("loss, native rounds", fontsize=7)
            if row == 1:
                ax.set_xlabel("rounds since the shift", fontsize=7)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=7)
    return svg(figure)


def plot_cells(system: Mapping[str, Any]) -> str:
    """Draw each cell's share of the oracle: policy, threshold, best fixed choice, native server."""
    cells = system["cells"]
    figure = Figure(figsize=(11, 0.19 * len(cells) + 1.2), layout="constrained")
    ax = figure.subplots()
    at = np.arange(len(cells))[::-1]
    ax.barh(at, [share_of_oracle(c) for c in cells], height=0.6, label=POLICY, color="#9dbde8")
    ax.scatter(
        [share_of_oracle(c, THRESHOLD) for c in cells],
        at,
        marker="|",
        s=40,
        label=THRESHOLD,
        color=COLOURS[THRESHOLD],
    )
    ax.scatter(
        [share_of_oracle(c, "tuned greedy") for c in cells],
        at,
        marker="x",
        s=20,
        label="tuned greedy",
        color=COLOURS["greedy"],
    )
    # The best fixed choice is shown as a share of what the policy's share is a share of.
    ax.scatter(
        [
            share_of_oracle(c) * best_of(c, fixed_names(c, True)) / mean_objective(c, POLICY)
            for c in cells
        ],
        at,
        marker="o",
        s=25,
        label="best fixed choice in hindsight",
        facecolors="none",
        edgecolors="#555555",
    )
    ax.axvline(1.0, color="#222222", linewidth=0.8)
    ax.set_yticks(at, [c["cell"] for c in cells], fontsize=6)
    ax.set_xlim(0.4, 1.03)
    ax.set_xlabel("share of the oracle", fontsize=8)
    ax.set_title(system["system"], fontsize=9)
    ax.legend(fontsize=7, loc="lower left")
    ax.margins(y=0.01)
    return svg(figure)
