"""A decoder layer that attends inside blocks and carries a memory between them.

It takes over the parts of a Hugging Face layer of the Llama kind (norms, projections, MLP) and replaces what its
attention does. Two roads through it agree to rounding: all blocks of a sample at once, and a stream, some tokens at a
time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from elastic_memory.attention import masked, rotate, trapezoidal, window_mask
from elastic_memory.memory import Block, Host, Memory, Reading, State
from elastic_memory.memory.contract import constant
from elastic_memory.model.rope import Heads, Rope
from elastic_memory.shapes import Bool, Float, Int, Tensor

Blocks = Float[Tensor, "batch block head token dim"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of a module
ALIGNED = 32  # tokens: numbers of each then fill 128 bytes, and nothing is copied to begin at such a border


@dataclass(frozen=True)
class Locality:
    """What a token sees without memory: its `block`, the newest `block_size` tokens (`sliding`), or all (`full`)."""

    kind: str
    block_size: int

    @property
    def sliding(self) -> bool:
        """Whether the previous block is looked at too."""
        return self.kind == "sliding"

    def span(self, length: int) -> int:
        """Block length for a sample of `length` tokens."""
        return length if self.kind == "full" else min(self.block_size, length)


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

    def remember_all(self, local: Blocks, query: Blocks, rotated: Blocks, readings: Sequence[Reading]) -> Blocks:
        """`remember` for all blocks of a sample; readings of one size go together."""
        mixed = self.memory.mix_all(local, query, readings)
        if mixed is not None:
            return mixed
        parts = []
        for first, last, reading in _spans(query.shape[1], readings, apart=True):
            own, raw, turned = (x[:, first:last].flatten(0, 1) for x in (local, query, rotated))
            parts.append(self.remember(own, raw, turned, reading).unflatten(0, (-1, last - first)))
        return _joined(parts)

    def probed(self, key: Heads, value: Heads) -> tuple[Heads, Heads]:
        """The block's own keys and values, as attention gets to see them."""
        return (key, value) if self.corrupt is None else self.corrupt(key, value)

    def prepend(self, reading: Reading | None, key: Heads, value: Heads) -> tuple[Heads, Heads]:
        """Memory tokens in front of the block's own, if this memory shares the softmax."""
        if not reading or not self.memory.shares_softmax:
            return key, value
        return torch.cat((reading[0].to(key.dtype), key), 2), torch.cat((reading[1].to(value.dtype), value), 2)


