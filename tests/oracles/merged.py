"""Merged memory with its slots as lists of tokens."""

import torch

from tests.oracles.elastic import both
from tests.oracles.parts import after_block_0


def layer(layer, x, memory):
    size = layer.config.block_size

    def mix(query, key, value, past_keys, past_values):
        *read, counts = means(layer, memory, size, past_keys, past_values)
        return both(layer, memory, query, read, (key, value), counts)

    return after_block_0(layer, x, mix)


def means(layer, memory, size, keys, values):
    """Keys and values of the slots after the tokens of all heads, and how many tokens each slot holds."""
    group = layer.config.num_attention_heads // layer.config.num_key_value_heads
    keys = keys * slowest(keys.shape[-1], memory)
    kept = [slots(one, [size] * (keys.shape[1] // size), memory.slots, memory.rounds) for one in keys[::group]]
    kept = [held for held in kept for _ in range(group)]
    key, value = (
        torch.stack([torch.stack([head[tokens].mean(0) for tokens in kept[i]]) for i, head in enumerate(signal)])
        for signal in (keys, values)
    )
    counts = torch.tensor([[len(tokens) for tokens in held] for held in kept], dtype=torch.float64)
    return layer.rope(key, [-memory.distance] * key.shape[1]), value, counts[:, None]


def slowest(dim, memory):
    """1 for the features that slots keep, of each half the last ones."""
    half = [float(pair >= memory.kept.start) for pair in range(dim // 2)]
    return torch.tensor(half + half, dtype=torch.float64)


def slots(keys, sizes, order, rounds):
    """The tokens of each slot, oldest slot first, after blocks of these sizes of the keys [token, dim] of a head."""
    held, end = [], 0
    for size in sizes:
        held += [[token] for token in range(end, end + size)]
        end += size
        surplus = max(len(held) - order, 0)
        for left in range(rounds, 0, -1):
            merges = -(-surplus // left)
            held, surplus = merged(keys, held, merges), surplus - merges
    return held


def merged(keys, held, merges):
    """The slots after `merges` of them, those that cost least, joined the earlier slot that costs least."""
    found = []
    for later in range(1, len(held)):
        costs = [cost(keys, held[earlier], held[later]) for earlier in range(later)]
        found.append((min(costs), later, costs.index(min(costs))))
    joined = {later: earlier for _, later, earlier in sorted(found)[:merges]}
    result = {slot: [] for slot in range(len(held)) if slot not in joined}
    for slot, tokens in enumerate(held):
        while slot in joined:
            slot = joined[slot]
        result[slot] += tokens
    return list(result.values())


def cost(keys, one, other):
    """By how much the squared error grows if two slots become one."""

    def error(tokens):
        return float((keys[tokens] - keys[tokens].mean(0)).square().sum().detach())

    found = error(one + other) - error(one) - error(other)
    return 0.0 if found < 1e-6 * float(keys[one + other].square().sum().detach()) else found
