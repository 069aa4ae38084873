"""`MemoryCache`: what a model remembers between calls, of constant size, for `generate` and streams of any length."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from transformers.cache_utils import Cache

from elastic_memory.shapes import Int, Tensor
from elastic_memory.streaming import memory_file
from elastic_memory.streaming.composing import Composing
from elastic_memory.streaming.reader import Reader

if TYPE_CHECKING:
    from elastic_memory.model.modeling import MemoryCausalLM


TEXTS = 1000  # that a cache can tell were read; each is 32 characters in a memory file


class MemoryCache(Composing, Reader, Cache):
    """State, open block and clock of each row of a batch.

    `static=True` keeps room for a whole block from the beginning, and decodes single tokens by a CUDA graph.

    Pass it as `past_key_values`. A cache of one row given to a call with several rows is forked for each of them: one
    book, many questions.

    `name` is what the text that is being read shall be called, once it is a part of more.
    """

    def __init__(self, model: "MemoryCausalLM", static: bool = False):
        super().__init__(layers=[])
        self.model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        self.static = static
        backbone = model.base_model
        self.owner = backbone.layers
        # Lists of their own: every token asks them, and modules are slow to find.
        self.memories = [layer.memory for layer in backbone.layers]
        self.attentions = [layer.self_attn for layer in backbone.layers]
        self.locality = backbone.layers[0].locality
        self.block_size = 2**62 if self.locality.kind == "full" else self.locality.block_size
        self.reset()

    @contextmanager
    def newest_again(self) -> Iterator[None]:
        """Take the newest token back, to be read again inside; if nothing is read, it is still there afterwards."""
        opened, columns = self.opened, self.columns
        self.rollback(1)
        clock = self.clock
        try:
            yield
        finally:
            if self.clock == clock:
                self.opened, self.columns = opened, columns

    def note_text(self, *digests: str) -> None:
        """Remember that texts, given by 32 hexadecimal digits, were read: memory files tell them from new ones."""
        self.texts = [*self.texts, *digests][-TEXTS:]

    # -- rows, time travel ---------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep, repeat or reorder rows."""
        chosen = rows.tolist()
        self.seen, self.opened = [self.seen[row] for row in chosen], [self.opened[row] for row in chosen]
        self.digests, self.parts = [self.digests[row] for row in chosen], [list(self.parts[row]) for row in chosen]
        self.tokens = None if self.tokens is None else self.tokens[rows.to(self.tokens.device)]
        self.decoding = False
        for stream in self.streams:
            stream.select(rows)
        if self.before is not None:
            self.before.select(rows)

    @torch.inference_mode(False)
    def fork(self) -> Self:
        """An independent copy; the original goes on unaffected."""
        copy = self._view()
        copy.tokens = None if self.tokens is None else self.tokens.clone()
        copy.streams = [stream.fork() for stream in self.streams]
        copy.decoder, copy.decoding = None, False  # it has buffers of its own, so its graph must be its own
        copy.before = None if self.before is None else self.before.fork()
        return copy

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, memo: dict) -> Self:
        return self.fork()  # of the same model: its weights are not part of a cache

    def rollback(self, tokens: int) -> None:
        """Take back the newest tokens of every row: exact inside the open block, an error beyond it.

        From `activate_past_recording()` on, the block before the open one can be taken back too, if all rows are back
        in it then.
        """
        if tokens < 0:
            raise ValueError(f"rollback({tokens}): give the number of tokens to take back")
        if not tokens:
            return
        clock = [now - tokens for now in self.clock]
        if not self._reaches(clock):
            if self.before is None or not self.before._reaches(clock):
                raise ValueError(
                    f"rollback({tokens}): only {min(self.opened, default=0)} tokens are in the open block; older ones "
                    "are compressed. Take a fork() before you read what you may want to undo"
                )
            for name in ("streams", "seen", "digests", "parts", "name", "tokens"):
                setattr(self, name, getattr(self.before, name))
            self.before = None
        self.opened = [now - seen for now, seen in zip(clock, self.seen, strict=True)]
        self.columns -= tokens
        self.decoding = False

    def _reaches(self, clock: list[int]) -> bool:
        """Whether these times are in the open blocks."""
        spans = zip(self.seen, clock, self.clock, strict=True)
        return bool(self.streams) and all(seen <= then <= now for seen, then, now in spans)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, exact: bool = False) -> None:
        """Write a memory file: state, clock, and the open block as token ids, which loading reads again.

        `exact=True` stores the open block's keys and values instead: larger, and bit for bit what was saved.
        """
        memory_file.save(self, Path(path), exact)

    @classmethod
    def load(cls, path: str | Path, model: "MemoryCausalLM", force: bool = False, static: bool = False) -> Self:
        """Read a memory file. Another model's is refused; `force=True` accepts other weights if all shapes agree."""
        cache = cls(model, static)
        with torch.inference_mode(False), torch.no_grad():
            memory_file.load(cache, Path(path), force)
        return cache

    def nbytes(self) -> int:
        """Bytes it holds now."""
        own = [] if self.tokens is None else [self.tokens]
        own += [x for stream in self.streams for x in stream.tensors()]
        own += [] if self.decoder is None else self.decoder.tensors()
        held = {id(x): x.numel() * x.element_size() for x in own}  # the decoder's buffers may be the open block
        return sum(held.values()) + (0 if self.before is None else self.before.nbytes())

    # -- what transformers asks of a cache -----------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns fed so far, padding included: `generate` counts in columns."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """As for any cache that has kept everything; no such mask is ever used."""
        return self.columns + query_length, 0

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Beam search."""
        self.select(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, " rows"]) -> None:
        """Keep some rows."""
        self.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Fork every row."""
        self.select(torch.arange(self.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """`rollback`, as transformers spells it: minus the number of tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give minus the number of tokens to remove")
        self.rollback(-int(tokens_to_remove))  # speculative decoding counts in tensors

    def activate_past_recording(self) -> None:
        """Keep one block more, so that speculative decoding can take back what it has read across a block's end.

        It stays on until `reset()`: a cache that has served speculative decoding holds up to twice as much.
        """
        self.recording = True

    is_compileable = False
    is_initialized = True
    is_croppable = True

    @property
    def is_sliding(self) -> list[bool]:
        """No layer of transformers' kind."""
        return [False] * len(self.memories)

    def __len__(self) -> int:
        return len(self.memories)

    def __repr__(self) -> str:
        return f"MemoryCache(rows={self.batch}, clock={self.clock}, bytes={self.nbytes():,})"
