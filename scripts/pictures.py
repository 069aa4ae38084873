"""Draw the pictures of docs/mathematics.md.

python scripts/pictures.py        # in the root of the repository
"""

import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import elastic_memory as em
from elastic_memory.operators import Bank

TOKENS = 256
INK, FADED, COLOURS = "#24292f", "#afb8c1", ("#0969da", "#bf3989", "#1a7f37")


def signal() -> torch.Tensor:
    """A slow wave, a fast one and a step."""
    time = torch.linspace(0, 1, TOKENS, dtype=torch.float64)
    return torch.sin(math.tau * 2 * time) + 0.35 * torch.sin(math.tau * 18 * time) + 1.5 * (time > 0.75)


def reconstruction() -> Figure:
    """What a state keeps, by order."""
    figure, axes = plt.subplots(1, 3, figsize=(9.6, 2.6), sharey=True)
    truth, middles = signal(), (torch.arange(TOKENS) + 0.5) / TOKENS
    for order, axis, colour in zip((8, 32, 128), axes, COLOURS, strict=True):
        back = em.hippo.reconstruct(em.hippo.compress(truth, order), middles)
        left = float((back - truth).square().mean() / truth.var())
        axis.plot(truth, color=FADED, linewidth=3, label="history")
        axis.plot(back, color=colour, linewidth=1.3, label="read back")
        axis.set_title(f"{order} coefficients: {1 - left:.1%} of the variance", fontsize=10)
        axis.set_xlabel("token")
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    return figure


def sampling() -> Figure:
    """Where each sampling looks."""
    names = ("uniform", "exponential", "uniform_cells", "geometric_cells")
    figure, axis = plt.subplots(figsize=(9.6, 2.4))
    for row, name in enumerate(reversed(names)):
        where = em.sampling.SAMPLINGS[name](24, TOKENS) * TOKENS
        if where.ndim == 1:
            axis.plot(where, torch.full_like(where, row), "|", color=COLOURS[0], markersize=15, markeredgewidth=1.8)
        else:
            for cell, (left, right) in enumerate(where.tolist()):
                axis.barh(row, right - left, 0.5, left, color=COLOURS[2], alpha=(0.35, 0.75)[cell % 2])
    axis.set_yticks(range(len(names)), reversed(names))
    axis.set_xlim(-2, TOKENS + 2)
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.set_xlabel(f"token; the history has {TOKENS}, the newest on the right")
    return figure


def weights() -> Figure:
    """W = R K: how much each past token counts in three memory tokens."""
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 2.6), sharey=True)
    for order, axis in zip((32, 128), axes, strict=True):
        rows = Bank(order, 3, sampling=lambda points, history: [0.25, 0.6, 0.95]).direct(TOKENS, "cpu")
        for row, place, colour in zip(rows, (0.25, 0.6, 0.95), COLOURS, strict=True):
            axis.plot(row, color=colour, linewidth=1.3, label=f"sample point {place}")
            axis.axvline(place * TOKENS, color=colour, linewidth=0.8, linestyle=":")
        axis.set_title(f"{order} coefficients", fontsize=10)
        axis.set_xlabel("token")
    axes[0].set_ylabel("weight")
    axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def tidy(axis: Axes) -> None:
    """Two spines and quiet ticks."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(FADED)
    axis.tick_params(colors=INK, labelsize=8)


def main(root: Path) -> None:
    """Write all pictures, the same bytes each time."""
    plt.rcParams.update({"svg.hashsalt": "elastic-memory", "text.color": INK, "axes.labelcolor": INK})
    for draw in (reconstruction, sampling, weights):
        figure = draw()
        for axis in figure.axes:
            tidy(axis)
        figure.tight_layout()
        figure.savefig(root / "docs" / "pictures" / f"{draw.__name__}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main(Path.cwd())
