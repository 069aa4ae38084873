"""A stream that keeps raw tokens near the sample points, one token and one point at a time."""

import numpy as np
import torch

from elastic_memory import sampling
from tests.oracles.elastic import both, tokens_of
from tests.oracles.parts import local


def layer(layer, x, memory):
    outputs, size = [], layer.config.block_size
    kept, (_, all_keys, all_values) = [], layer.qkv(x)
    for start in range(0, len(x), size):
        block = x[start : start + size]
        query, key, value = layer.qkv(block)
        if start == 0:
            mixed = local(layer, query, key, value)
        else:
            mass = tokens_of([(token + 0.5) / start for token in kept], start) if memory.adds_score else None
            remembered = all_keys[:, kept], all_values[:, kept]
            mixed = both(layer, memory, query, remembered, (key, value), mass)
        outputs.append(layer.finish(block, mixed))
        kept = keep(kept + list(range(start, start + len(block))), memory.rule, start + len(block))
    return torch.cat(outputs)


def keep(candidates, rule, seen):
    """Those of the candidates, tokens of a history of `seen`, that stay."""
    if len(candidates) <= rule.order:
        return candidates
    points = sampling.sample_points(rule.sampling, rule.order, seen, **dict(rule.options))
    middles = sorted((points if points.ndim == 1 else points.mean(1)).tolist())
    # A token lasts from its number to the next; of two equally near, the older. In float32, as ties are decided there.
    targets = [np.float32((u - 1) * seen) for u in middles]
    wanted = [
        min(range(len(candidates)), key=lambda i: abs(np.float32(candidates[i] + 0.5 - seen) - u)) for u in targets
    ]
    count = len(wanted)
    back, on = list(wanted), list(wanted)
    for i in reversed(range(count - 1)):
        back[i] = min(back[i], back[i + 1] - 1)
    for i in range(1, count):
        on[i] = max(on[i], on[i - 1] + 1)
    halfway = [(a + b - 2 * i) // 2 + i for i, (a, b) in enumerate(zip(back, on, strict=True))]
    return [candidates[min(max(place, i), len(candidates) - count + i)] for i, place in enumerate(halfway)]
