"""Attention inside a block, with what its memory reads in front of it or beside it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from elastic_memory.attention import masked, trapezoidal, window_mask
from elastic_memory.memory import Memory, Reading
from elastic_memory.memory.contract import Blocks
from elastic_memory.memory.tools import group_by_size
from elastic_memory.model.rope import Heads
from elastic_memory.shapes import Bool, Float, Tensor


class MemoryAttention(nn.Module):
    """The projections of a Llama-like attention, and the memory beside them."""

    def __init__(self, attention: Any, memory: Memory):
        super().__init__()
        for name, child in attention.named_children():
            self.add_module(name, child)
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.memory = memory
        # A probe: replaces the block's own keys and values in attention; memory is written from the clean ones.
        self.corrupt: Callable[[Heads, Heads], tuple[Heads, Heads]] | None = None

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "a hook on self_attn would never run, as its layer calls only its parts: "
            "hook the layer, or q_proj, k_proj, v_proj or o_proj"
        )

    register_forward_hook = register_forward_pre_hook = register_backward_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = _refuse_hook

    def project(self, hidden: Float[Tensor, "batch token width"]) -> tuple[Heads, Heads, Heads]:
        """Queries, keys and values before rotary positions."""
        query, key, value = (
            project(hidden).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if self.memory.prepare is not None:
            query, key = self.memory.prepare(query, key)
        return query, key, value

    def mix(
        self,
        query: Heads,
        rotated: Heads,
        key: Heads,
        value: Heads,
        reading: Reading | None,
        mask: Bool[Tensor, "*rows query key"] | None = None,
        visible: Bool[Tensor, "batch column"] | None = None,
    ) -> Heads:
        """Attention of a block: `key` and `value` are all its columns, those of memory in front included."""
        return self.remember(self.attend(rotated, key, value, mask), query, rotated, reading, visible)

    def attend(
        self, rotated: Heads, key: Heads, value: Heads, mask: Bool[Tensor, "*rows query key"] | None = None
    ) -> Heads:
        """Softmax attention; without a mask the queries are the last of the keys' tokens."""
        if mask is None:
            return trapezoidal(rotated, key, value, self.scaling)
        return masked(rotated, key, value, mask, self.scaling)

    def remember(
        self,
        local: Heads,
        query: Heads,
        rotated: Heads,
        reading: Reading | None,
        visible: Bool[Tensor, "batch column"] | None = None,
    ) -> Heads:
        """What a memory outside the block's softmax adds to the block's own attention."""
        if not reading or self.memory.shares_softmax:
            return local
        return self.memory.mix(local, query, rotated, reading, visible)

    def attend_blocks(
        self,
        rotated: Blocks,
        key: Blocks,
        value: Blocks,
        readings: Sequence[Reading],
        previous: Blocks | None = None,
    ) -> Blocks:
        """`attend` for all blocks of a sample; blocks with as many columns in front go together.

        In front of a block stands its reading, and with sliding attention the block before it, whose keys at their
        positions before this block are `previous`.
        """
        blocks, size, parts = rotated.shape[1], rotated.shape[3], []
        alone = len(readings) > 0 or previous is not None  # block 0 has less in front than the others
        for first, last, reading in group_by_size(blocks, readings) if alone else [(0, blocks, None)]:
            query, *window = (x[:, first:last].flatten(0, 1) for x in (rotated, key, value))
            mask = None
            if previous is not None and first > 0:
                before = [x[:, first - 1 : last - 1].flatten(0, 1) for x in (previous, value)]
                window = [torch.cat(pair, dim=2) for pair in zip(before, window, strict=True)]
            columns = self.prepend(reading, *self.probed(*window))
            if previous is not None:
                front = columns[0].shape[2] - window[0].shape[2]
                mask = window_mask(size, window[0].shape[2] - size, size, rotated.device)
                mask = torch.cat((mask.new_ones(size, front), mask), dim=1)
            parts.append(self.attend(query, *columns, mask).unflatten(0, (-1, last - first)))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def probed(self, key: Heads, value: Heads) -> tuple[Heads, Heads]:
        """The block's own keys and values, as attention gets to see them."""
        return (key, value) if self.corrupt is None else self.corrupt(key, value)

    def prepend(self, reading: Reading | None, key: Heads, value: Heads) -> tuple[Heads, Heads]:
        """Memory tokens in front of the block's own, if this memory shares the softmax."""
        if not reading or not self.memory.shares_softmax:
            return key, value
        return torch.cat((reading[0].to(key.dtype), key), 2), torch.cat((reading[1].to(value.dtype), value), 2)
