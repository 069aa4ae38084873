"""Elastic memory beside raw tokens: those of the whole history that were furthest from its polynomial."""

import numpy as np
import torch

from tests.oracles import hippo
from tests.oracles.parts import attend, causal, local


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
    outputs, size, bank = [], layer.config.block_size, memory.elastic.bank
    _, all_keys, all_values = layer.qkv(x)
    for start in range(0, len(x), size):
        block = x[start : start + size]
        query, key, value = layer.qkv(block)
        if start == 0:
            mixed = local(layer, query, key, value)
        else:
            looks, here = bank.sample_points(start).numpy(), range(len(block))
            read = torch.tensor(hippo.read(bank.order, looks) @ hippo.kernel(bank.order, 0, start, start))
            sizes = [size] * (start // size)
            kept = [most(bank.order, memory.raw, one[:start].detach().numpy(), sizes) for one in all_keys]
            raw_keys, raw_values = (
                torch.stack([one[index] for one, index in zip(signal, kept, strict=True)])
                for signal in (all_keys, all_values)
            )
            keys = torch.cat((read @ all_keys[:, :start], raw_keys, layer.rope(key, here)), dim=1)
            values = torch.cat((read @ all_values[:, :start], raw_values, value), dim=1)
            mixed = attend(layer.rope(query, here), keys, values, causal(len(block), keys.shape[1] - len(block)))
        outputs.append(layer.finish(block, mixed))
    return torch.cat(outputs)
