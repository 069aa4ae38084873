"""What a layer takes over from Hugging Face (norms, projections, MLP), with a memory beside its attention.

Whole samples (`layer.py`, Algorithm 1) and streams (`streaming/layer_cache.py`) call the same parts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from elastic_memory.attention import blended, masked, multiple_of_8, trapezoidal, with_score
from elastic_memory.memory import Memory, Reading
from elastic_memory.memory.contract import Heads
from elastic_memory.model.locality import Locality
from elastic_memory.model.rope import Rope
from elastic_memory.shapes import Bool, Float, Tensor

Hidden = Float[Tensor, "batch token width"]


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

    def probed(self, key: Heads, value: Heads) -> tuple[Heads, Heads]:
        """The block's own keys and values, as attention gets to see them."""
        return (key, value) if self.corrupt is None else self.corrupt(key, value)

    def prepend(self, reading: Reading | None, key: Heads, value: Heads) -> tuple[Heads, Heads]:
        """Memory tokens in front of the block's own, if this memory shares the softmax."""
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
        """Attention of a block and what memory adds to it; `key` and `value`: all columns, memory's in front."""
        local = self.attend(rotated, key, value, mask, reading, query)
        if not reading or self.memory.shares_softmax:
            return local
        return self.blend(local, self.memory.mix(local, query, rotated, reading, visible))

    def attend(
        self,
        rotated: Heads,
        key: Heads,
        value: Heads,
        mask: Bool[Tensor, "*rows query key"] | None = None,
        reading: Reading | None = None,
        query: Heads | None = None,
    ) -> Heads:
        """Softmax attention; without a mask the queries are the last of the keys' tokens.

        `reading`: what stands in front, if it is memory's; `query`: before rotary positions, if memory wants them so.
        """
        if not reading or not self.memory.shares_softmax:
            return self.softmax(rotated, key, value, mask)
        mixed = self.joint(rotated, key, value, mask, reading, query)
        if self.memory.blend is None:
            return mixed
        columns = reading[0].shape[2]
        own = None if mask is None else mask[..., columns:]
        return self.blend(self.softmax(rotated, key[:, :, columns:], value[:, :, columns:], own), mixed)

    def joint(
        self,
        rotated: Heads,
        key: Heads,
        value: Heads,
        mask: Bool[Tensor, "*rows query key"] | None,
        reading: Reading,
        query: Heads | None,
    ) -> Heads:
        """One softmax over memory's columns, scored in memory's own way, and the block's."""
        if self.scores_alike:
            return self.softmax(rotated, key, value, mask)
        columns, dim = reading[0].shape[2], value.shape[-1]
        known, own = key[:, :, :columns], key[:, :, columns:]
        looking, known = self.looking(rotated, query, known, reading)
        if self.memory.raw_queries:  # [rotated, raw] meet [own, 0] and [0, known]
            known, looking = nn.functional.pad(known, (dim, 0)), torch.cat((rotated, looking), dim=-1)
        key = torch.cat((known, nn.functional.pad(own, (0, known.shape[-1] - dim))), dim=2)
        looking, key, value = multiple_of_8(looking, key, value)
        return self.softmax(looking, key, value, mask)[..., :dim]

    def looking(self, rotated: Heads, query: Heads | None, known: Heads, reading: Reading) -> tuple[Tensor, Tensor]:
        """Queries for memory's columns and their keys, whose products are scores with all that memory adds to them."""
        asking = query if query is not None and self.memory.raw_queries else rotated
        return with_score(asking, known, self.scaling, reading[2]) if self.memory.adds_score else (asking, known)

    def softmax(self, rotated: Heads, key: Heads, value: Heads, mask: Bool[Tensor, "*rows query key"] | None) -> Heads:
        """Attention to all columns alike."""
        if mask is None:
            return trapezoidal(rotated, key, value, self.scaling)
        return masked(rotated, key, value, mask, self.scaling)

    @property
    def scores_alike(self) -> bool:
        """Whether memory's columns in the block's softmax are scored as the block's own."""
        return not self.memory.adds_score and not self.memory.raw_queries

    def blend(self, local: Tensor, mixed: Tensor) -> Tensor:
        """Between attention without memory and with it, as far as the memory has been blended in."""
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
        self.window = locality.window + memory.widens if locality.sliding else None  # tokens that a token sees
        self._holders = [part for part in memory.modules() if list(part.parameters(recurse=False))]

    @property
    def memory(self) -> Memory:
        """The mechanism of this layer."""
        return self.self_attn.memory

    def forward(self, hidden: Hidden, rope: Any = None, step: Callable | None = None) -> Hidden:
        """All blocks of whole samples; in a stream `step(layer, hidden)` instead, by the layer's cache."""
        fetched = self.fetch()
        output = self.blocks(hidden, rope) if step is None else step(self, hidden)
        self.put_back(fetched)
        return output

    def blocks(self, hidden: Hidden, rope: Rope) -> Hidden:
        """Whole samples."""
        raise NotImplementedError

    def finish(self, hidden: Hidden, mixed: Heads) -> Hidden:
        """What follows on attention: its output projection and the MLP, each added to the residual stream."""
        hidden = hidden + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def fetch(self) -> list[Any]:
        """Fetch the memory's parameters, if accelerate keeps them elsewhere: it does so itself for what is called."""
        hooked = [part for part in self._holders if hasattr(part, "_hf_hook")]
        for part in hooked:
            part._hf_hook.pre_forward(part)
        return hooked

    def put_back(self, fetched: list[Any]) -> None:
        """Undo `fetch`."""
        for part in fetched:
            part._hf_hook.post_forward(part, None)
