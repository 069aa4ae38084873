"""Plots with matplotlib, one function each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PAPER, OURS, TRUTH = "#c44e52", "#1f5f99", "#9a9a9a"


def save(figure: Figure, path: Path) -> Path:
    """Write a figure and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    return path


def errors(labels: Sequence[str], series: Mapping[str, Sequence[float]], path: Path) -> Path:
    """Errors on a logarithmic axis: one line per label, one marker per series."""
    figure, axes = plt.subplots(figsize=(8, 0.42 * len(labels) + 1.4))
    markers = [("o", "none", PAPER, 11.0), ("o", PAPER, PAPER, 5.0), ("D", OURS, OURS, 6.0)]
    for (name, values), (marker, face, edge, size) in zip(series.items(), markers, strict=False):
        axes.plot(values, range(len(labels)), marker, mfc=face, mec=edge, ms=size, label=name)
    axes.set_xscale("log")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("mean squared error of the reconstruction")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.18), ncols=3, frameon=False)
    _open(axes)
    return save(figure, path)


def reconstructions(
    panels: Mapping[str, tuple[Sequence[float], Mapping[str, Sequence[float]]]], path: Path, last: int = 600
) -> Path:
    """One row per signal with its reconstructions: the whole on the left, the newest `last` tokens on the right."""
    figure, grid = plt.subplots(len(panels), 2, figsize=(12, 2.1 * len(panels)), squeeze=False, width_ratios=(2, 1))
    shades = plt.get_cmap("viridis_r")
    for row, (name, (truth, estimates)) in zip(grid, panels.items(), strict=True):
        for axes, start in zip(row, (0, max(0, len(truth) - last)), strict=True):
            axes.plot(range(start, len(truth)), truth[start:], color=TRUTH, lw=0.7, alpha=0.7, label="truth")
            for index, (label, values) in enumerate(estimates.items(), 1):
                color = shades(index / len(estimates))
                axes.plot(range(start, len(truth)), values[start:], color=color, lw=1.2, label=label)
            axes.margins(x=0.01)
            _open(axes)
        row[0].set_ylabel(name)
    grid[0, 0].set_title("the whole history", fontsize=10)
    grid[0, 1].set_title(f"its newest {last} tokens", fontsize=10)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, bbox_to_anchor=(0.5, -0.03))
    figure.align_ylabels()
    figure.tight_layout()
    return save(figure, path)


def lines(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], x_label: str, y_label: str) -> Figure:
    """One line of (x, y) per name; markers where there are few points."""
    figure, axes = plt.subplots(figsize=(8, 3.8))
    for name, (x, y) in series.items():
        axes.plot(x, y, lw=1.4, marker="o" if len(x) <= 64 else "", ms=4, label=name)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    _open(axes)
    return figure


def _open(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
