"""The Memorizing Transformer's layer, block after block, as specified."""

import torch

from tests.oracles.parts import attend, causal, local


def layer(layer, x, memory):
    outputs, size = [], layer.config.block_size
    queue_key, queue_value = (part[:, :0] for part in layer.qkv(x)[1:])
    for start in range(0, len(x), size):
        block = x[start : start + size]
        query, key, value = layer.qkv(block)
        here, before = range(len(block)), range(-queue_key.shape[1], 0)
        stored = layer.rope(queue_key, before) if memory.positions == "full" else queue_key
        if not len(before):
            mixed = local(layer, query, key, value)
        elif memory.shares_softmax:
            keys = torch.cat((stored, layer.rope(key, here)), dim=1)
            values = torch.cat((queue_value, value), dim=1)
            mixed = attend(layer.rope(query, here), keys, values, causal(len(block), len(before)))
        else:
            looking = query if memory.positions == "none" else layer.rope(query, here)
            gate = layer["self_attn.memory.gate"].sigmoid()[:, None, None]
            mixed = gate * attend(looking, stored, queue_value) + (1 - gate) * local(layer, query, key, value)
        outputs.append(layer.finish(block, mixed))
        queue_key = torch.cat((queue_key, key), dim=1)[:, -memory.order :]
        queue_value = torch.cat((queue_value, value), dim=1)[:, -memory.order :]
    return torch.cat(outputs)