class _Twice(torch.autograd.Function):
    """What attention and memory both use. Its gradients are added with tokens first, as projections want them.

    Left to itself, a compiler writes the sum with heads first, and then copies it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Heads) -> tuple[Heads, Heads]:
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, one: Heads | None, other: Heads | None) -> Heads | None:  # type: ignore[override]
        if one is None or other is None:
            return one if other is None else other
        return (one.transpose(1, 2) + other.transpose(1, 2)).transpose(1, 2)


class MemoryLayer(GradientCheckpointingLayer):
    """Pre-norm decoder layer: attention with memory, then the MLP."""

    def __init__(self, layer: Any, memory: Memory, locality: Locality):
        super().__init__()
        self.self_attn = MemoryAttention(layer.self_attn, memory)
        self.mlp = layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.locality = locality
        self._holders = [part for part in memory.modules() if part._parameters]

    @property
    def memory(self) -> Memory:
        """The mechanism of this layer."""
        return self.self_attn.memory

    def forward(
        self, hidden: Float[Tensor, "batch token width"], rope: Any = None, step: Callable | None = None
    ) -> Float[Tensor, "batch token width"]:
        """All blocks of whole samples; in a stream `step(layer, hidden)` instead, by the layer's cache."""
        fetched = self.fetch()
        output = self.blocks(hidden, rope) if step is None else step(self, hidden)
        self.put_back(fetched)
        return output

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

    def blocks(self, hidden: Float[Tensor, "batch token width"], rope: Rope) -> Float[Tensor, "batch token width"]:
        """Whole samples, all blocks at once where the mechanism allows it."""
        return self._all_blocks(hidden, rope) if self.memory.parallel else self._block_by_block(hidden, rope)

    def span(self, length: int) -> tuple[int, int]:
        """Positions in a sample of `length` tokens: before a block, and from its beginning on, those behind it too."""
        size, memory = self.locality.span(length), self.memory
        if memory.parallel:
            return 0, size
        tail = memory.tail()
        return memory.front_size, size + (0 if tail is None else len(tail)) + ALIGNED

    def host(self, rope: Rope) -> Host:
        """This layer, as its memory sees it."""

        def project(tokens: Float[Tensor, "batch token width"]) -> tuple[Heads, Heads]:
            _, key, value = self.self_attn.project(self.input_layernorm(tokens.to(self.input_layernorm.weight.dtype)))
            return key, value

        return Host(rope, project)

    def finish(self, hidden: Tensor, mixed: Heads) -> Tensor:
        """What follows on attention: its output projection and the MLP, each added to the residual stream."""
        hidden = hidden + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def _all_blocks(self, hidden: Tensor, rope: Rope) -> Tensor:
        query, key, value = self.self_attn.project(self.input_layernorm(hidden))
        read_key, read_value = key, value
        if self.memory.reads:
            (key, read_key), (value, read_value) = _Twice.apply(key), _Twice.apply(value)
        readings = self.memory.read_all(read_key, read_value, self.host(rope))
        return self.attend_blocks(hidden, rope, (query, key, value), readings)

    def attend_blocks(
        self, hidden: Tensor, rope: Rope, heads: tuple[Heads, Heads, Heads], readings: Sequence[Reading]
    ) -> Tensor:
        """The layer's output, given queries, keys and values of all blocks and what each block reads from memory."""
        attention, length = self.self_attn, hidden.shape[1]
        size = self.locality.span(length)
        query, key, value = heads
        apart = len(readings) > 0 and not attention.memory.shares_softmax
        query, raw = _Twice.apply(query) if apart else (query, None)

        # A last block that is short is filled up with zeros, which no earlier token can see.
        query, key, value = (_fold(x, size) for x in (query, key, value))
        rotated, rotated_key = (rope.inside(x.flatten(0, 1)).unflatten(0, x.shape[:2]) for x in (query, key))
        previous = None
        if self.locality.sliding:
            positions = torch.arange(-size, 0, device=hidden.device)
            previous = rope(key.flatten(0, 1), positions).unflatten(0, key.shape[:2])

        local = []
        in_front = readings if attention.memory.shares_softmax else []
        for first, last, reading in _spans(query.shape[1], in_front, apart=len(in_front) > 0 or self.locality.sliding):
            turned, *window = (x[:, first:last].flatten(0, 1) for x in (rotated, rotated_key, value))
            mask = None
            if previous is not None and first > 0:
                before = [x[:, first - 1 : last - 1].flatten(0, 1) for x in (previous, value)]
                window = [torch.cat(pair, dim=2) for pair in zip(before, window, strict=True)]
            columns = attention.prepend(reading, *attention.probed(*window))
            if previous is not None:
                front = columns[0].shape[2] - window[0].shape[2]
                mask = window_mask(size, window[0].shape[2] - size, size, hidden.device)
                mask = torch.cat((mask.new_ones(size, front), mask), dim=1)
            local.append(attention.attend(turned, *columns, mask).unflatten(0, (-1, last - first)))
        mixed = _joined(local)
        if raw is not None:
            mixed = attention.remember_all(mixed, _fold(raw, size), rotated, readings)
        # [batch, block, head, token, dim] -> [batch, head, token, dim]
        return self.finish(hidden, mixed.transpose(1, 2).flatten(2, 3)[:, :, :length])

    def _block_by_block(self, hidden: Tensor, rope: Rope) -> Tensor:
        memory, outputs, size = self.memory, [], self.locality.block_size
        state = memory.start(hidden.shape[0], hidden.device)
        for index, tokens in enumerate(hidden.split(size, dim=1)):
            reads, writes = index > 0 or memory.reads_start, (index + 1) * size < hidden.shape[1]
            output, state = self.one_block(tokens, rope, memory.cut(state, index), index * size, reads, writes)
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    def one_block(
        self, tokens: Tensor, rope: Rope, state: State, seen: int, reads: bool, writes: bool
    ) -> tuple[Tensor, State]:
        """A block of a memory whose state depends on what leaves the layer: its output, and the state after it."""
        attention, size = self.self_attn, tokens.shape[1]
        tail = self.tail(tokens) if writes else None
        if attention.corrupt is not None:
            return self._probed_block(tokens, tail, rope, state, seen, reads, writes)
        # What stands before and behind the block goes through the layer with it.
        front = self.memory.front(state) if reads else None
        reading = self.memory.read(state, seen, self.host(rope)) if reads and front is None else None
        before, behind = (0 if part is None else part.shape[1] for part in (front, tail))
        if before or behind:  # filled up at the end, where nobody looks
            unused = tokens.new_zeros(len(tokens), -(before + size + behind) % ALIGNED, tokens.shape[2])
            parts = [part for part in (front, tokens, tail, unused) if part is not None]
            tokens = torch.cat([part.to(tokens.dtype) for part in parts], dim=1)
        query, key, value = attention.project(self.input_layernorm(tokens))
        columns = attention.prepend(reading, rope.inside(key, before), value)
        mixed = attention.mix(query, rope.inside(query, before), *columns, reading)
        # Of the front nothing more is wanted, but what is left of it has to be aligned too.
        first = before % ALIGNED
        output = self.finish(tokens[:, before - first :], mixed[:, :, before - first :])
        output, tail = output[:, first : first + size], output[:, first + size : first + size + behind]
        if writes:
            key, value = (x[:, :, before : before + size] for x in (key, value))
            state = self.memory.write(state, Block(key, value, output, tail if behind else None), seen)
        return output, state

    def _probed_block(
        self, tokens: Tensor, tail: Tensor | None, rope: Rope, state: State, seen: int, reads: bool, writes: bool
    ) -> tuple[Tensor, State]:
        """`one_block`, where the block's tokens see its own keys and values through a probe, and the tail without."""
        attention = self.self_attn
        reading = self.memory.read(state, seen, self.host(rope)) if reads else None
        query, key, value = attention.project(self.input_layernorm(tokens))
        clean = rope.inside(key), value
        probed = attention.prepend(reading, *attention.probed(*clean))
        output = self.finish(tokens, attention.mix(query, rope.inside(query), *probed, reading))
        if tail is not None:
            tail = self.behind(tail, rope, attention.prepend(reading, *clean), reading, tokens.shape[1])
        if writes:
            state = self.memory.write(state, Block(key, value, output, tail), seen)
        return output, state

    def tail(self, like: Float[Tensor, "batch token width"]) -> Float[Tensor, "batch tail width"] | None:
        """The memory's tail, for each row."""
        tail = self.memory.tail()
        return None if tail is None else tail.to(like.dtype).expand(len(like), -1, -1)

    def behind(
        self, tokens: Tensor, rope: Rope, local: tuple[Heads, Heads], reading: Reading | None, length: int
    ) -> Float[Tensor, "batch token width"]:
        """Run further tokens through the layer behind a block of `length` tokens, whose columns are `local`."""
        positions = torch.arange(length, length + tokens.shape[1], device=tokens.device)
        query, key, value = self.self_attn.project(self.input_layernorm(tokens))
        columns = torch.cat((local[0], rope(key, positions)), 2), torch.cat((local[1], value), 2)
        return self.finish(tokens, self.self_attn.mix(query, rope(query, positions), *columns, reading))

    def decode(
        self,
        hidden: Float[Tensor, "batch 1 width"],
        rope: tuple[Tensor, Tensor],
        positions: Int[Tensor, "batch 1"],
        columns: Int[Tensor, "batch 1"],
        buffers: dict[str, Tensor],
        mask: Float[Tensor, "batch 1 1 column"],
        reading: Reading | None,
        visible: Bool[Tensor, "batch column"] | None,
    ) -> Float[Tensor, "batch 1 width"]:
        """One token of each row, on buffers with room for a whole block: tensors in, tensors out, no Python state.

        `columns` are the rows' positions behind the front; `mask` is added to attention's scores.
        """
        query, key, value, rotated, rotated_key = self.before_attention(hidden, rope)
        for name, new, place in (("key", rotated_key, columns), ("value", value, columns), ("raw", key, positions)):
            if name in buffers:
                buffers[name].scatter_(2, place[:, None, :, None].expand_as(new), new.to(buffers[name].dtype))
        known, held = (buffers[name][:, :, : mask.shape[-1]] for name in ("key", "value"))
        output = self.after_attention(hidden, self.self_attn.mix(query, rotated, known, held, reading, mask, visible))
        if "output" in buffers:
            kept = output.to(buffers["output"].dtype)
            buffers["output"].scatter_(1, positions[:, :, None].expand_as(kept), kept)
        return output

    def before_attention(
        self, hidden: Float[Tensor, "batch 1 width"], rope: tuple[Tensor, Tensor]
    ) -> tuple[Heads, Heads, Heads, Heads, Heads]:
        """Query, key and value of a token to decode, and query and key rotated."""
        query, key, value = self.self_attn.project(self.input_layernorm(hidden))
        rotated, rotated_key = (rotate(x, *rope).to(x.dtype) for x in (query, key))
        return query, key, value, rotated, rotated_key

    def after_attention(self, hidden: Float[Tensor, "batch 1 width"], mixed: Heads) -> Float[Tensor, "batch 1 width"]:
        """What follows on a decoded token's attention."""
        return self.finish(hidden, mixed)


def _fold(x: Heads, size: int) -> Float[Tensor, "batch block head size dim"]:
    """Cut the tokens into blocks; no copy when they fill them."""
    x = x.transpose(1, 2)
    short = -x.shape[1] % size
    if short:
        x = nn.functional.pad(x, (0, 0, 0, 0, 0, short))
    return x.unflatten(1, (-1, size)).transpose(2, 3)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _spans(blocks: int, readings: Any, apart: bool) -> list[tuple[int, int, Reading | None]]:
    """Neighbouring blocks whose readings have one size, to be attended in one call: (first, last, their readings)."""
    if not apart:
        return [(0, blocks, None)]
    # Block 0 stands apart: no block came before it, and it has a reading only if the memory `reads_start`.
    start, readings = (readings[0], readings[1:]) if len(readings) == blocks else (None, readings)
    spans: list[tuple[int, int, Reading | None]] = [(0, 1, start)]
    if not readings and blocks > 1:
        return [*spans, (1, blocks, None)]
    for _, group in groupby(readings, key=lambda reading: constant(reading[0].shape[2])):
        together = list(group)
        first = spans[-1][1]
        stacked = tuple(torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*together, strict=True))
        spans.append((first, first + len(together), stacked))
    return spans
