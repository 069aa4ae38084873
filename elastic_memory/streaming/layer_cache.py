"""What a layer keeps between calls: the memory state, its reading, and the open block's keys and values.

Rows have clocks of their own. Where all agree no mask is built; where they differ one mask per call says who sees what.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from elastic_memory.attention import rotate
from elastic_memory.memory import Block, Host, Memory, Reading, State, SummaryTokenMemory
from elastic_memory.shapes import Bool, Int, Tensor

SMALLEST = 64  # tokens of room a fresh open block starts with; doubled as it fills


class Part(NamedTuple):
    """Tokens that were read as one text, whose last block ended with it."""

    name: str | None
    tokens: int
    digest: str | None  # of the ids, block by block; None if they are unknown


@dataclass
class Segment:
    """Some tokens of each row, all inside that row's open block: `width` columns, of which row b uses its first few."""

    opened: list[int]  # tokens of the open block before the segment, by row
    width: int
    positions: Int[Tensor, "rows token"]  # inside the block; one row where all agree
    rope: tuple[Tensor, Tensor]
    seen: list[int]  # tokens in memory, by row
    window: int | None  # sliding attention looks back this far
    masks: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def uniform(self) -> bool:
        """Whether all rows have one clock."""
        return self.positions.shape[0] == 1

    def mask(self, stream: "LayerCache") -> Bool[Tensor, "rows 1 token column"]:
        """Which of the layer's columns each token sees: memory, previous block, open block."""
        memory, before = stream.memory_columns, stream.front - stream.memory_columns
        key = (memory, before, tuple(stream.counts))
        if key not in self.masks:
            rows, device = len(self.positions), self.positions.device
            seen, counts = (torch.tensor(x, device=device)[:rows, None] for x in (self.seen, stream.counts))
            local = torch.arange(-before, max(self.opened) + self.width, device=device)
            columns = torch.arange(memory, device=device)
            self.masks[key] = column_mask(self.positions, local, columns < counts, seen > 0, self.window)
        return self.masks[key]


