"""Reading tokens in constant memory: the clock of each row, and the loop that fills open blocks and closes full ones.

A block is written into memory when the first token after it arrives, not before: so at least the newest token can
always be taken back, and a rollback inside the open block is exact.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Self

import torch

from elastic_memory.attention import without_cudnn
from elastic_memory.common.speedups import find
from elastic_memory.memory import ParallelMemory
from elastic_memory.shapes import Float, Int, Tensor
from elastic_memory.streaming.composing import digest
from elastic_memory.streaming.layer_cache import LayerCache, Part, Segment
from elastic_memory.streaming.packing import Rows, from_mask

AT_ONCE = 2**14  # tokens of whole blocks that a stream reads in one go: enough for long products, little to hold

# What a mixin is mixed into: a cache of transformers.
Mixed: Any = object


class Reader(Mixed):
    """The fields of a `MemoryCache`, and all that changes them while tokens are read."""

    def reset(self) -> None:
        """Forget everything."""
        self.streams: list[LayerCache] = []
        self.seen: list[int] = []  # tokens in memory, by row
        self.opened: list[int] = []  # tokens in the open block, by row
        self.columns = 0  # columns fed so far, padding included
        self.tokens: Tensor | None = None  # ids of the open block
        self.name: str | None = None  # of the text that is being read
        self.parts: list[list[Part]] = []  # by row: texts that have ended, before the one that is being read
        self.digests: list[str | None] = []  # by row: of the present text's ids in memory; None if they are unknown
        self.texts: list[str] = []  # what was read, as whoever gave it to the model calls it, newest last
        self.decoder: Any = None  # of fast/
        self.decoding = False  # whether the decoder's buffers are what this cache holds
        self.recording = False
        self.before: Self | None = None  # if recording: this cache as it was when its newest block closed
        self.undo: dict[str, Any] | None = None  # inside a call: the fields to go back to if it fails

    @property
    def clock(self) -> list[int]:
        """Tokens read so far, by row."""
        return [seen + opened for seen, opened in zip(self.seen, self.opened, strict=True)]

    @property
    def batch(self) -> int:
        """Number of rows; 0 before the first call."""
        return len(self.seen)

    # -- the loop ------------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # clocks and buffers are Python's; a compiled model streams as it is
    @torch.inference_mode(False)  # a cache filled in inference mode must be of use outside it
    @torch.no_grad()  # innermost: leaving inference mode would switch gradients on again
    def feed(
        self,
        backbone: Any,
        ids: Tensor | None,
        embeds: Tensor | None,
        mask: Tensor | None,
        keep: int = 0,
        every: bool = False,
    ) -> list[Float[Tensor, "batch column width"]]:
        """Feed the columns to each row's open block, closing blocks as they fill: constant memory for any length.

        Hidden states of the last `keep` columns: the last ones, or if asked `every` layer's, the embeddings first.
        """
        if self.owner is not backbone.layers:
            raise ValueError("past_key_values belongs to another model: save it, and load it with this one")
        ids = None if ids is None else ids.long()
        source: Any = ids if ids is not None else embeds
        batch, columns = source.shape[:2]
        self.begin(batch, source.device)
        rows = _padded_rows(mask, columns)
        probed = any([attention.corrupt is not None for attention in self.attentions])
        captured = self.static and find("decoder") and (self.decoder is not None or not backbone.offloaded())
        if captured and columns == 1 and ids is not None and rows is None and not probed and not every:
            return [self._decode(backbone, ids)]
        self.mark()
        self.decoding = False
        lengths = rows.lengths if rows else [columns] * batch
        outputs = _Outputs(backbone, source, lengths, mask, keep, every)
        aligned = rows.align(source) if rows else source
        self.refresh()

        done = [0] * batch
        while any(remaining := [length - start for start, length in zip(done, lengths, strict=True)]):
            self._close_full(backbone, [tokens > 0 for tokens in remaining])
            whole = 0 if probed else self.whole_blocks(remaining)
            takes = [
                whole * self.block_size or min(self.block_size - opened, tokens)
                for opened, tokens in zip(self.opened, remaining, strict=True)
            ]
            piece = _cut(aligned, done, max(takes))
            hidden = backbone.residual(backbone.embed_tokens(piece) if ids is not None else piece)
            with without_cudnn():
                for index, state in enumerate(self._through_layers(backbone, hidden, takes, whole)):
                    outputs.take(index, state, done, takes)
            known = piece if ids is not None else None
            if whole:
                self.passed(whole, known)
            else:
                self.advance(takes, known)
            done = [start + take for start, take in zip(done, takes, strict=True)]
        self.columns += columns
        kept = outputs.finished()
        return [*kept[:-1], backbone.norm(kept[-1])]

    def _through_layers(
        self, backbone: Any, hidden: Tensor, takes: list[int], whole: int
    ) -> Iterator[Float[Tensor, "batch token width"]]:
        """What enters each layer, and what leaves the last: of whole blocks of all rows, or tokens of open blocks."""
        how: dict[str, Any]
        if whole:
            step, how = LayerCache.pass_blocks, {"rope": backbone.rope(self.block_size), "seen": self.seen[0]}
        else:
            step, how = LayerCache.step, {"segment": self.segment(takes, backbone, hidden.device)}
        for layer, stream in zip(backbone.layers, self.streams, strict=True):
            yield hidden
            hidden = layer(hidden, step=partial(step, stream, **how))
        yield hidden

    def _close_full(self, backbone: Any, wanting: list[bool]) -> bool:
        """Write the complete open blocks of rows that have more to read into memory."""
        groups = self.full_rows(wanting)
        if groups:
            self.record()
        for seen, full in groups.items():
            self.close_rows(backbone, full, seen, self.block_size)
        return bool(groups)

    def close_rows(self, backbone: Any, rows: list[int], seen: int, size: int) -> None:
        """Write the open blocks of `rows`, `size` tokens from token `seen` on, into memory."""
        rope = backbone.rope()
        for layer, stream in zip(backbone.layers, self.streams, strict=True):
            stream.close(layer, rope, rows, seen, size)
        self.closed(rows)

    def _decode(self, backbone: Any, ids: Int[Tensor, "batch 1"]) -> Float[Tensor, "batch 1 width"]:
        """One token of each row by the cache's decoder, which is filled anew whenever blocks close."""
        decoders = find("decoder").Decoder
        settled = self.decoder.settled if self.decoder is not None and self.decoding else None
        if settled != decoders.conditions(backbone, self.streams) or self.block_size in self.opened:
            self.mark()
            self.refresh()
            if self._close_full(backbone, [True] * len(ids)):
                self.mark(anew=True)  # the decoder writes over the blocks that are in memory now
            self.decoder = decoders.fitting(self.decoder, backbone, self.streams, ids)
            self.tokens = self.decoder.take(self.streams, self.seen, self.opened, self.tokens)
            self.decoding = True
        hidden = self.decoder(ids, max(self.opened))  # type: ignore[misc]
        self.opened = [opened + 1 for opened in self.opened]
        self.columns += 1
        return hidden

    # -- clocks --------------------------------------------------------------------------------------------------------

    def begin(self, batch: int, device: torch.device) -> None:
        """Make room for `batch` rows, or check that they fit."""
        if not self.streams:
            self.mark()
            sliding = self.locality.sliding
            self.streams = [
                LayerCache(memory, batch, device, keep_raw=sliding or bool(memory.start(1, "meta")))
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

    def segment(self, takes: list[int], backbone: Any, device: torch.device) -> Segment:
        """The next tokens of each row, `takes[b]` of them, as the layers see them."""
        width = max(takes)
        # Rows that merely end sooner need no mask: what stands behind their last token nobody can see.
        uniform = len(set(zip(self.seen, self.opened, strict=True))) == 1
        starts = torch.tensor(self.opened[:1] if uniform else self.opened)
        positions = (starts[:, None] + torch.arange(width)).to(device)
        window = self.block_size if self.locality.sliding else None
        like = torch.empty((), dtype=backbone.embed_tokens.weight.dtype, device=device)
        rope = backbone.rotary_emb(like, positions)
        return Segment(list(self.opened), width, positions, rope, list(self.seen), window)

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
        parallel = all(isinstance(memory, ParallelMemory) for memory in self.memories)
        if not alike or self.recording or self.locality.sliding or not parallel:
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
    def refresh(self) -> None:
        """Follow a change of retrieval settings since the last call, and say what became of the states."""
        if not any([stream.stale for stream in self.streams]):
            return
        rope = self.model.base_model.rope()
        layers = zip(self.owner, self.streams, strict=True)
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


def whole_calls(forward: Callable) -> Callable:
    """A model's `forward` that changes its cache entirely or, if anything in it fails, not at all."""

    @wraps(forward)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values", args[3] if len(args) > 3 else None)
        if isinstance(cache, Reader):
            return cache.whole_call(forward, model, *args, **kwargs)
        return forward(model, *args, **kwargs)

    return call


class _Outputs:
    """Hidden states of the last columns of a call, collected while pieces of it are read.

    Of each row only the tokens among the last columns are wanted, those from `firsts` on.
    """

    def __init__(self, backbone: Any, source: Tensor, lengths: list[int], mask: Tensor | None, keep: int, every: bool):
        batch, columns = source.shape[:2]
        wanted, self.last = min(keep or columns, columns), len(backbone.layers)
        self.tail = _padded_rows(mask, wanted)
        counts = self.tail.lengths if self.tail else [wanted] * batch
        self.firsts = [length - count for length, count in zip(lengths, counts, strict=True)]
        weight, width = backbone.embed_tokens.weight, backbone.config.hidden_size
        self.kept = {
            index: weight.new_zeros(batch, wanted, width, device=source.device)
            for index in range(0 if every else self.last, self.last + 1)
        }

    def take(self, index: int, hidden: Tensor, done: list[int], takes: list[int]) -> None:
        """Copy what is wanted of a piece: what enters layer `index`, of tokens `done` to `done + takes` of each row."""
        if index not in self.kept:
            return
        spans = list(zip(self.firsts, done, takes, strict=True))
        for span in set(spans):
            first, start, take = span
            begin, end = max(first, start), start + take
            if begin < end:
                rows = slice(None) if len(set(spans)) == 1 else [row for row, own in enumerate(spans) if own == span]
                kept = self.kept[index]
                kept[rows, begin - first : end - first] = hidden[rows, begin - start : take].to(kept.dtype)

    def finished(self) -> list[Float[Tensor, "batch column width"]]:
        """What was collected, in the call's own columns."""
        return [self.tail.restore(part) if self.tail else part for part in self.kept.values()]


def _padded_rows(mask: Tensor | None, columns: int) -> Rows | None:
    """The layout of the new columns, if any of them is padding."""
    if mask is None:
        return None
    new = mask[:, -columns:]
    return None if bool(new.all()) else from_mask(new)


def _cut(x: Tensor, starts: list[int], width: int) -> Tensor:
    """`width` tokens of each row from its own start; what lies behind a row's end repeats its last token."""
    if len(set(starts)) == 1:
        return x[:, starts[0] : starts[0] + width]
    places = torch.tensor(starts, device=x.device)[:, None] + torch.arange(width, device=x.device)
    return x[torch.arange(len(x), device=x.device)[:, None], places.clamp(max=x.shape[1] - 1)]
