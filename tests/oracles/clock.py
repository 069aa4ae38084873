"""Elastic memory over a clock per head, one token after another: where each lies in the domain, then its integral."""

from itertools import pairwise

import numpy as np
import torch

from elastic_memory.sampling import sample_points
from tests.oracles import hippo
from tests.oracles.elastic import both
from tests.oracles.parts import after_block_0


def edges(window, tokens):
    """Where tokens begin and end in the domain, by the share that each takes when it comes."""
    places = [0.0]
    for i in range(1, tokens + 1):
        share = 1 / i if i <= window else (1 / window) / (1 + 1 / window)
        places = [place * (1 - share) for place in places] + [1.0]
    return places


def kernel(order, window, tokens):
    places = edges(window, tokens)
    return np.array([[hippo.mean(n, a, b) * (b - a) for a, b in pairwise(places)] for n in range(order)])


def reading(memory, head, tokens):
    """What a block that so many tokens came before reads, as weights of these tokens."""
    bank, window = memory.bank, memory.windows[head]
    looks = sample_points(bank.sampling, bank.points, min(tokens, window + 1), **dict(bank.options)).numpy()
    return torch.tensor(hippo.read(bank.order, looks) @ kernel(bank.order, window, tokens))


def layer(layer, x, memory):
    group = layer.config.num_attention_heads // layer.config.num_key_value_heads

    def mix(query, key, value, keys, values):
        read = torch.stack([reading(memory, head // group, keys.shape[1]) for head in range(len(key))])
        return both(layer, memory, query, (read @ keys, read @ values), (key, value))

    return after_block_0(layer, x, mix)
