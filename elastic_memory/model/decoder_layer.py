"""A Hugging Face decoder layer (norms, projections, MLP) whose attention also uses a memory.

Whole samples (`layer.py`, Algorithm 1) and streams (`streaming/layer_cache.py`) call the same methods.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from elastic_memory.attention import blended, masked, pad_to_multiple_of_8, trapezoidal, with_score
from elastic_memory.memory import Memory, Reading
from elastic_memory.memory.contract import Heads
from elastic_memory.model.locality import Locality
from elastic_memory.model.rope import Rope
from elastic_memory.shapes import Bool, Float, Tensor

Hidden = Float[Tensor, "batch token width"]


class MemoryAttention(nn.Module):
    """The projections of a Llama-like attention, and attention to memory and block."""

    def __init__(self, attention: Any, memory: Memory):
        super().__init__()
        for name, child in attention.named_children():
            self.add_module(name, child)
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.memory = memory
        # A probe: replaces the block's keys and values in attention; memory is written from the clean ones.
        self.corrupt: Callable[[Heads, Heads], tuple[Heads, Heads]] | None = None

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "a hook on self_attn would never run, as its layer calls only its parts: "
            "hook the layer, or q_proj, k_proj, v_proj or o_proj"
        )

    register_forward_hook = register_forward_pre_hook = register_backward_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = _refuse_hook

    def project(self, hidden: Hidden) -> tuple[Heads, Heads, Heads]:
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

    def corrupted(self, key: Heads, value: Heads) -> tuple[Heads, Heads]:
        """The block's keys and values after `corrupt`, if that is set."""
        return (key, value) if self.corrupt is None else self.corrupt(key, value)

    def prepend(self, reading: Reading | None, key: Heads, value: Heads) -> tuple[Heads, Heads]:
        """Keys and values of memory, then of the block; the block's alone if the memory does not share the softmax."""
        if not reading or not self.memory.shares_softmax:
            return key, value
        return torch.cat((reading[0].to(key.dtype), key), 2), torch.cat((reading[1].to(value.dtype), value), 2)

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
        """Attention of a block, combined with its reading; `key` and `value` are what `prepend` returns."""
        local = self.attend(rotated, key, value, mask, reading, query)
        if not reading or self.memory.shares_softmax:
            return local
        return self.blend(local, self.memory.mix(local, query, rotated, reading, visible))

    def attend(
        self,
        rotated: Heads,
        key: Heads,
        value: Heads,
        mask: Bool[Tensor, "*rows query key"] | None,
        reading: Reading | None,
        query: Heads | None,
    ) -> Heads:
        """Softmax attention to memory's columns, if `prepend` added them, and the block's; causal without a mask.

        `query`: queries before rotary positions, for memories with `raw_queries`.
        """
        if not reading or not self.memory.shares_softmax:
            return self.softmax(rotated, key, value, mask)
        mixed = self.joint_softmax(rotated, key, value, mask, reading, query)
        if self.memory.blend is None:
            return mixed
        columns = reading[0].shape[2]
        own = None if mask is None else mask[..., columns:]
        return self.blend(self.softmax(rotated, key[:, :, columns:], value[:, :, columns:], own), mixed)

    def joint_softmax(
        self,
        rotated: Heads,
        key: Heads,
        value: Heads,
        mask: Bool[Tensor, "*rows query key"] | None,
        reading: Reading,
        query: Heads | None,
    ) -> Heads:
        """One softmax over memory's columns and the block's; the memory defines the scores of its own columns."""
        if self.plain_scores:
            return self.softmax(rotated, key, value, mask)
        columns, dim = reading[0].shape[2], value.shape[-1]
        memory_key, own = key[:, :, :columns], key[:, :, columns:]
        scored, memory_key = self.memory_query_key(rotated, query, memory_key, reading)
        if self.memory.raw_queries:  # queries [rotated, raw] for keys [own, 0] of the block and [0, key] of memory
            memory_key, scored = nn.functional.pad(memory_key, (dim, 0)), torch.cat((rotated, scored), dim=-1)
        key = torch.cat((memory_key, nn.functional.pad(own, (0, memory_key.shape[-1] - dim))), dim=2)
        scored, key, value = pad_to_multiple_of_8(scored, key, value)
        return self.softmax(scored, key, value, mask)[..., :dim]

    def memory_query_key(
        self, rotated: Heads, query: Heads | None, key: Heads, reading: Reading
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys whose scaled products are the scores of memory's columns, which have these keys."""
        chosen = query if query is not None and self.memory.raw_queries else rotated
        return with_score(chosen, key, self.scaling, reading[2]) if self.memory.adds_score else (chosen, key)

    def softmax(self, rotated: Heads, key: Heads, value: Heads, mask: Bool[Tensor, "*rows query key"] | None) -> Heads:
        """Plain softmax attention; causal without a mask."""
        if mask is None:
            return trapezoidal(rotated, key, value, self.scaling)
        return masked(rotated, key, value, mask, self.scaling)

    @property
    def plain_scores(self) -> bool:
        """Whether memory's columns in the block's softmax are scored like the block's own."""
        return not self.memory.adds_score and not self.memory.raw_queries

    def blend(self, local: Tensor, mixed: Tensor) -> Tensor:
        """local + blend (mixed - local), if the memory has a learned `blend`; else `mixed`."""
        return mixed if self.memory.blend is None else blended(local, mixed, self.memory.blend)


class DecoderLayer(GradientCheckpointingLayer):
    """A pre-norm decoder layer: attention with memory, then the MLP."""

    def __init__(self, layer: Any, memory: Memory, locality: Locality):
        super().__init__()
        self.self_attn = MemoryAttention(layer.self_attn, memory)
        self.mlp = layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.locality = locality
        # Tokens that a token sees; None: its block.
        self.window = locality.window + memory.widens if locality.sliding else None
        self._holders = [part for part in memory.modules() if list(part.parameters(recurse=False))]

    @property
    def memory(self) -> Memory:
        """The mechanism of this layer."""
        return self.self_attn.memory

    def forward(self, hidden: Hidden, rope: Any = None, step: Callable | None = None) -> Hidden:
        """The layer's output for whole samples; in a stream, that of `step(layer, hidden)`, a method of its cache."""
        fetched = self.fetch()
        output = self.blocks(hidden, rope) if step is None else step(self, hidden)
        self.put_back(fetched)
        return output

    def blocks(self, hidden: Hidden, rope: Rope) -> Hidden:
        """The layer's output for whole samples: `MemoryLayer`."""
        raise NotImplementedError

    def finish(self, hidden: Hidden, mixed: Heads) -> Hidden:
        """The layer's output, given its attention: output projection and MLP, each added to the residual stream."""
        hidden = hidden + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def fetch(self) -> list[Any]:
        """Load offloaded parameters of the memory: accelerate does so only for modules that are called."""
        hooked = [part for part in self._holders if hasattr(part, "_hf_hook")]
        for part in hooked:
            part._hf_hook.pre_forward(part)
        return hooked

    def put_back(self, fetched: list[Any]) -> None:
        """Offload again what `fetch` loaded."""
        for part in fetched:
            part._hf_hook.post_forward(part, None)
