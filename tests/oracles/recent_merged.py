"""Merged memory and a queue in one softmax, from the whole history each time."""

import torch

from tests.oracles.merged import means
from tests.oracles.parts import after_block_0, causal


def layer(layer, x, memory):
    size, queue = layer.config.block_size, memory.queue.order

    def mix(query, key, value, past_keys, past_values):
        tokens, here = query.shape[1], range(query.shape[1])
        slot_keys, slot_values, counts = means(layer, memory.rest, size, past_keys, past_values)
        raw = layer.rope(past_keys[:, -queue:], range(-min(past_keys.shape[1], queue), 0))
        keys = torch.cat((slot_keys, raw, layer.rope(key, here)), dim=1)
        scores = layer.rope(query, here) @ keys.mT / query.shape[-1] ** 0.5
        scores[..., : counts.shape[-1]] += counts.log()
        scores = scores.masked_fill(~causal(tokens, keys.shape[1] - tokens), -torch.inf)
        return scores.softmax(-1) @ torch.cat((slot_values, past_values[:, -queue:], value), dim=1)

    return after_block_0(layer, x, mix)
