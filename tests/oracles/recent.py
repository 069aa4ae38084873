"""Elastic memory and a queue in one softmax, from the whole history each time."""

import torch

from elastic_memory import hippo
from tests.oracles.parts import attend, causal, local


def layer(layer, x, memory):
    outputs, size = [], layer.config.block_size
    _, all_keys, all_values = layer.qkv(x)
    bank, queue = memory.elastic.bank, memory.queue.order
    for start in range(0, len(x), size):
        block = x[start : start + size]
        query, key, value = layer.qkv(block)
        if start == 0:
            mixed = local(layer, query, key, value)
        else:
            read = hippo.basis(bank.order, bank.sample_points(start)) @ hippo.projection(bank.order, 0, start)
            raw = all_keys[:, :start][:, -queue:]
            here, before = range(len(block)), range(-raw.shape[1], 0)
            keys = torch.cat((read @ all_keys[:, :start], layer.rope(raw, before), layer.rope(key, here)), dim=1)
            values = torch.cat((read @ all_values[:, :start], all_values[:, :start][:, -queue:], value), dim=1)
            mixed = attend(layer.rope(query, here), keys, values, causal(len(block), keys.shape[1] - len(block)))
        outputs.append(layer.finish(block, mixed))
    return torch.cat(outputs)
