"""Elastic memory beside raw tokens: those of the whole history that were furthest from its polynomial."""

import numpy as np
import torch

from tests.oracles import hippo
from tests.oracles.elastic import both
from tests.oracles.parts import after_block_0


def novelty(order, keys, sizes):
    """Of each token of [token, dim], when its block, of these sizes, had been written."""
    found, end = [], 0
    for size in sizes:
        end += size
        coefficients = hippo.kernel(order, 0, end, end) @ keys[:end]
        distances = []
        for token in range(end - size, end):
            given = hippo.read(order, np.array([(token + 0.5) / end])) @ coefficients
            distances.append(float(((keys[token] - given[0]) ** 2).sum()))
        found += [distance / (sum(distances) / size) for distance in distances]
    return found


def most(order, raw, keys, sizes):
    """The tokens that are kept, most novel first."""
    found = novelty(order, keys, sizes)
    return sorted(range(len(found)), key=lambda token: -found[token])[:raw]


def layer(layer, x, memory):
    size, bank = layer.config.block_size, memory.elastic.bank

    def mix(query, key, value, keys, values):
        seen = keys.shape[1]
        looks = bank.sample_points(seen).numpy()
        read = torch.tensor(hippo.read(bank.order, looks) @ hippo.kernel(bank.order, 0, seen, seen))
        kept = [most(bank.order, memory.raw, one.detach().numpy(), [size] * (seen // size)) for one in keys]
        remembered = []
        for signal in (keys, values):
            raw = torch.stack([one[index] for one, index in zip(signal, kept, strict=True)])
            remembered.append(torch.cat((read @ signal, raw), dim=1))
        return both(layer, memory, query, remembered, (key, value))

    return after_block_0(layer, x, mix)
