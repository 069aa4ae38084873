"""All blocks of a sample at once: their readings, then their attention.

The result is that of `MemoryLayer.one_block`, block after block. Blocks are an axis of their own, [batch, block, head,
token, dim]; for attention, blocks with equally many columns in front of them become rows of one batch.
"""

from collections.abc import Sequence

import torch
from torch import nn

from elastic_memory.attention import used_twice, window_mask
from elastic_memory.common.speedups import find
from elastic_memory.memory import Host, ParallelMemory, Reading
from elastic_memory.memory.contract import Blocks, Heads
from elastic_memory.memory.tools import group_by_size
from elastic_memory.model.decoder_layer import DecoderLayer
from elastic_memory.model.locality import Locality
from elastic_memory.model.rope import Rope

windows = find("windows")


def read(memory: ParallelMemory, locality: Locality, key: Heads, value: Heads, host: Host) -> Sequence[Reading]:
    """The readings of the last blocks of a sample; memory lags behind a window of several blocks."""
    lag = locality.lag
    if not lag:
        return memory.read_all(key, value, host)
    blocks, written = -(-key.shape[2] // locality.block_size), max(key.shape[2] - lag, 1)
    readings = memory.read_all(key[:, :, :written], value[:, :, :written], host)
    if memory.reads_start:  # blocks before anything has left the window read the empty state
        return [readings[0]] * (blocks - len(readings)) + list(readings)
    return readings


def attend(
    layer: DecoderLayer, rope: Rope, query: Heads, key: Heads, value: Heads, readings: Sequence[Reading]
) -> Heads:
    """`MemoryAttention.mix` for all blocks; `readings` are those of the last blocks, earlier ones have none."""
    attention, memory, length = layer.self_attn, layer.memory, query.shape[2]
    outside = len(readings) > 0 and not memory.shares_softmax
    joining = [] if outside else readings
    query, raw = used_twice(query) if outside or memory.raw_queries else (query, None)
    size = layer.locality.block_length(length)
    query, key, value = (_split(x, size) for x in (query, key, value))
    raw = None if raw is None else _split(raw, size)
    without_masks = layer.window is not None and attention.corrupt is None and windows is not None
    if without_masks and windows.supports(query, key):
        rotated = _rotate(rope, query) if len(readings) > 0 else query  # only memory needs positions inside blocks
        mixed = _slide(layer, rope, query, key, value, rotated, raw, joining)
    else:
        rotated = _rotate(rope, query)
        mixed = _in_groups(layer, rope, rotated, key, value, raw, joining)
    if outside:
        mixed = attention.blend(mixed, memory.mix_all(mixed, raw, rotated, readings))
    # [batch, block, head, token, dim] -> [batch, head, token, dim]
    return mixed.transpose(1, 2).flatten(2, 3)[:, :, :length]


def _in_groups(
    layer: DecoderLayer,
    rope: Rope,
    rotated: Blocks,
    key: Blocks,
    value: Blocks,
    raw: Blocks | None,
    readings: Sequence[Reading],
) -> Blocks:
    """Attention of each block to its reading, to the window before it if attention slides, and to itself."""
    attention, window, size, parts = layer.self_attn, layer.window, key.shape[3], []
    rotated_key = _rotate(rope, key)
    alone = int(len(readings) > 0) if window is None else -(-window // size)
    for first, last, reading in group_by_size(rotated.shape[1], readings, alone):
        own_query, own_key, own_value = (x[:, first:last].flatten(0, 1) for x in (rotated, rotated_key, value))
        unrotated = None if raw is None else raw[:, first:last].flatten(0, 1)
        local, mask = attention.corrupted(own_key, own_value), None
        if window is not None and first > 0:
            before = _windows_before(rope, key, value, window, first, last)
            local = torch.cat((before[0], local[0]), 2), torch.cat((before[1], local[1]), 2)
        columns = attention.prepend(reading, *local)
        if window is not None:
            count = local[0].shape[2]
            mask = window_mask(size, count - size, window, rotated.device, columns[0].shape[2] - count)
        mixed = attention.attend(own_query, *columns, mask, reading, unrotated)
        parts.append(mixed.unflatten(0, (-1, last - first)))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _windows_before(rope: Rope, key: Blocks, value: Blocks, window: int, first: int, last: int) -> tuple[Heads, Heads]:
    """Rotated keys and values of the window before each of blocks `first` to `last - 1`, as rows of one batch."""
    size = key.shape[3]
    count = min(first * size, window)
    # [batch, head, token, dim] -> windows [batch, head, block, dim, token], each moved on by a block
    key, value = (
        _joined(x)[:, :, first * size - count : (last - 1) * size]
        .unfold(2, count, size)
        .permute(0, 2, 1, 4, 3)
        .flatten(0, 1)
        for x in (key, value)
    )
    return rope(key, torch.arange(-count, 0, device=key.device)), value


def _slide(
    layer: DecoderLayer,
    rope: Rope,
    query: Blocks,
    key: Blocks,
    value: Blocks,
    rotated: Blocks,
    raw: Blocks | None,
    readings: Sequence[Reading],
) -> Blocks:
    """Sliding attention without masks: the window and memory's columns are two parts of one softmax."""
    attention, parts = layer.self_attn, []
    for first, last, reading in group_by_size(query.shape[1], readings, alone=0):
        if reading:
            memory_key, memory_value = (part.to(value.dtype) for part in reading[:2])
            own_query, unrotated = (x if x is None else x[:, first:last].flatten(0, 1) for x in (rotated, raw))
            own_query, memory_key = attention.memory_query_key(own_query, unrotated, memory_key, reading)
            parts.append((own_query, memory_key, memory_value))
    whole = rope.inside(_joined(query)), rope.inside(_joined(key)), _joined(value)
    mixed = windows.attend(*whole, layer.window, attention.scaling, parts)
    if parts and layer.memory.blend is not None:
        mixed = attention.blend(windows.attend(*whole, layer.window, attention.scaling, []), mixed)
    return _split(mixed, query.shape[3])


def _split(x: Heads, size: int) -> Blocks:
    """Cut the tokens into blocks, the last padded with zeros behind its tokens. No copy if all blocks are full."""
    x = x.transpose(1, 2)
    short = -x.shape[1] % size
    if short:
        x = nn.functional.pad(x, (0, 0, 0, 0, 0, short))
    return x.unflatten(1, (-1, size)).transpose(2, 3)


def _joined(x: Blocks) -> Heads:
    """The tokens of all blocks in sequence, padding included: a view of what `_split` returns."""
    return x.transpose(2, 3).flatten(1, 2).transpose(1, 2)


def _rotate(rope: Rope, x: Blocks) -> Blocks:
    """Rotate each block by positions 0, 1, ... inside it."""
    return rope.inside(x.flatten(0, 1)).unflatten(0, x.shape[:2])
