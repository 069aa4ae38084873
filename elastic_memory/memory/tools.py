"""Helpers that several mechanisms share."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch

from elastic_memory.shapes import Bool, Float, Tensor

Reading = tuple[Tensor, ...]


def gated(
    gate: Float[Tensor, " head"],
    remembered: Float[Tensor, "batch head token dim"],
    local: Float[Tensor, "batch head token dim"],
    visible: Bool[Tensor, "batch column"] | None,
) -> Float[Tensor, "batch head token dim"]:
    """g remembered + (1 - g) local with g = sigmoid(gate), and `local` alone in rows that have no reading."""
    openness = gate.sigmoid()[:, None, None]
    mixed = (local + openness * (remembered - local)).to(local.dtype)
    return mixed if visible is None else torch.where(visible.any(1)[:, None, None, None], mixed, local)


def budget(order: int, share: float) -> tuple[int, int]:
    """For hybrids: `order` divided into that of another memory and a `share` of raw tokens."""
    raw = round(order * share)
    if not 0 < raw < order:
        raise ValueError(f"share={share} of order {order}: raw tokens and the rest each need at least 1 of it")
    return order - raw, raw


def beside(reading: Reading, raw: Sequence[Tensor]) -> Reading:
    """One reading: the columns of a memory, then those of raw tokens, if there are any, whose scores stay as they are.

    `raw`: keys and values.
    """
    if not raw:
        return reading
    scores = (part.new_zeros(*part.shape[:2], raw[0].shape[2], 1) for part in reading[2:])
    return tuple(torch.cat((a, b.to(a.dtype)), dim=2) for a, b in zip(reading, (*raw, *scores), strict=True))


def group_by_size(blocks: int, readings: Sequence[Reading], alone: int = 1) -> list[tuple[int, int, Reading | None]]:
    """Neighbouring blocks whose readings have one size, as (first, last, readings as one batch), for one call each.

    `readings` are those of the last blocks; earlier ones have none. Each of the first `alone` blocks is a group of its
    own, because fewer tokens precede it.
    """
    own = [None] * (blocks - len(readings)) + list(readings)
    sizes = [(min(index, alone), -1 if one is None else static(one[0].shape[2])) for index, one in enumerate(own)]
    groups: list[tuple[int, int, Reading | None]] = []
    for (_, size), group in groupby(range(blocks), key=lambda index: sizes[index]):
        alike = list(group)
        first, last = alike[0], alike[-1] + 1
        stacked = None
        if size >= 0:
            stacked = tuple(torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*own[first:last], strict=True))
        groups.append((first, last, stacked))
    return groups


def real_features(dim: int, stored: int, device: torch.device | None = None) -> Bool[Tensor, " stored"]:
    """Which of a head's `stored` features are among its `dim` real ones: each half ends with padding."""
    half = torch.arange(stored // 2, device=device) < dim // 2
    return torch.cat((half, half))


def padded(weight: Float[Tensor, "head dim"], stored: int) -> Float[Tensor, "head stored"]:
    """Weights of a head's real features as weights of its stored ones: each half ends with zeros."""
    halves = weight.unflatten(1, (2, -1))
    return torch.nn.functional.pad(halves, (0, stored // 2 - halves.shape[2])).flatten(1)


def static(number: int) -> int:
    """`number` as a constant of compiled graphs, even under dynamic shapes: `range` makes torch.compile specialise."""
    return len(range(number))


def wide(x: Tensor) -> Tensor:
    """x in float32 or wider, as states are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def one_of(name: str, value: Any, names: Sequence[str]) -> Any:
    """`value`, if it is one of `names`."""
    if value not in names:
        raise ValueError(f"{name}={value!r}: give one of {', '.join(names)}")
    return value


def full_precision(function: Callable) -> Callable:
    """Run a method without autocast, as states are float32 whatever the activations are."""

    def run(self: Any, state: tuple[Tensor, ...], *args: Any) -> Any:
        with torch.autocast(state[0].device.type if state else "cpu", enabled=False):
            return function(self, state, *args)

    run.__doc__ = function.__doc__
    return run
