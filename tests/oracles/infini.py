"""Infini-Transformer's layer, block after block, as specified."""

import torch

from tests.oracles.parts import local, rms


def sigma(x):
    return torch.where(x > 0, x + 1, x.exp())


def retrieve(feature, matrix, normaliser):
    return feature @ matrix / ((feature @ normaliser[:, :, None]) + 1e-6)


def layer(layer, x, memory):
    outputs, size, heads, dim = [], layer.config.block_size, layer.config.num_attention_heads, layer.config.head_dim
    matrix = torch.zeros(heads, dim, dim, dtype=torch.float64)
    normaliser = torch.zeros(heads, dim, dtype=torch.float64)
    gate = layer["self_attn.memory.gate"].sigmoid()[:, None, None]
    for start in range(0, len(x), size):
        block = x[start : start + size]
        query, key, value = layer.qkv(block)
        if memory.memory_norm == "qk":
            query, key = rms(query), rms(key)
        mixed = local(layer, query, key, value)
        if start > 0:
            read = retrieve(sigma(query), matrix, normaliser)
            mixed = gate * (rms(read) if memory.memory_norm == "output" else read) + (1 - gate) * mixed
        elif memory.reads_start:
            mixed = (1 - gate) * mixed
        outputs.append(layer.finish(block, mixed))
        feature = sigma(key)
        if memory.update == "delta" and start > 0:
            value = value - retrieve(feature, matrix, normaliser)
        matrix = matrix + feature.transpose(1, 2) @ value
        normaliser = normaliser + feature.sum(1)
    return torch.cat(outputs)
