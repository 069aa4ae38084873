"""Polynomials of segments that double in length with age, counted one unit at a time."""

import numpy as np
import torch

from elastic_memory.sampling import sample_points
from tests.oracles import hippo
from tests.oracles.elastic import both, tokens_of
from tests.oracles.parts import after_block_0


def intervals(rule, now):
    """(first token, end) of each segment, newest first."""
    levels: list[list[tuple[int, int]]] = [[] for _ in range(rule.segments // 2)]
    oldest = (0, 0)
    for first in range(0, now, rule.unit):
        moved = (first, min(first + rule.unit, now))
        for number, level in enumerate(levels):
            last = number == len(levels) - 1
            level.append(moved)
            moved = None
            if last and rule.segments % 2 == 0:
                # Room for one of this length, of the two that there may be.
                if len(level) == 2:
                    moved = level.pop(0)
            elif len(level) == 3:
                older, old = level.pop(0), level.pop(0)
                moved = (older[0], old[1])
            if moved is None:
                break
        if moved is not None:
            oldest = (0, moved[1])
    found = [segment for level in levels for segment in reversed(level)]
    return [*found, oldest] if oldest[1] else found


def state(rule, signal):
    """The coefficients of [token, feature], one segment after another."""
    found = np.zeros((rule.segments * rule.order, signal.shape[1]))
    for number, (first, end) in enumerate(intervals(rule, len(signal))):
        kernel = hippo.kernel(rule.order, 0, end - first, end - first)
        found[number * rule.order : (number + 1) * rule.order] = kernel @ signal[first:end]
    return found


def reading(rule, tokens):
    """What a block that so many tokens came before reads, as weights of these tokens; and how many each stands for."""
    rows, masses, found = [], [], intervals(rule, tokens)
    points = [0] * len(found)
    for _ in range(min(rule.points, tokens)):  # one at a time to the segment with fewest, the newest first
        free = [i for i, (first, end) in enumerate(found) if points[i] < end - first]
        points[min(free, key=lambda i: points[i])] += 1
    for (first, end), count in zip(found, points, strict=True):
        if count:
            looks = sample_points(rule.sampling, count, end - first, **dict(rule.options)).numpy()
            weights = hippo.read(rule.order, looks) @ hippo.kernel(rule.order, 0, end - first, end - first)
            rows.append(np.pad(weights, ((0, 0), (first, tokens - end))))
            masses.append(tokens_of(looks.tolist(), end - first))
    return torch.tensor(np.concatenate(rows)), torch.cat(masses)


def layer(layer, x, memory):
    def mix(query, key, value, keys, values):
        read, mass = reading(memory.rule, keys.shape[1])
        mass = mass if memory.adds_score else None
        return both(layer, memory, query, (read @ keys, read @ values), (key, value), mass)

    return after_block_0(layer, x, mix)
