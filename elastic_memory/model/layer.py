"""A decoder layer that attends inside blocks and carries a memory between them: Algorithm 1 of the paper.

`MemoryLayer.one_block` is the algorithm: read the memory, attend, write. A sample goes through it block by block. If
the memory depends on keys and values only, all blocks are computed in parallel (`all_blocks.py`), with the same result.
`decoder_layer.py` has the projections and the attention that both use; `streaming/` does the same for streams.
"""

from collections.abc import Sequence

import torch

from elastic_memory.attention import used_twice
from elastic_memory.common.speedups import find
from elastic_memory.memory import Block, Host, ParallelMemory, Reading, State, SummaryTokenMemory
from elastic_memory.memory.contract import Heads
from elastic_memory.model import all_blocks
from elastic_memory.model.decoder_layer import DecoderLayer, Hidden
from elastic_memory.model.rope import PADDING, Rope
from elastic_memory.shapes import Float, Tensor

fast = find("summary_tokens")


class MemoryLayer(DecoderLayer):
    """A decoder layer with memory, for whole samples."""

    def blocks(self, hidden: Hidden, rope: Rope) -> Hidden:
        """The layer's output for whole samples, all blocks at once where the mechanism allows it."""
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
        """One block: read the memory, attend, write. Returns the block's output and the state after it.

        `reads` is False in the first block, which has nothing to read; `writes` in the last, whose state nobody reads.
        """
        if fast is not None and fast.supports(self):
            return fast.one_block(self, tokens, rope, state, seen, reads, writes)
        attention, memory, tail = self.self_attn, self.memory, None
        query, key, value = attention.project(self.input_layernorm(tokens))  # line 1 of Algorithm 1
        rotated, rotated_key = rope.inside(query), rope.inside(key)  # line 2
        reading = memory.read(state, seen, self.host(rope)) if reads else None  # lines 3 and 4
        columns = attention.prepend(reading, *attention.corrupted(rotated_key, value))  # line 5
        mixed = attention.mix(query, rotated, *columns, reading)  # lines 6 and 7
        output = self.finish(tokens, mixed)  # line 10
        if writes:
            if isinstance(memory, SummaryTokenMemory):
                tail = self.tail_output(output, rope, attention.prepend(reading, rotated_key, value), reading)
            state = memory.write(state, Block(key, value, output, tail), seen)  # lines 8 and 9
        return output, state

    def all_blocks(self, hidden: Hidden, rope: Rope) -> Hidden:
        """All blocks at once: first their readings, which need only keys and values, then attention."""
        query, key, value = self.self_attn.project(self.input_layernorm(hidden))
        written_key, written_value = key, value
        if self.memory.reach != 0:
            (key, written_key), (value, written_value) = used_twice(key), used_twice(value)
        readings = all_blocks.read(self.memory, self.locality, written_key, written_value, self.host(rope))
        return self.attend_blocks(hidden, rope, (query, key, value), readings)

    def attend_blocks(
        self, hidden: Hidden, rope: Rope, heads: tuple[Heads, Heads, Heads], readings: Sequence[Reading]
    ) -> Hidden:
        """The layer's output, given queries, keys and values of all blocks and the readings of the last ones."""
        return self.finish(hidden, all_blocks.attend(self, rope, *heads, readings))

    def tail(self, like: Hidden) -> Float[Tensor, "batch tail width"]:
        """The summary tokens behind a block, for each row."""
        return self.memory.tail().to(like.dtype).expand(len(like), -1, -1)

    def tail_output(
        self, block: Hidden, rope: Rope, columns: tuple[Heads, Heads], reading: Reading | None
    ) -> Float[Tensor, "batch tail width"]:
        """The layer's output for the summary tokens behind a block, which attend to `columns` and each other."""
        tokens, length = self.tail(block), block.shape[1]
        positions = torch.arange(length, length + tokens.shape[1], device=tokens.device)
        query, key, value = self.self_attn.project(self.input_layernorm(tokens))
        columns = torch.cat((columns[0], rope(key, positions)), 2), torch.cat((columns[1], value), 2)
        return self.finish(tokens, self.self_attn.mix(query, rope(query, positions), *columns, reading))

    def host(self, rope: Rope) -> Host:
        """What the memory may ask of this layer."""

        def project(tokens: Hidden) -> tuple[Heads, Heads]:
            _, key, value = self.self_attn.project(self.input_layernorm(tokens.to(self.input_layernorm.weight.dtype)))
            return key, value

        def lagging(x: Heads, positions: Tensor) -> Heads:
            return rope(x, positions - self.locality.lag)

        return Host(lagging if self.locality.lag else rope, project)

    def positions(self, length: int) -> tuple[int, int]:
        """How many rotary positions a sample of `length` tokens needs: before a block, and from its start on."""
        size, memory = self.locality.block_length(length), self.memory
        if isinstance(memory, SummaryTokenMemory):
            return memory.front_size, size + len(memory.tail()) + PADDING
        if self.window is not None and all_blocks.windows is not None and length <= all_blocks.windows.LONGEST:
            return 0, -(-length // size) * size
        return 0, size
