"""Key-Value Means, one token and one slot at a time."""

import torch

from tests.oracles.parts import attend, causal, local


def layer(layer, x, memory):
    outputs, size, slots = [], layer.config.block_size, None
    group = layer.config.num_attention_heads // layer.config.num_key_value_heads
    weigh, temperature = (layer[f"self_attn.memory.{name}"] for name in ("weigh", "temperature"))
    for start in range(0, len(x), size):
        block = x[start : start + size]
        query, key, value = layer.qkv(block)
        if start == 0:
            mixed = local(layer, query, key, value)
        else:
            here = range(len(block))
            columns = [
                torch.stack([torch.stack([slot[part] for slot in head]) for head in map(read, slots)])
                for part in range(2)
            ]
            columns[0] = columns[0] * temperature.repeat_interleave(group)[:, None, None]
            keys = torch.cat((columns[0], layer.rope(key, here)), dim=1)
            values = torch.cat((columns[1], value), dim=1)
            mixed = attend(layer.rope(query, here), keys, values, causal(len(block), columns[0].shape[1]))
        outputs.append(layer.finish(block, mixed))
        slots = slots or [[] for _ in key]
        for head, held in enumerate(slots):
            write(held, key[head], value[head], memory, weigh[head // group])
    return torch.cat(outputs)


def read(slots):
    """(key, value) of each slot."""
    return [
        (key / key.norm() * key_length, value / value.norm() * value_length)
        for key, value, key_length, value_length in slots
    ]


def write(slots, keys, values, memory, weigh):
    """Changes the list `slots` of (sum of keys, sum of values, length of the first key, of the first value)."""
    room, tokens = min(memory.order - len(slots), len(keys)), list(range(len(keys)))
    if slots:
        novel = sorted(tokens, key=lambda i: max(cosine(keys[i], slot[0]) for slot in slots))
        opening = sorted(novel[:room])
    else:
        opening = [i * len(keys) // room for i in range(room)]
    slots += [(keys[i], values[i], keys[i].norm(), values[i].norm()) for i in opening]
    before = list(slots)
    for i in tokens:
        if i not in opening:
            free = range(memory.sinks, len(slots))
            best = max(free, key=lambda slot: cosine(keys[i], before[slot][0]))
            gate = 1 + torch.nn.functional.elu(weigh @ keys[i])
            key, value, *lengths = slots[best]
            slots[best] = (key + gate * keys[i], value + gate * values[i], *lengths)


def cosine(a, b):
    return float((a @ b / a.norm() / b.norm()).detach())
