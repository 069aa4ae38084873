"""One layer's part of a cache: its memory state, the reading, and the keys and values of the open block.

Each row has its own clock. A mask is built only for calls whose rows differ.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_memory.attention import column_mask, rotate
from elastic_memory.memory import Block, Host, Memory, Reading, State, SummaryTokenMemory
from elastic_memory.shapes import Bool, Int, Tensor

SMALLEST = 64  # tokens that the buffers of a new block have room for; doubled as it fills


@dataclass
class Segment:
    """The next tokens of each row, all in its open block: `width` columns, of which a row may use only the first."""

    opened: list[int]  # tokens of the open block before the segment, by row
    width: int
    positions: Int[Tensor, "rows token"]  # inside the block; one row where all agree
    rope: tuple[Tensor, Tensor]  # cosines and sines at these positions
    seen: list[int]  # tokens in closed blocks, by row
    masks: dict[Any, Tensor] = field(default_factory=dict)  # shared by layers with the same columns

    @property
    def uniform(self) -> bool:
        """Whether all rows have the same clock."""
        return self.positions.shape[0] == 1

    def mask(self, stream: "LayerCache") -> Bool[Tensor, "rows 1 token column"]:
        """Which of the layer's columns each token sees: memory, the window before the open block, the open block."""
        memory, before = stream.memory_columns, stream.front - stream.memory_columns
        key = (memory, before, stream.window_size, tuple(stream.counts))
        if key not in self.masks:
            rows, device = len(self.positions), self.positions.device
            seen, counts = (torch.tensor(x, device=device)[:rows, None] for x in (self.seen, stream.counts))
            local = torch.arange(-before, max(self.opened) + self.width, device=device)
            columns = torch.arange(memory, device=device)
            self.masks[key] = column_mask(self.positions, local, columns < counts, seen, stream.window_size)
        return self.masks[key]


