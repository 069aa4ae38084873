"""Elastic memory and a queue in one softmax, from the whole history each time."""

import torch

from elastic_memory import hippo
from tests.oracles.parts import after_block_0, attend, causal


def layer(layer, x, memory):
    bank, queue = memory.rest.bank, memory.queue.order

    def mix(query, key, value, past_keys, past_values):
        seen, tokens = past_keys.shape[1], query.shape[1]
        read = hippo.basis(bank.order, bank.sample_points(seen)) @ hippo.projection(bank.order, 0, seen)
        here, before = range(tokens), range(-min(seen, queue), 0)
        raw = layer.rope(past_keys[:, -queue:], before)
        keys = torch.cat((read @ past_keys, raw, layer.rope(key, here)), dim=1)
        values = torch.cat((read @ past_values, past_values[:, -queue:], value), dim=1)
        return attend(layer.rope(query, here), keys, values, causal(tokens, keys.shape[1] - tokens))

    return after_block_0(layer, x, mix)
