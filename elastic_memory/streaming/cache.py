"""`MemoryCache`: what a model remembers between calls, of constant size, for `generate` and for streams of any length.

A block is folded into memory when the first token after it arrives, not before: so at least the newest token can
always be taken back, and a rollback inside the open block is exact.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers.cache_utils import Cache

from elastic_memory.fast.decoder import Decoder
from elastic_memory.shapes import Int, Tensor
from elastic_memory.streaming import memory_file
from elastic_memory.streaming.composing import Composing, digest
from elastic_memory.streaming.layer_cache import LayerStream, Part, Segment

if TYPE_CHECKING:
    from elastic_memory.model.modeling import MemoryCausalLM


TEXTS = 1000  # that a cache can tell were read; each is 32 characters in a memory file
AT_ONCE = 2**14  # tokens of whole blocks that a stream reads in one go: enough for long products, little to hold


class MemoryCache(Composing, Cache):
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

    def reset(self) -> None:
        """Forget everything."""
        self.streams: list[LayerStream] = []
        self.seen: list[int] = []  # tokens in memory, by row
        self.opened: list[int] = []  # tokens in the open block, by row
        self.columns = 0  # columns fed so far, padding included
        self.tokens: Tensor | None = None  # ids of the open block
        self.name: str | None = None  # of the text that is being read
        self.parts: list[list[Part]] = []  # by row: texts that have ended, before the one that is being read
        self.digests: list[str | None] = []  # by row: of the present text's ids in memory; None if they are unknown
        self.texts: list[str] = []  # what was read, as whoever gave it to the model calls it, newest last
        self.decoder: Decoder | None = None
        self.decoding = False  # whether the decoder's buffers are what this cache holds
        self.recording = False
        self.before: Self | None = None  # if recording: this cache as it was when its newest block closed
        self.undo: dict[str, Any] | None = None  # inside a call: the fields to go back to if it fails

    # -- clock ---------------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> list[int]:
        """Tokens read so far, by row."""
        return [seen + opened for seen, opened in zip(self.seen, self.opened, strict=True)]

    @property
    def batch(self) -> int:
        """Number of rows; 0 before the first call."""
        return len(self.seen)

    def begin(self, batch: int, device: torch.device) -> None:
        """Make room for `batch` rows, or check that they fit."""
        if not self.streams:
            self.mark()
            sliding = self.locality.sliding
            self.streams = [
                LayerStream(memory, batch, device, keep_raw=sliding or bool(memory.start(1, "meta")))
                for memory in self.memories
            ]
            self.seen, self.opened, self.digests, self.device = [0] * batch, [0] * batch, [""] * batch, device
            self.parts = [[] for _ in range(batch)]
        elif device != self.device:
            raise ValueError(f"tokens on {device}, a cache on {self.device}: save it, and load it where the model is")
        elif batch != self.batch:
            if batch % self.batch:
                raise ValueError(f"a call with {batch} rows on a cache of {self.batch}: give as many, or a multiple")
            self.mark()
            self.batch_repeat_interleave(batch // self.batch)

    def segment(self, takes: list[int], rope: Any, device: torch.device) -> Segment:
        """The next tokens of each row, `takes[b]` of them, as the layers see them."""
        width = max(takes)
        # Rows that merely end sooner need no mask: what stands behind their last token nobody can see.
        uniform = len(set(zip(self.seen, self.opened, strict=True))) == 1
        starts = torch.tensor(self.opened[:1] if uniform else self.opened)
        positions = (starts[:, None] + torch.arange(width)).to(device)
        window = self.block_size if self.locality.sliding else None
        return Segment(list(self.opened), width, positions, rope.at(positions), list(self.seen), window)

    def advance(self, takes: list[int], ids: Int[Tensor, "batch token"] | None) -> None:
        """Move the clocks; remember the ids, from which a saved open block is computed anew."""
        if ids is None:
            self.tokens = None
        elif self.tokens is not None or not any(self.opened):
            room = max(opened + ids.shape[1] for opened in self.opened)
            if self.tokens is None or self.tokens.shape[1] < room:
                grown = ids.new_zeros(self.batch, max(64, 1 << (room - 1).bit_length()))
                if self.tokens is not None:
                    grown[:, : self.tokens.shape[1]] = self.tokens
                self.tokens = grown
            places = torch.tensor(self.opened, device=ids.device)[:, None] + torch.arange(
                ids.shape[1], device=ids.device
            )
            self.tokens.scatter_(1, places, ids)
        self.opened = [opened + take for opened, take in zip(self.opened, takes, strict=True)]

    def full_rows(self, wanting: list[bool]) -> dict[int, list[int]]:
        """Rows whose open block is complete and that have more to read, by tokens in memory."""
        groups: dict[int, list[int]] = {}
        for row, (seen, opened) in enumerate(zip(self.seen, self.opened, strict=True)):
            if opened == self.block_size and wanting[row]:
                groups.setdefault(seen, []).append(row)
        return groups

    def record(self) -> None:
        """Before blocks close: keep what rolling back to before their end takes, if somebody might ask for it."""
        if self.recording:
            self.before = None  # or copies would hold copies
            self.before = self.fork()

    def closed(self, rows: list[int]) -> None:
        """The open blocks of `rows`, all of one length, are in memory now."""
        opened = self.opened[rows[0]]
        blocks = [None] * len(rows) if self.tokens is None else self.tokens[rows, :opened].cpu()
        for row, ids in zip(rows, blocks, strict=True):
            self.digests[row] = digest(self.digests[row], ids)
            self.seen[row] += self.opened[row]
            self.opened[row] = 0
        if self.tokens is not None:  # the next block's ids must not overwrite what a failing call goes back to
            self.tokens = self.tokens.clone()

    def whole_blocks(self, remaining: list[int]) -> int:
        """How many blocks to read at once, each followed by more tokens: of rows with one clock, nothing open."""
        alike = len(set(self.seen)) == 1 and not any(self.opened)
        if not alike or self.recording or self.locality.sliding or not all(memory.parallel for memory in self.memories):
            return 0
        blocks = min(min(remaining) - 1, AT_ONCE // self.batch) // self.block_size
        return blocks if blocks > 1 else 0

    def passed(self, blocks: int, ids: Int[Tensor, "batch token"] | None) -> None:
        """So many blocks of all rows are in memory now."""
        self.tokens = None if ids is None else self.tokens
        pieces = [None] * blocks if ids is None else ids.cpu().split(self.block_size, dim=1)
        for piece in pieces:
            for row in range(self.batch):
                self.digests[row] = digest(self.digests[row], None if piece is None else piece[row])
        self.seen = [seen + blocks * self.block_size for seen in self.seen]

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self, rope: Any) -> None:
        """Follow a change of retrieval settings since the last call, and say what became of the states."""
        layers = zip(self.model.base_model.layers, self.streams, strict=True)
        said = {stream.refresh(self.seen, layer.host(rope), self.model.dtype) for layer, stream in layers} - {None}
        for sentence in sorted(filter(None, said)):
            warnings.warn(f"memory of a warm cache: {sentence}", stacklevel=4)

    # -- calls that fail -----------------------------------------------------------------------------------------------

    @torch.compiler.disable(recursive=False)  # what `forward` computes may be compiled all the same
    def whole_call(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """What `forward` returns; if it fails, the cache is as it was.

        No tensor is copied for that: a call writes into open blocks behind what was read, and replaces all else.
        """
        if self.undo is not None:  # a call inside a call
            return forward(*args, **kwargs)
        self.undo = {"opened": self.opened, "columns": self.columns}  # all that a step of the decoder changes
        try:
            return forward(*args, **kwargs)
        except BaseException:
            self.__dict__.update(self.undo, decoding=False)
            raise
        finally:
            self.undo = None

    def mark(self, anew: bool = False) -> None:
        """Before more than the clocks changes: keep it to go back to; `anew`, even if something is kept already."""
        if self.undo is not None and (anew or "streams" not in self.undo):
            self.undo = vars(self._view())

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

    def _view(self) -> Self:
        """A copy with clocks and lists of its own, on the same tensors."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.seen, copy.opened, copy.digests = list(self.seen), list(self.opened), list(self.digests)
        copy.parts = [list(parts) for parts in self.parts]
        copy.streams = [stream.view() for stream in self.streams]
        copy.before = None if self.before is None else self.before._view()
        copy.undo = None
        return copy

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
