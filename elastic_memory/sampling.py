"""Where in the history to look: polynomial sampling (section 2.3 of the paper).

A sampling is a function `name(points, history, **options)`. It returns either `points` sample points in [0, 1], 0 the
first token and 1 now, at which the history is reconstructed, or `points` cells [left, right] over which the
reconstruction is averaged. `history` is the number of tokens seen so far. Such a function may replace a name.
"""

import inspect
import math
from collections.abc import Callable

import torch

from elastic_memory.common.names import suggest
from elastic_memory.shapes import Float, Tensor

Sampling = Callable[..., Tensor]


def uniform(points: int, history: int) -> Float[Tensor, " point"]:
    """The paper's uniform rule, u_j = j/M: evenly spaced, from the first token on, oldest first."""
    return torch.arange(points, dtype=torch.float64) / points


def exponential(points: int, history: int, decay: float | None = None) -> Float[Tensor, " point"]:
    """The paper's exponential rule, u_j = 1 - decay^(M-1-j): crowded towards now, newest first.

    The paper gives no decay. Ours puts the newest point one token before now, whatever the history's length, so that
    the points span all scales from one token to everything (docs/choices.md, "decay").
    """
    if decay is None:
        decay = history ** (-1 / max(points - 1, 1))
    elif not 0 < decay < 1:
        raise ValueError(f"decay {decay!r}: give a number between 0 and 1, both excluded")
    return 1 - torch.tensor(decay, dtype=torch.float64) ** torch.arange(points - 1, -1, -1, dtype=torch.float64)


def midpoints(points: int, history: int) -> Float[Tensor, " point"]:
    """The middles of `points` equal parts: uniform, without its bias towards the past."""
    return (torch.arange(points, dtype=torch.float64) + 0.5) / points


def uniform_cells(points: int, history: int) -> Float[Tensor, "point 2"]:
    """`points` equal cells that tile the history, oldest first: each memory token is a mean instead of a value."""
    return _cells(torch.arange(points + 1, dtype=torch.float64) / points)


def geometric_cells(points: int, history: int) -> Float[Tensor, "point 2"]:
    """Cells that tile the history and grow geometrically into the past, the newest one token wide; oldest first.

    A history of no more tokens than `points` leaves no room to grow: its cells are equal.
    """
    if points == 1 or history <= points:
        return uniform_cells(points, history)
    growth = _growth(points, history)
    distance = growth ** torch.arange(points, -1, -1, dtype=torch.float64) - 1
    return _cells(1 - distance / distance[0])


SAMPLINGS: dict[str, Sampling] = {
    "uniform": uniform,
    "exponential": exponential,
    "midpoints": midpoints,
    "uniform_cells": uniform_cells,
    "geometric_cells": geometric_cells,
}


def resolve(sampling: str | Sampling, options: dict[str, object]) -> Sampling:
    """The function of this name, or the function given, after a check that it takes these options."""
    if callable(sampling):
        function = sampling
    elif sampling in SAMPLINGS:
        function = SAMPLINGS[sampling]
    else:
        raise ValueError(f"sampling {sampling!r}: {suggest(str(sampling), list(SAMPLINGS))}, or a function of your own")
    name = getattr(function, "__name__", "sampling")
    parameters = list(inspect.signature(function).parameters.values())
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in parameters[2:]]
        for option in options:
            if option not in known:
                fits = suggest(option, known) if known else "it takes none"
                raise ValueError(f"option {option!r} of sampling {name!r}: {fits}")
    return function


def sample_points(sampling: str | Sampling, points: int, history: int, **options: object) -> Tensor:
    """The sample points [points] or cells [points, 2] of a sampling given by name or function, checked."""
    if points < 1 or history < 1:
        raise ValueError(f"{points} points of a history of {history} tokens: both must be at least 1")
    function = resolve(sampling, options)
    name = getattr(function, "__name__", "sampling")
    try:
        with torch.device("cpu"):  # also inside `torch.device("meta")`
            u = torch.as_tensor(function(points, history, **options)).to("cpu", torch.float64)
    except TypeError as error:
        raise ValueError(f"sampling {name!r} of {points} points with options {options}: {error}") from error
    if tuple(u.shape) not in ((points,), (points, 2)):
        raise ValueError(f"sampling {name!r} returned shape {list(u.shape)}: it must be [{points}] or [{points}, 2]")
    if not bool(((u >= 0) & (u <= 1)).all()):
        outside = u[~((u >= 0) & (u <= 1))][0].item()
        raise ValueError(
            f"sampling {name!r} returned {outside}: points must be between 0 (the first token) and 1 (now)"
        )
    if u.ndim == 2 and not bool((u[:, 0] < u[:, 1]).all()):
        raise ValueError(f"sampling {name!r} returned an empty cell: each left edge must lie before its right edge")
    return u


def mass(u: Float[Tensor, "point ..."], history: int) -> Float[Tensor, " point"]:
    """Tokens that each cell averages, or that are nearer to a point than to any other."""
    if u.ndim == 2:
        return (u[:, 1] - u[:, 0]) * history
    ascending, place = u.sort()
    edges = torch.cat((u.new_zeros(1), (ascending[1:] + ascending[:-1]) / 2, u.new_ones(1)))
    return torch.empty_like(u).scatter_(0, place, edges.diff() * history)


def _cells(edges: Float[Tensor, " edge"]) -> Float[Tensor, "cell 2"]:
    return torch.stack([edges[:-1], edges[1:]], dim=1)


def _growth(cells: int, width: int) -> float:
    """The factor g > 1 with 1 + g + ... + g^(cells-1) = width, by bisection of its logarithm."""
    low, high = 0.0, math.log(width) / (cells - 1)
    for _ in range(60):
        middle = (low + high) / 2
        if math.expm1(cells * middle) > width * math.expm1(middle):
            high = middle
        else:
            low = middle
    return math.exp(high)