class LayerCache:
    """One layer's part of a `MemoryCache`."""

    def __init__(self, memory: Memory, batch: int, device: torch.device, keep_raw: bool):
        self.memory = memory
        self.state: State = memory.start(batch, device)
        self.reading: Reading | None = None  # for rows with fewer columns than others, zeros fill it up
        self.counts = [0] * batch  # columns of the reading that are real, by row
        self.retrieval = memory.retrieval
        self.window: tuple[Tensor, Tensor] | None = None  # the previous block, for sliding attention
        self.open: dict[str, Tensor] = {}
        # Attention needs rotated keys, memory raw ones; outputs only where the mechanism says so.
        needed = {"raw": keep_raw, "output": isinstance(memory, SummaryTokenMemory)}
        self.kept = {"key", "value"} | {name for name, wanted in needed.items() if wanted}

    @property
    def memory_columns(self) -> int:
        """Columns of memory in front of the open block."""
        return self.reading[0].shape[2] if self.reading and self.memory.shares_softmax else 0

    @property
    def front(self) -> int:
        """All columns in front of the open block."""
        return self.memory_columns + (self.window[0].shape[2] if self.window else 0)

    @property
    def visible(self) -> Bool[Tensor, "batch column"] | None:
        """Which columns of a reading outside the softmax are real, where rows differ."""
        if not self.reading or self.memory.shares_softmax or len(set(self.counts)) == 1:
            return None
        counts = torch.tensor(self.counts, device=self.reading[0].device)
        return torch.arange(self.reading[0].shape[2], device=counts.device) < counts[:, None]

    def append(self, segment: Segment, **tensors: Tensor) -> None:
        """Put the segment's keys, values, ... behind the open tokens of each row."""
        for name, tensor in tensors.items():
            if name not in self.kept:
                continue
            axis = 1 if name == "output" else 2
            front = self.front if name in ("key", "value") else 0
            buffer = self._room(name, tensor, axis, front, max(segment.opened) + segment.width)
            if segment.uniform:
                buffer.narrow(axis, front + segment.opened[0], segment.width).copy_(tensor)
            else:
                index = front + segment.positions.reshape(
                    -1, *[1] * (axis - 1), segment.width, *[1] * (tensor.ndim - axis - 1)
                )
                buffer.scatter_(axis, index.expand_as(tensor), tensor)

    def room(self, tokens: int, backbone: Any) -> dict[str, Tensor]:
        """Empty buffers, with room for exactly `tokens` open tokens behind the front."""
        geometry, weight = self.memory.geometry, backbone.embed_tokens.weight
        rooms = {}
        for name in self.kept:
            front = self.front if name in ("key", "value") else 0
            shape: tuple[int, ...] = (len(self.counts), geometry.kv_heads, front + tokens, geometry.head_dim)
            if name == "output":
                shape = (len(self.counts), tokens, geometry.width)
            rooms[name] = weight.new_zeros(shape)
        return rooms

    def move(self, rooms: dict[str, Tensor]) -> None:
        """Go on in these buffers, with what the present ones hold."""
        for name, room in rooms.items():
            axis = 1 if name == "output" else 2
            old = self.open.get(name)
            if old is None and self.front and name in ("key", "value"):
                old = self._front(name)
            if old is not None and old is not room:
                kept = min(old.shape[axis], room.shape[axis])
                room.narrow(axis, 0, kept).copy_(old.narrow(axis, 0, kept))
        self.open = dict(rooms)

    def _room(self, name: str, like: Tensor, axis: int, front: int, tokens: int) -> Tensor:
        """The buffer called `name`, with room for `tokens` open tokens behind its front columns."""
        buffer = self.open.get(name)
        # Another precision than before: under autocast or no longer, or the model was cast.
        if buffer is None or buffer.shape[axis] < front + tokens or buffer.dtype != like.dtype:
            shape = list(like.shape)
            shape[axis] = front + max(SMALLEST, 1 << (tokens - 1).bit_length())
            if buffer is not None:
                shape[axis] = max(shape[axis], buffer.shape[axis])
            grown = like.new_zeros(shape)
            if buffer is not None:
                grown.narrow(axis, 0, buffer.shape[axis]).copy_(buffer)
            elif front:
                grown.narrow(axis, 0, front).copy_(self._front(name))
            self.open[name] = buffer = grown
        return buffer

    def _front(self, name: str) -> Tensor:
        """What stands in front of the open keys or values: memory, then the previous block."""
        part = ("key", "value").index(name)
        parts = [self.reading[part]] if self.memory_columns and self.reading else []
        parts += [self.window[part]] if self.window else []
        return torch.cat(parts, dim=2)

    def columns(self, segment: Segment) -> tuple[Tensor, Tensor]:
        """All keys and values the segment's tokens may see."""
        end = self.front + max(segment.opened) + segment.width
        return self.open["key"][:, :, :end], self.open["value"][:, :, :end]

    def block_columns(self, rows: list[int], size: int) -> tuple[Tensor, Tensor]:
        """Keys and values that tokens behind the open block of `rows` would see (rows with one clock)."""
        count, front = self.counts[rows[0]] if self.memory.shares_softmax else 0, self.front
        key, value = (
            torch.cat((self.open[name][rows, :, :count], self.open[name][rows, :, front : front + size]), dim=2)
            for name in ("key", "value")
        )
        return key, value

    def block(self, rows: list[int], size: int) -> Block:
        """The open block of some rows, of `size` tokens each."""
        output = self.open["output"][rows, :size] if "output" in self.open else None
        value = self.open["value"][rows, :, self.front : self.front + size]
        # Without memory nobody reads the raw keys; the values stand in for their shape.
        key = self.open["raw"][rows, :, :size] if "raw" in self.open else value
        return Block(key, value, output)

    def _write(
        self, rows: list[int], block: Block, seen: int, host: Host, window: tuple[Tensor, Tensor] | None
    ) -> None:
        """Write `block` of `rows` into the state, read for the next block, and clear what the rows had open."""
        state = self.memory.write(tuple(self._of(rows, part) for part in self.state), block, seen)
        self.state = tuple(_put(old, rows, new) for old, new in zip(self.state, state, strict=True))
        reading = self.memory.read(state, seen + block.key.shape[2], host)
        kept = self.open_tokens() if len(rows) < len(self.counts) else {}
        self._merge(rows, reading, block.value.dtype)
        if window is not None:
            old = self.window or tuple(part.new_zeros(len(self.counts), *part.shape[1:]) for part in window)
            pairs = zip(old, window, strict=True)
            self.window = tuple(_put(a.to(b.dtype), rows, b) for a, b in pairs)  # type: ignore[assignment]
        self.reopen(kept)

    def _of(self, rows: list[int], part: Tensor) -> Tensor:
        """Some rows of a tensor; all of them without a list of indices, for which a GPU would have to be waited for."""
        return part if len(rows) == len(self.counts) else part[rows]

    def step(self, layer: Any, hidden: Tensor, segment: Segment) -> Tensor:
        """The layer's output for the next tokens of each row; their keys and values are kept."""
        attention = layer.self_attn
        query, key, value = attention.project(layer.input_layernorm(hidden))
        rotated, rotated_key = (rotate(x, *segment.rope).to(x.dtype) for x in (query, key))
        self.append(segment, key=rotated_key, value=value, raw=key)
        columns = self.columns(segment)
        if attention.corrupt is not None:
            noisy = attention.corrupt(*(x[:, :, self.front :] for x in columns))
            key, value = (torch.cat((x[:, :, : self.front], y), 2) for x, y in zip(columns, noisy, strict=True))
            columns = key, value
        mask = segment.mask(self) if segment.window is not None or not segment.uniform else None
        mixed = attention.mix(query, rotated, *columns, self.reading, mask, self.visible)
        output = layer.finish(hidden, mixed)
        self.append(segment, output=output)
        return output

    def pass_blocks(self, layer: Any, hidden: Tensor, rope: Any, seen: int) -> Tensor:
        """The layer's output for whole blocks of all rows, which have one clock and nothing open.

        As many products as in training, and a memory as exact as in streams.
        """
        heads = layer.self_attn.project(layer.input_layernorm(hidden))
        size, readings = self.memory.geometry.block_size, []
        for start in range(0, hidden.shape[1], size):
            if self.reading:
                readings.append(self.reading)
            block = Block(*(x[:, :, start : start + size] for x in heads[1:]))
            self._write(list(range(len(self.counts))), block, seen + start, layer.host(rope), None)
        return layer.attend_blocks(hidden, rope, heads, readings)

    def close(self, layer: Any, rope: Any, rows: list[int], seen: int, size: int) -> None:
        """Write the open block of some rows, `size` tokens from token `seen` on, into memory, and open the next."""
        fetched = layer.fetch()
        block = self.block(rows, size)
        tail = None if block.output is None else layer.tail(block.output)
        if tail is not None:
            columns = self.block_columns(rows, size)
            had = self.reading if self.counts[rows[0]] else None
            reading = had and tuple(part[rows] for part in had)
            block = block._replace(tail=layer.behind(tail, rope, columns, reading, size))
        window = None
        if layer.locality.sliding:
            window = rope(block.key, torch.arange(-size, 0, device=block.key.device)), block.value
        self._write(rows, block, seen, layer.host(rope), window)
        layer.put_back(fetched)

    def open_tokens(self, longest: int | None = None) -> dict[str, Tensor]:
        """The open tokens' keys, values, ... without what stands in front of them."""
        kept = {}
        for name, tensor in self.open.items():
            front = self.front if name in ("key", "value") else 0
            axis = 1 if name == "output" else 2
            kept[name] = tensor.narrow(axis, front, longest if longest is not None else tensor.shape[axis] - front)
        return kept

    def reopen(self, kept: dict[str, Tensor]) -> None:
        """Fresh buffers behind the present front, with these open tokens."""
        self.open = {}
        for name, tensor in kept.items():
            axis = 1 if name == "output" else 2
            front = self.front if name in ("key", "value") else 0
            self._room(name, tensor, axis, front, tensor.shape[axis]).narrow(axis, front, tensor.shape[axis]).copy_(
                tensor
            )

    def _merge(self, rows: list[int], reading: Reading, dtype: torch.dtype) -> None:
        """Replace the readings of some rows; columns that a row does not have are zeros."""
        if not reading:
            return
        if self.memory.shares_softmax:
            reading = tuple(part.to(dtype) for part in reading)
        for row in rows:
            self.counts[row] = reading[0].shape[2]
        if len(rows) == len(self.counts):
            self.reading = reading
            return
        width = max(self.counts)
        old = self.reading or tuple(part.new_zeros(len(self.counts), *part.shape[1:]) for part in reading)
        pairs = zip(old, reading, strict=True)
        self.reading = tuple(_put(_widen(a.to(b.dtype), width), rows, _widen(b, width)) for a, b in pairs)

    @property
    def stale(self) -> bool:
        """Whether the reading has to be made anew: settings have changed, or block 0 reads and has not begun."""
        return self.retrieval != self.memory.retrieval or (self.reading is None and self.memory.reads_start)

    def refresh(self, seen: list[int], host: Host, dtype: torch.dtype) -> str | None:
        """After `set_retrieval`: fit the state to the new settings and read it anew. Says what became of the state."""
        if not self.stale:
            return None
        self.retrieval = self.memory.retrieval
        self.state, said = self.memory.adapt(self.state)
        kept = self.open_tokens()
        self.read_anew(seen, host, dtype)
        self.reopen(kept)
        return said

    def read_anew(self, seen: list[int], host: Host, dtype: torch.dtype) -> None:
        """Make the readings of all rows from the state."""
        self.reading, self.counts = None, [0] * len(seen)
        for tokens in sorted(set(seen) - (set() if self.memory.reads_start else {0})):
            rows = [row for row, count in enumerate(seen) if count == tokens]
            self._merge(rows, self.memory.read(tuple(part[rows] for part in self.state), tokens, host), dtype)

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep, repeat or reorder rows."""
        chosen = rows.tolist()
        self.counts = [self.counts[row] for row in chosen]
        self.state = tuple(part[rows] for part in self.state)
        self.reading = self.reading and tuple(part[rows] for part in self.reading)
        self.window = self.window and tuple(part[rows] for part in self.window)  # type: ignore[assignment]
        self.open = {name: tensor[rows] for name, tensor in self.open.items()}
        width = max(self.counts, default=0)
        if self.reading and width < self.reading[0].shape[2]:  # columns that only rows now gone had
            kept = self.open_tokens()
            self.reading = tuple(part[:, :, :width] for part in self.reading) if width else None
            self.reopen(kept)

    def view(self) -> "LayerCache":
        """A copy with lists of its own, on the same tensors."""
        copy = LayerCache.__new__(LayerCache)
        copy.__dict__.update(self.__dict__)
        copy.counts, copy.open = list(self.counts), dict(self.open)
        return copy

    def fork(self) -> "LayerCache":
        """An independent copy. States, readings and windows are values that nobody writes to; open buffers are not."""
        copy = self.view()
        copy.open = {name: tensor.clone() for name, tensor in self.open.items()}
        return copy

    def tensors(self) -> list[Tensor]:
        """Everything it holds."""
        return [*self.state, *(self.reading or ()), *(self.window or ()), *self.open.values()]


def column_mask(
    positions: Int[Tensor, "row token"],
    local: Int[Tensor, " column"],
    remembered: Bool[Tensor, "row memory"],
    begun: Bool[Tensor, "row 1"],
    window: int | None,
) -> Bool[Tensor, "row 1 token all"]:
    """Who sees what: `local` are positions of the previous block, which block 0 does not have, and of the open one."""
    query = positions[:, :, None]
    visible = (local <= query) & ((local >= 0) | begun[:, :, None])
    if window is not None:
        visible = visible & (query - local < window)
    front = remembered[:, None].expand(-1, positions.shape[1], -1)
    return torch.cat((front, visible), dim=2).unsqueeze(1)


def _put(old: Tensor, rows: list[int], new: Tensor) -> Tensor:
    if len(rows) == len(old):
        return new.to(old.dtype)
    return old.index_copy(0, torch.tensor(rows, device=old.device), new.to(old.dtype))


def _widen(part: Tensor, columns: int) -> Tensor:
    missing = columns - part.shape[2] if part.ndim > 2 else 0
    if missing <= 0:
        return part
    return torch.cat((part, part.new_zeros(*part.shape[:2], missing, *part.shape[3:])), dim=2)
