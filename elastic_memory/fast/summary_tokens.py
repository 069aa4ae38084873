"""A block and the memory and summary tokens before and behind it in one pass through the layer, not three."""

from typing import Any

import torch

from elastic_memory.memory import Block, State, SummaryTokenMemory
from elastic_memory.model.rope import PADDING, Rope
from elastic_memory.shapes import Float, Tensor


def supports(layer: Any) -> bool:
    """Whether the memory has such tokens; not with `corrupt`, which must change the block's keys and values only."""
    return isinstance(layer.memory, SummaryTokenMemory) and layer.self_attn.corrupt is None


def one_block(
    layer: Any,
    tokens: Float[Tensor, "batch token width"],
    rope: Rope,
    state: State,
    seen: int,
    reads: bool,
    writes: bool,
) -> tuple[Float[Tensor, "batch token width"], State]:
    """`MemoryLayer.one_block`, padded to a multiple of 32 tokens to keep 128-byte alignment."""
    attention, memory, size = layer.self_attn, layer.memory, tokens.shape[1]
    front, tail = memory.front(state) if reads else None, layer.tail(tokens) if writes else None
    before, behind = (0 if part is None else part.shape[1] for part in (front, tail))
    if before or behind:  # padding at the end, which no token sees
        unused = tokens.new_zeros(len(tokens), -(before + size + behind) % PADDING, tokens.shape[2])
        parts = [part for part in (front, tokens, tail, unused) if part is not None]
        tokens = torch.cat([part.to(tokens.dtype) for part in parts], dim=1)
    query, key, value = attention.project(layer.input_layernorm(tokens))
    columns = rope.inside(query, before), rope.inside(key, before), value
    mixed = attention.softmax(*columns, None)
    if before and memory.blend is not None:
        local = attention.softmax(*(x[:, :, before:] for x in columns), None)
        mixed = torch.cat((mixed[:, :, :before], attention.blend(local, mixed[:, :, before:])), dim=2)
    # The front is not needed any more, except for the few tokens that keep the rest aligned.
    first = before % PADDING
    output = layer.finish(tokens[:, before - first :], mixed[:, :, before - first :])
    output, tail = output[:, first : first + size], output[:, first + size : first + size + behind]
    if writes:
        key, value = (x[:, :, before : before + size] for x in (key, value))
        state = memory.write(state, Block(key, value, output, tail), seen)
    return output, state
