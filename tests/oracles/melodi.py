"""Melodi's layer with propagation inside layers only, block after block, as specified: positions count from z on."""

import torch

from tests.oracles.parts import attend, causal, rms


def layer(layer, x, memory):
    outputs, size = [], layer.config.block_size
    summary = layer["self_attn.memory.summary"]
    count = len(summary)
    stored = torch.zeros(count, x.shape[1], dtype=torch.float64) if memory.reads_start else None
    for start in range(0, len(x), size):
        block = x[start : start + size]
        h = torch.cat((block, summary))
        query, key, value = layer.qkv(h)
        positions = range(count, count + len(h))
        query, key = layer.rope(query, positions), layer.rope(key, positions)
        if stored is not None:
            _, stored_key, stored_value = layer.qkv(stored)
            key = torch.cat((layer.rope(stored_key, range(count)), key), dim=1)
            value = torch.cat((stored_value, value), dim=1)
        front = key.shape[1] - len(h)
        heads = attend(query, key, value, causal(len(h), front))
        if memory.blend is not None and front:
            alone = attend(query, key[:, front:], value[:, front:], causal(len(h), 0))
            heads = alone + memory.blend[:, None, None] * (heads - alone)
        h = layer.finish(h, heads)
        outputs.append(h[: len(block)])
        stored = mixed(layer, h[: len(block)], h[len(block) :])
    return torch.cat(outputs)


def mixed(layer, context, summary):
    """The memory for the next block."""
    missing = torch.zeros(layer.config.block_size - len(context), context.shape[1], dtype=torch.float64)
    tokens = torch.cat((rms(context), missing, rms(summary)))
    weight, bias = layer["self_attn.memory.mixer.weight"], layer["self_attn.memory.mixer.bias"]
    return weight @ tokens + bias[:, None] + summary
