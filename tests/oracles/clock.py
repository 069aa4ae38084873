"""Elastic memory over a clock per head, one token after another: where each lies in the domain, then its integral."""

from itertools import pairwise
from math import comb

import numpy as np
import torch

from elastic_memory.sampling import sample_points
from tests.oracles import hippo
from tests.oracles.elastic import both
from tests.oracles.parts import after_block_0


def edges(window, tokens):
    """Where tokens begin and end in the domain, by the share that each takes when it comes: at a constant rate."""
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


def places(memory, head, keys):
    """`edges` of clocks that are learned: token i moves the clock on by d, and takes d / (1 + d)."""
    found = [torch.zeros((), dtype=torch.float64)]
    for i, key in enumerate(keys, 1):
        faster = memory.rate_gain[head]
        if memory.rate == "content":
            faster = faster + memory.weigh[head] @ key
        d = faster.exp() / min(i - 1, memory.windows[head]) if i > 1 else None
        share = d / (1 + d) if i > 1 else 1.0
        found = [place * (1 - share) for place in found] + [torch.ones((), dtype=torch.float64)]
    return torch.stack(found)


def integrals(order, u):
    """Of the first functions of the basis, from 0 to points u, by sums of powers."""
    rows = []
    for n in range(order):
        powers = [(-1) ** (n + k) * comb(n, k) * comb(n + k, k) * u ** (k + 1) / (k + 1) for k in range(n + 1)]
        rows.append((2 * n + 1) ** 0.5 * sum(powers))
    return torch.stack(rows)


def learned(memory, head, keys):
    """`reading` over such a clock, with gradients."""
    bank, window = memory.bank, memory.windows[head]
    looks = sample_points(bank.sampling, bank.points, min(len(keys), window + 1), **dict(bank.options)).numpy()
    kernel = integrals(bank.order, places(memory, head, keys)).diff(dim=1)
    return torch.tensor(hippo.read(bank.order, looks)) @ kernel


def layer(layer, x, memory):
    group = layer.config.num_attention_heads // layer.config.num_key_value_heads

    def mix(query, key, value, keys, values):
        if memory.rate == "constant":
            read = torch.stack([reading(memory, head // group, keys.shape[1]) for head in range(len(key))])
        else:
            read = torch.stack([learned(memory, head // group, keys[head]) for head in range(len(key))])
        return both(layer, memory, query, (read @ keys, read @ values), (key, value))

    return after_block_0(layer, x, mix)