class LayerCache:
    """One layer's part of a `MemoryCache`; `layer` is a `MemoryLayer` throughout."""

    def __init__(self, layer: Any, batch: int, device: torch.device):
        memory: Memory = layer.memory
        self.memory = memory
        self.window_size: int | None = layer.window  # tokens that a token sees under sliding attention
        self.lag: int = layer.locality.lag  # tokens of closed blocks that memory does not hold yet
        self.state: State = memory.start(batch, device)
        self.reading: Reading | None = None  # padded with zeros for rows with fewer columns
        self.counts = [0] * batch  # columns of the reading that are real, by row
        self.retrieval = memory.retrieval  # the settings that the reading was made with
        # Under sliding attention the tokens before the open block: rotated keys, values, and raw keys if they stay for
        # several blocks. Rows with fewer tokens than others have zeros in front.
        self.window: tuple[Tensor, ...] | None = None
        self.open: dict[str, Tensor] = {}  # buffers of the open block; those of keys and values begin with the front
        # Attention needs rotated keys, memory raw ones; outputs only if the mechanism has a tail.
        needed = {"raw": layer.window is not None or bool(self.state), "output": isinstance(memory, SummaryTokenMemory)}
        self.buffer_names = {"key", "value"} | {name for name, wanted in needed.items() if wanted}

    @property
    def memory_columns(self) -> int:
        """Columns of memory in front of the open block, in the same softmax."""
        return self.reading[0].shape[2] if self.reading and self.memory.shares_softmax else 0

    @property
    def front(self) -> int:
        """All columns in front of the open block: memory, then the window."""
        return self.memory_columns + (self.window[0].shape[2] if self.window else 0)

    @property
    def visible(self) -> Bool[Tensor, "batch column"] | None:
        """Which columns of a reading outside the softmax each row has; None if rows do not differ."""
        if not self.reading or self.memory.shares_softmax or len(set(self.counts)) == 1:
            return None
        counts = torch.tensor(self.counts, device=self.reading[0].device)
        return torch.arange(self.reading[0].shape[2], device=counts.device) < counts[:, None]

    # -- tokens of the open block, and its end -------------------------------------------------------------------------

    def step(self, layer: Any, hidden: Tensor, segment: Segment) -> Tensor:
        """The layer's output for the next tokens of each row, whose keys and values are kept in the open block."""
        attention = layer.self_attn
        query, key, value = attention.project(layer.input_layernorm(hidden))
        rotated, rotated_key = (rotate(x, *segment.rope).to(x.dtype) for x in (query, key))
        self.append(segment, key=rotated_key, value=value, raw=key)
        columns = self.columns(segment)
        if attention.corrupt is not None:
            noisy = attention.corrupt(*(x[:, :, self.front :] for x in columns))
            key, value = (torch.cat((x[:, :, : self.front], y), 2) for x, y in zip(columns, noisy, strict=True))
            columns = key, value
        mask = segment.mask(self) if self.window_size is not None or not segment.uniform else None
        mixed = attention.mix(query, rotated, *columns, self.reading, mask, self.visible)
        output = layer.finish(hidden, mixed)
        self.append(segment, output=output)
        return output

    def pass_blocks(self, layer: Any, hidden: Tensor, rope: Any, seen: int) -> Tensor:
        """The layer's output for whole blocks, written into memory; rows have the same clock and nothing open.

        Attention runs over all blocks at once, as in training; memory is written and read block by block.
        """
        heads = layer.self_attn.project(layer.input_layernorm(hidden))
        size, host, rows, readings = self.memory.geometry.block_size, layer.host(rope), list(range(len(hidden))), []
        for start in range(0, hidden.shape[1], size):
            if self.reading:
                readings.append(self.reading)
            block = Block(*(x[:, :, start : start + size] for x in heads[1:]))
            self._write(rows, block, seen + start, host)
        return layer.attend_blocks(hidden, rope, heads, readings)

    def close(self, layer: Any, rope: Any, rows: list[int], seen: int, size: int) -> None:
        """Write the open blocks of `rows` into memory: `size` tokens each, after `seen` others."""
        fetched = layer.fetch()
        block = self.block(rows, size)
        if block.output is not None:
            columns = self.block_columns(rows, size)
            count = self.counts[rows[0]]
            reading = tuple(part[rows][:, :, :count] for part in self.reading) if count and self.reading else None
            block = block._replace(tail=layer.tail_output(block.output, rope, columns, reading))
        window, leaving = (None, block) if self.window_size is None else self._slide(rows, block, seen, rope)
        self._write(rows, leaving, seen - self.lag, layer.host(rope), window)
        layer.put_back(fetched)

    def _slide(self, rows: list[int], block: Block, seen: int, rope: Any) -> tuple[tuple[Tensor, ...], Block | None]:
        """The window of `rows` after `block`, which follows `seen` tokens, and the block that memory gets, if any."""
        key, value, size = block.key, block.value, block.key.shape[2]
        longer = self.window_size != size  # than a block: its tokens are rotated anew
        if self.window and longer:
            had = min(seen, self.window[0].shape[2])
            older = (self._rows(rows, part).narrow(2, part.shape[2] - had, had) for part in self.window[1:])
            value, key = (torch.cat((a.to(b.dtype), b), 2) for a, b in zip(older, (value, key), strict=True))
        first = key.shape[2] - self.lag - size
        leaving = Block(*(x[:, :, first : first + size] for x in (key, value))) if first >= 0 else None
        key, value = (x[:, :, -self.window_size :] for x in (key, value))  # type: ignore[operator]
        rotated = rope(key, torch.arange(-key.shape[2], 0, device=key.device))
        return (rotated, value, key) if longer else (rotated, value), leaving

    def columns(self, segment: Segment) -> tuple[Tensor, Tensor]:
        """All keys and values that the segment's tokens may see."""
        end = self.front + max(segment.opened) + segment.width
        return self.open["key"][:, :, :end], self.open["value"][:, :, :end]

    def block_columns(self, rows: list[int], size: int) -> tuple[Tensor, Tensor]:
        """Keys and values that tokens after the open block would see, for `rows` with the same clock."""
        count, front = self.counts[rows[0]] if self.memory.shares_softmax else 0, self.front
        key, value = (
            torch.cat((self.open[name][rows, :, :count], self.open[name][rows, :, front : front + size]), dim=2)
            for name in ("key", "value")
        )
        return key, value

    def block(self, rows: list[int], size: int) -> Block:
        """The open block of `rows`, `size` tokens each."""
        output = self.open["output"][rows, :size] if "output" in self.open else None
        value = self.open["value"][rows, :, self.front : self.front + size]
        # Without memory nobody uses the raw keys: any tensor of their shape will do.
        key = self.open["raw"][rows, :, :size] if "raw" in self.open else value
        return Block(key, value, output)

    def _write(
        self, rows: list[int], block: Block | None, seen: int, host: Host, window: tuple[Tensor, ...] | None = None
    ) -> None:
        """Write `block`, if any, into the state of `rows`, read for the next block, and empty the open one."""
        kept = self.open_tokens() if len(rows) < len(self.counts) else {}
        if block is not None:
            state = self.memory.write(tuple(self._rows(rows, part) for part in self.state), block, seen)
            self.state = tuple(_put(old, rows, new) for old, new in zip(self.state, state, strict=True))
            self._set_reading(rows, self.memory.read(state, seen + block.key.shape[2], host), block.value.dtype)
        if window is not None:
            old = self.window or tuple(part.new_zeros(len(self.counts), *part.shape[1:]) for part in window)
            columns = max(old[0].shape[2], window[0].shape[2])
            pairs = zip(old, window, strict=True)
            self.window = tuple(
                _put(_widen(a.to(b.dtype), columns, front=True), rows, _widen(b, columns, front=True)) for a, b in pairs
            )
        self.reopen(kept)

    def _rows(self, rows: list[int], part: Tensor) -> Tensor:
        """Some rows of a tensor; all of them without indexing, which avoids a GPU synchronisation."""
        return part if len(rows) == len(self.counts) else part[rows]

    # -- buffers of the open block -------------------------------------------------------------------------------------

    def _layout(self, name: str) -> tuple[int, int]:
        """The token axis of a buffer, and how many columns it has in front of the open tokens."""
        return (1 if name == "output" else 2), (self.front if name in ("key", "value") else 0)

    def append(self, segment: Segment, **tensors: Tensor) -> None:
        """Put the segment's keys, values, ... after the open tokens of each row."""
        for name, tensor in tensors.items():
            if name not in self.buffer_names:
                continue
            axis, front = self._layout(name)
            buffer = self._buffer(name, tensor, max(segment.opened) + segment.width)
            if segment.uniform:
                buffer.narrow(axis, front + segment.opened[0], segment.width).copy_(tensor)
            else:
                shape = (-1, *[1] * (axis - 1), segment.width, *[1] * (tensor.ndim - axis - 1))
                index = front + segment.positions.reshape(shape)
                buffer.scatter_(axis, index.expand_as(tensor), tensor)

    def _buffer(self, name: str, like: Tensor, tokens: int) -> Tensor:
        """The buffer called `name`, grown if it has no room for `tokens` open tokens."""
        axis, front = self._layout(name)
        buffer = self.open.get(name)
        # The precision changes when autocast begins or ends, or the model is cast.
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
        """The front columns of keys or values: memory, then the window."""
        part = ("key", "value").index(name)
        parts = [self.reading[part]] if self.memory_columns and self.reading else []
        parts += [self.window[part]] if self.window else []
        return torch.cat(parts, dim=2)

    def new_buffers(self, tokens: int, backbone: Any) -> dict[str, Tensor]:
        """Zeroed buffers with room for exactly `tokens` open tokens."""
        geometry, weight = self.memory.geometry, backbone.embed_tokens.weight
        buffers = {}
        for name in self.buffer_names:
            _, front = self._layout(name)
            shape: tuple[int, ...] = (len(self.counts), geometry.kv_heads, front + tokens, geometry.head_dim)
            if name == "output":
                shape = (len(self.counts), tokens, geometry.width)
            buffers[name] = weight.new_zeros(shape)
        return buffers

    def move_to(self, buffers: dict[str, Tensor]) -> None:
        """Copy what the present buffers hold into these, and continue in them."""
        for name, buffer in buffers.items():
            axis, front = self._layout(name)
            old = self.open.get(name)
            if old is None and front:
                old = self._front(name)
            if old is not None and old is not buffer:
                size = min(old.shape[axis], buffer.shape[axis])
                buffer.narrow(axis, 0, size).copy_(old.narrow(axis, 0, size))
        self.open = dict(buffers)

    def open_tokens(self, longest: int | None = None) -> dict[str, Tensor]:
        """Keys, values, ... of the open tokens, without the front columns."""
        kept = {}
        for name, tensor in self.open.items():
            axis, front = self._layout(name)
            kept[name] = tensor.narrow(axis, front, longest if longest is not None else tensor.shape[axis] - front)
        return kept

    def reopen(self, kept: dict[str, Tensor]) -> None:
        """Make new buffers from the present front columns and these open tokens."""
        self.open = {}
        for name, tensor in kept.items():
            axis, front = self._layout(name)
            self._buffer(name, tensor, tensor.shape[axis]).narrow(axis, front, tensor.shape[axis]).copy_(tensor)

    # -- states and readings -------------------------------------------------------------------------------------------

    def _set_reading(self, rows: list[int], reading: Reading, dtype: torch.dtype) -> None:
        """Replace the readings of some rows; all are padded with zeros to the widest."""
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
        self.reading = tuple(_put(_widen(a.to(b.dtype), width)[:, :, :width], rows, _widen(b, width)) for a, b in pairs)

    @property
    def stale(self) -> bool:
        """Whether to read again: retrieval settings have changed, or block 0 has a reading that was not made yet."""
        return self.retrieval != self.memory.retrieval or (self.reading is None and self.memory.reads_start)

    def refresh(self, seen: list[int], host: Host, dtype: torch.dtype) -> str | None:
        """After `set_retrieval`: fit the state to the new settings and read it again. Returns a warning, or None."""
        if not self.stale:
            return None
        state, warning = self.memory.adapt(self.state)
        self.replace_state(state, seen, host, dtype, keep_open=True)
        return warning

    def replace_state(self, state: State, seen: list[int], host: Host, dtype: torch.dtype, keep_open: bool) -> None:
        """Continue from another state and read it; the open block is dropped unless `keep_open`."""
        kept = self.open_tokens() if keep_open else {}
        self.state, self.retrieval = state, self.memory.retrieval
        self._read_all_rows(seen, host, dtype)
        self.reopen(kept)

    def file_tensors(self, dtype: torch.dtype, longest: int | None) -> dict[str, Tensor]:
        """The tensors of a memory file; with open blocks if given the number of tokens in the `longest`."""
        named = {f"state.{part}": tensor for part, tensor in enumerate(self.state)}
        if longest is not None:
            # Autocast may have left them in half precision, which the model's own `dtype` holds without loss.
            named |= {f"open.{name}": x.to(dtype) for name, x in self.open_tokens(longest).items()}
            named |= {f"window.{part}": x.to(dtype) for part, x in enumerate(self.window or ())}
        return named

    def restore(self, named: dict[str, Tensor], seen: list[int], host: Host, dtype: torch.dtype) -> None:
        """Continue from the tensors that `file_tensors` returned."""
        self.window = tuple(named[name] for part in range(3) if (name := f"window.{part}") in named) or None
        state = tuple(named[f"state.{part}"] for part in range(len(self.state)))
        self.replace_state(state, seen, host, dtype, keep_open=False)
        self.reopen({name.removeprefix("open."): x for name, x in named.items() if name.startswith("open.")})

    def _read_all_rows(self, seen: list[int], host: Host, dtype: torch.dtype) -> None:
        """Read the state of every row."""
        self.reading, self.counts = None, [0] * len(seen)
        written = [max(tokens - self.lag, 0) for tokens in seen]
        for tokens in sorted(set(written) - (set() if self.memory.reads_start else {0})):
            rows = [row for row, count in enumerate(written) if count == tokens]
            self._set_reading(rows, self.memory.read(tuple(part[rows] for part in self.state), tokens, host), dtype)

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep, repeat or reorder rows."""
        chosen = rows.tolist()
        self.counts = [self.counts[row] for row in chosen]
        self.state = tuple(part[rows] for part in self.state)
        self.reading = self.reading and tuple(part[rows] for part in self.reading)
        self.window = self.window and tuple(part[rows] for part in self.window)
        self.open = {name: tensor[rows] for name, tensor in self.open.items()}
        width = max(self.counts, default=0)
        if self.reading and width < self.reading[0].shape[2]:  # only rows that are gone had the others
            kept = self.open_tokens()
            self.reading = tuple(part[:, :, :width] for part in self.reading) if width else None
            self.reopen(kept)

    def view(self) -> "LayerCache":
        """A shallow copy: its own lists, the same tensors."""
        copy = LayerCache.__new__(LayerCache)
        copy.__dict__.update(self.__dict__)
        copy.counts, copy.open = list(self.counts), dict(self.open)
        return copy

    def fork(self) -> "LayerCache":
        """An independent copy. Only open buffers are copied: all other tensors are replaced, never written to."""
        copy = self.view()
        copy.open = {name: tensor.clone() for name, tensor in self.open.items()}
        return copy

    def tensors(self) -> list[Tensor]:
        """All tensors it holds."""
        return [*self.state, *(self.reading or ()), *(self.window or ()), *self.open.values()]


def _put(old: Tensor, rows: list[int], new: Tensor) -> Tensor:
    """`old` with some rows replaced by those of `new`."""
    if len(rows) == len(old):
        return new.to(old.dtype)
    return old.index_copy(0, torch.tensor(rows, device=old.device), new.to(old.dtype))


def _widen(part: Tensor, columns: int, front: bool = False) -> Tensor:
    """`part` padded with zeros to so many columns, in front or behind."""
    missing = columns - part.shape[2] if part.ndim > 2 else 0
    if missing <= 0:
        return part
    zeros = part.new_zeros(*part.shape[:2], missing, *part.shape[3:])
    return torch.cat((zeros, part) if front else (part, zeros), dim=2)
