"""Elastic memory from the whole history each time, its scores written out."""

import torch

from elastic_memory import hippo
from tests.oracles.parts import after_block_0, causal


def layer(layer, x, memory):
    bank = memory.bank

    def mix(query, key, value, past_keys, past_values):
        seen = past_keys.shape[1]
        read = hippo.basis(bank.order, bank.sample_points(seen)) @ hippo.projection(bank.order, 0, seen)
        keys, values = read @ past_keys, read @ past_values
        if memory.length:
            squares, norms = past_keys.square().sum(-1, keepdim=True), past_values.norm(dim=-1, keepdim=True)
            keys = keys / keys.norm(dim=-1, keepdim=True) * (read @ squares).clamp_min(1e-12).sqrt()
            values = values / values.norm(dim=-1, keepdim=True) * (read @ norms).clamp_min(0)
        mass = tokens_of(bank.sample_points(seen).tolist(), seen) if memory.adds_score else None
        return both(layer, memory, query, (keys, values), (key, value), mass)

    return after_block_0(layer, x, mix)


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
    """One softmax over memory and block, blended with attention to the block alone; memory's scores plus log mass."""
    here, root = range(query.shape[1]), query.shape[-1] ** 0.5
    rotated = layer.rope(query, here)
    scores = (query if memory.raw_queries else rotated) @ remembered[0].mT / root
    if mass is not None:
        scores = scores + mass.log()
    inside = rotated @ layer.rope(own[0], here).mT / root
    inside = inside.masked_fill(~causal(len(here), 0), -torch.inf)
    together = torch.cat((scores, inside), dim=2).softmax(-1) @ torch.cat((remembered[1], own[1]), dim=1)
    if memory.blend is None:
        return together
    share = memory.blend[:, None, None]
    return (1 - share) * (inside.softmax(-1) @ own[1]) + share * together
