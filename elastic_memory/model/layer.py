"""A decoder layer that attends inside blocks and carries a memory between them: Algorithm 1 of the paper.

It takes over the parts of a Hugging Face layer of the Llama kind (norms, projections, MLP) and replaces what its
attention does. A sample goes through it block by block (`one_block`); where the memory depends on keys and values only,
all blocks at once (`all_blocks`). Streams call the same parts (`streaming/`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from elastic_memory.attention import masked, multiple_of_8, trapezoidal, used_twice, window_mask, with_features
from elastic_memory.common.speedups import find
from elastic_memory.memory import Block, Host, Memory, ParallelMemory, Reading, State, SummaryTokenMemory
from elastic_memory.memory.contract import Blocks
from elastic_memory.memory.tools import group_by_size
from elastic_memory.model.locality import Locality
from elastic_memory.model.rope import PADDING, Heads, Rope
from elastic_memory.shapes import Bool, Float, Tensor

Hidden = Float[Tensor, "batch token width"]

fast, windows = find("summary_tokens"), find("windows")


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
        return self.remember(self.attend(rotated, key, value, mask, reading, query), query, rotated, reading, visible)

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
        if not reading or not self.memory.shares_softmax or self.scores_alike:
            return self._softmax(rotated, key, value, mask)
        columns, dim = reading[0].shape[2], value.shape[-1]
        known, own = key[:, :, :columns], key[:, :, columns:]
        looking, known = self.looking(rotated, query, known, reading)
        if self.memory.raw_queries:  # [rotated, raw] meet [own, 0] and [0, known]
            known, looking = nn.functional.pad(known, (dim, 0)), torch.cat((rotated, looking), dim=-1)
        key = torch.cat((known, nn.functional.pad(own, (0, known.shape[-1] - dim))), dim=2)
        looking, key, value = multiple_of_8(looking, key, value)
        return self._softmax(looking, key, value, mask)[..., :dim]

    def looking(self, rotated: Heads, query: Heads | None, known: Heads, reading: Reading) -> tuple[Tensor, Tensor]:
        """Queries for memory's columns and their keys, whose products are scores with all that memory adds to them."""
        asking = query if query is not None and self.memory.raw_queries else rotated
        score = reading[2] if self.memory.adds_score else None
        return with_features(asking, known, self.scaling, self.memory.gain, score)

    def _softmax(self, rotated: Heads, key: Heads, value: Heads, mask: Bool[Tensor, "*rows query key"] | None) -> Heads:
        if mask is None:
            return trapezoidal(rotated, key, value, self.scaling)
        return masked(rotated, key, value, mask, self.scaling)

    @property
    def scores_alike(self) -> bool:
        """Whether memory's columns in the block's softmax are scored as the block's own."""
        return self.memory.gain is None and not self.memory.adds_score and not self.memory.raw_queries

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
        return self.weighed(local, self.memory.mix(local, query, rotated, reading, visible))

    def weighed(self, local: Tensor, mixed: Tensor) -> Tensor:
        """What a memory outside the softmax made of the block's own attention, as far as its gain says."""
        if self.memory.gain is None:
            return mixed
        return (local + self.memory.gain.abs()[..., None, None] * (mixed - local)).to(mixed.dtype)

    def attend_blocks(
        self,
        rotated: Blocks,
        key: Blocks,
        value: Blocks,
        readings: Sequence[Reading],
        window: int | None = None,
        before: Callable[[int, int], tuple[Heads, Heads]] | None = None,
        raw: Blocks | None = None,
    ) -> Blocks:
        """`attend` for all blocks of a sample; blocks with as many columns in front go together.

        In front of a block stands its reading, and with sliding attention the tokens of a `window` before it:
        `before(first, last)` returns their keys, at their positions, and values for some blocks. `raw`: queries before
        rotary positions, if memory wants them so.
        """
        blocks, size, parts = rotated.shape[1], rotated.shape[3], []
        alone = int(len(readings) > 0) if window is None else -(-window // size)
        for first, last, reading in group_by_size(blocks, readings, alone):
            query, *own = (x[:, first:last].flatten(0, 1) for x in (rotated, key, value))
            own, mask = self.probed(*own), None
            if before is not None and first > 0:
                own = [torch.cat(pair, dim=2) for pair in zip(before(first, last), own, strict=True)]
            columns = self.prepend(reading, *own)
            if window is not None:
                front = columns[0].shape[2] - own[0].shape[2]
                mask = window_mask(size, own[0].shape[2] - size, window, rotated.device)
                mask = torch.cat((mask.new_ones(size, front), mask), dim=1)
            asking = None if raw is None else raw[:, first:last].flatten(0, 1)
            mixed = self.attend(query, *columns, mask, reading, asking)
            parts.append(mixed.unflatten(0, (-1, last - first)))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def slide_blocks(
        self,
        query: Heads,
        key: Heads,
        value: Heads,
        rotated: Blocks,
        readings: Sequence[Reading],
        window: int,
        raw: Blocks | None = None,
    ) -> Blocks:
        """`attend_blocks` under sliding attention without masks: the window in one softmax part, memory in another.

        `query` and `key` are at their positions in the sample, `rotated` are the queries at those in their blocks.
        """
        blocks, size = rotated.shape[1], rotated.shape[3]
        parts = []
        for first, last, reading in group_by_size(blocks, readings, alone=0):
            if reading:
                known, held = (part.to(value.dtype) for part in reading[:2])
                asking, unrotated = (x if x is None else x[:, first:last].flatten(0, 1) for x in (rotated, raw))
                if not self.scores_alike:
                    asking, known = self.looking(asking, unrotated, known, reading)
                parts.append((asking, known, held))
        return _split_blocks(windows.attend(query, key, value, window, self.scaling, parts), size)

    def probed(self, key: Heads, value: Heads) -> tuple[Heads, Heads]:
        """The block's own keys and values, as attention gets to see them."""
        return (key, value) if self.corrupt is None else self.corrupt(key, value)

    def prepend(self, reading: Reading | None, key: Heads, value: Heads) -> tuple[Heads, Heads]:
        """Memory tokens in front of the block's own, if this memory shares the softmax."""
        if not reading or not self.memory.shares_softmax:
            return key, value
        return torch.cat((reading[0].to(key.dtype), key), 2), torch.cat((reading[1].to(value.dtype), value), 2)


class MemoryLayer(GradientCheckpointingLayer):
    """Pre-norm decoder layer: attention with memory, then the MLP."""

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
        """Whole samples, all blocks at once where the mechanism allows it."""
        if isinstance(self.memory, ParallelMemory):
            return self.all_blocks(hidden, rope)
        outputs, size = [], self.locality.block_size
        state = self.memory.start(hidden.shape[0], hidden.device)
        for index, tokens in enumerate(hidden.split(size, dim=1)):
            reads, writes = index > 0 or self.memory.reads_start, (index + 1) * size < hidden.shape[1]
            output, state = self.one_block(tokens, rope, self.memory.cut(state, index), index * size, reads, writes)
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    def one_block(
        self, tokens: Hidden, rope: Rope, state: State, seen: int, reads: bool, writes: bool
    ) -> tuple[Hidden, State]:
        """One block: read the memory, attend, write. Its output, and the state after it."""
        if fast is not None and fast.supports(self):
            return fast.one_block(self, tokens, rope, state, seen, reads, writes)
        attention, memory = self.self_attn, self.memory
        reading = memory.read(state, seen, self.host(rope)) if reads else None
        query, key, value = attention.project(self.input_layernorm(tokens))
        clean = rope.inside(key), value
        columns = attention.prepend(reading, *attention.probed(*clean))
        output = self.finish(tokens, attention.mix(query, rope.inside(query), *columns, reading))
        if writes:
            tail = None
            if isinstance(memory, SummaryTokenMemory):
                columns = attention.prepend(reading, *clean)
                tail = self.behind(self.tail(tokens), rope, columns, reading, tokens.shape[1])
            state = memory.write(state, Block(key, value, output, tail), seen)
        return output, state

    def all_blocks(self, hidden: Hidden, rope: Rope) -> Hidden:
        """Whole samples at once: what all blocks read from memory first, then attention in all of them."""
        query, key, value = self.self_attn.project(self.input_layernorm(hidden))
        written_key, written_value = key, value
        if self.memory.reach != 0:
            (key, written_key), (value, written_value) = used_twice(key), used_twice(value)
        readings = self.read_all(written_key, written_value, self.host(rope))
        return self.attend_blocks(hidden, rope, (query, key, value), readings)

    def read_all(self, key: Heads, value: Heads, host: Host) -> Sequence[Reading]:
        """What the last blocks of a sample read from memory; memory lags behind a window of several blocks."""
        lag = self.locality.lag
        if not lag:
            return self.memory.read_all(key, value, host)
        blocks, written = -(-key.shape[2] // self.locality.block_size), max(key.shape[2] - lag, 1)
        readings = self.memory.read_all(key[:, :, :written], value[:, :, :written], host)
        if self.memory.reads_start:  # until something has left the window, as block 0 does
            return [readings[0]] * (blocks - len(readings)) + list(readings)
        return readings

    def attend_blocks(
        self, hidden: Hidden, rope: Rope, heads: tuple[Heads, Heads, Heads], readings: Sequence[Reading]
    ) -> Hidden:
        """The layer's output, given queries, keys and values of all blocks and what each block reads from memory."""
        length = hidden.shape[1]
        size = self.locality.span(length)
        query, key, value = heads
        outside = len(readings) > 0 and not self.memory.shares_softmax
        query, raw = used_twice(query) if outside or self.memory.raw_queries else (query, None)
        query, key, value = (_split_blocks(x, size) for x in (query, key, value))
        raw = None if raw is None else _split_blocks(raw, size)
        joining = [] if outside else readings
        if self.window is not None and self._slides_fast(query, key):
            rotated = _inside(rope, query) if len(readings) > 0 else query  # only memory is read from inside a block
            whole = rope.inside(_join_blocks(query)), rope.inside(_join_blocks(key)), _join_blocks(value)
            mixed = self.self_attn.slide_blocks(*whole, rotated, joining, self.window, raw)
        else:
            rotated, rotated_key = _inside(rope, query), _inside(rope, key)
            before = None if self.window is None else partial(self.before, rope, key, value)
            mixed = self.self_attn.attend_blocks(rotated, rotated_key, value, joining, self.window, before, raw)
        if outside:
            remembered = self.memory.mix_all(mixed, raw, rotated, readings)
            mixed = self.self_attn.weighed(mixed, remembered)
        # [batch, block, head, token, dim] -> [batch, head, token, dim]
        return self.finish(hidden, mixed.transpose(1, 2).flatten(2, 3)[:, :, :length])

    def _slides_fast(self, query: Blocks, key: Blocks) -> bool:
        """Whether sliding attention runs without masks."""
        return windows is not None and self.self_attn.corrupt is None and windows.supports(query, key)

    def before(self, rope: Rope, key: Blocks, value: Blocks, first: int, last: int) -> tuple[Heads, Heads]:
        """Keys, at their positions, and values of the tokens of a window before each block from `first` to `last`."""
        size = key.shape[3]
        count = min(first * size, self.window or 0)
        # [batch, head, token, dim] -> windows [batch, head, block, dim, token], each moved on by a block
        key, value = (
            _join_blocks(x)[:, :, first * size - count : (last - 1) * size]
            .unfold(2, count, size)
            .permute(0, 2, 1, 4, 3)
            .flatten(0, 1)
            for x in (key, value)
        )
        return rope(key, torch.arange(-count, 0, device=key.device)), value

    def finish(self, hidden: Hidden, mixed: Heads) -> Hidden:
        """What follows on attention: its output projection and the MLP, each added to the residual stream."""
        hidden = hidden + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def tail(self, like: Hidden) -> Float[Tensor, "batch tail width"]:
        """The summary tokens behind a block, for each row."""
        return self.memory.tail().to(like.dtype).expand(len(like), -1, -1)

    def behind(
        self, tokens: Hidden, rope: Rope, local: tuple[Heads, Heads], reading: Reading | None, length: int
    ) -> Hidden:
        """Run further tokens through the layer behind a block of `length` tokens, whose columns are `local`."""
        positions = torch.arange(length, length + tokens.shape[1], device=tokens.device)
        query, key, value = self.self_attn.project(self.input_layernorm(tokens))
        columns = torch.cat((local[0], rope(key, positions)), 2), torch.cat((local[1], value), 2)
        return self.finish(tokens, self.self_attn.mix(query, rope(query, positions), *columns, reading))

    def host(self, rope: Rope) -> Host:
        """This layer, as its memory sees it."""

        def project(tokens: Hidden) -> tuple[Heads, Heads]:
            _, key, value = self.self_attn.project(self.input_layernorm(tokens.to(self.input_layernorm.weight.dtype)))
            return key, value

        def lagging(x: Heads, positions: Tensor) -> Heads:
            return rope(x, positions - self.locality.lag)

        return Host(lagging if self.locality.lag else rope, project)

    def span(self, length: int) -> tuple[int, int]:
        """Positions that a sample of `length` tokens needs: before a block, and from its beginning on."""
        size, memory = self.locality.span(length), self.memory
        if isinstance(memory, SummaryTokenMemory):
            return memory.front_size, size + len(memory.tail()) + PADDING
        if self.window is not None and windows is not None and length <= windows.LONGEST:
            return 0, -(-length // size) * size
        return 0, size

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


def _split_blocks(x: Heads, size: int) -> Blocks:
    """Cut the tokens into blocks; zeros fill the last, which no earlier token sees. No copy if all are full."""
    x = x.transpose(1, 2)
    short = -x.shape[1] % size
    if short:
        x = nn.functional.pad(x, (0, 0, 0, 0, 0, short))
    return x.unflatten(1, (-1, size)).transpose(2, 3)


def _inside(rope: Rope, x: Blocks) -> Blocks:
    """At positions inside each block."""
    return rope.inside(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def _join_blocks(x: Blocks) -> Heads:
    """Undo `_split_blocks`, without the copy."""
    return x.transpose(2, 3).flatten(1, 2).transpose(1, 2)
