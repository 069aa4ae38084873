"""Elastic memory from the whole history each time, its scores written out."""

import torch

from elastic_memory import hippo
from tests.oracles.parts import causal, local


def layer(layer, x, memory):
    outputs, size, bank = [], layer.config.block_size, memory.bank
    _, all_keys, all_values = layer.qkv(x)
    for start in range(0, len(x), size):
        block = x[start : start + size]
        query, key, value = layer.qkv(block)
        if start == 0:
            mixed = local(layer, query, key, value)
        else:
            read = hippo.basis(bank.order, bank.sample_points(start)) @ hippo.projection(bank.order, 0, start)
            keys, values = read @ all_keys[:, :start], read @ all_values[:, :start]
            mass = tokens_of(bank.sample_points(start).tolist(), start) if memory.adds_score else None
            mixed = both(layer, memory, query, (keys, values), (key, value), mass)
        outputs.append(layer.finish(block, mixed))
    return torch.cat(outputs)


def tokens_of(places, seen):
    """How many of `seen` tokens each cell covers, or each point is the nearest to."""
    if isinstance(places[0], list):
        widths = [right - left for left, right in places]
    else:
        befores = [max((other for other in places if other < place), default=-place) for place in places]
        afters = [min((other for other in places if other > place), default=2 - place) for place in places]
        widths = [(after - before) / 2 for before, after in zip(befores, afters, strict=True)]
    return torch.tensor(widths, dtype=torch.float64) * seen


def both(layer, memory, query, remembered, own, mass=None):
    """One softmax over memory and block; the scores of memory are raised by log |gain| and by log mass."""
    here, root = range(query.shape[1]), query.shape[-1] ** 0.5
    rotated = layer.rope(query, here)
    scores = (query if memory.raw_queries else rotated) @ remembered[0].mT / root
    if mass is not None:
        scores = scores + mass.log()
    if memory.gain is not None:
        scores = scores + memory.gain.abs().log()[:, None, None]
    inside = rotated @ layer.rope(own[0], here).mT / root
    scores = torch.cat((scores, inside), dim=2).masked_fill(~causal(len(here), scores.shape[2]), -torch.inf)
    return scores.softmax(-1) @ torch.cat((remembered[1], own[1]), dim=1)
