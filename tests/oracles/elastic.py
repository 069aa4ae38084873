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
            mixed = both(layer, memory, query, (keys, values), (key, value))
        outputs.append(layer.finish(block, mixed))
    return torch.cat(outputs)


def both(layer, memory, query, remembered, own):
    """One softmax over memory and block; the scores of memory are raised by log |gain|."""
    here, root = range(query.shape[1]), query.shape[-1] ** 0.5
    rotated = layer.rope(query, here)
    scores = rotated @ remembered[0].mT / root
    if memory.gain is not None:
        scores = scores + memory.gain.abs().log()[:, None, None]
    inside = rotated @ layer.rope(own[0], here).mT / root
    scores = torch.cat((scores, inside), dim=2).masked_fill(~causal(len(here), scores.shape[2]), -torch.inf)
    return scores.softmax(-1) @ torch.cat((remembered[1], own[1]), dim=1)
