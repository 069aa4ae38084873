"""Reading tokens in constant memory: the clock of each row, and the loop that fills open blocks and closes full ones.

A full block is written into memory when the next token arrives, not before. So the newest token can always be taken
back, and a rollback inside the open block is exact.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, Self

import torch
from transformers.cache_utils import Cache

from elastic_memory.attention import without_cudnn
from elastic_memory.common.speedups import find
from elastic_memory.memory import ParallelMemory
from elastic_memory.shapes import Float, Int, Tensor
from elastic_memory.streaming.layer_cache import LayerCache, Segment
from elastic_memory.streaming.packing import Packing, from_mask
from elastic_memory.streaming.texts import ReadText, digest

AT_ONCE = 2**14  # tokens of whole blocks that are read together: enough for large matrix products, little to hold


def check_ids(ids: Tensor) -> Int[Tensor, "batch column"]:
    """Refuse ids that are not integers [batch, column]; fractions would be cut off silently."""
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        what = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"tokens: {what}: give integer ids as a tensor [batch, column], such as ids[None] for one row")
    return ids


class Reader(Cache):
    """The fields of a `MemoryCache` and the methods that change them while tokens are read."""

    def __init__(self, model: Any, static: bool = False):
        if not hasattr(model, "base_model"):
            raise ValueError(f"MemoryCache of a {type(model).__name__}: give the model that reads with it")
        super().__init__(layers=[])
        self.model: Any = getattr(model, "_orig_mod", model)  # what torch.compile wraps
        self.static = static
        self.owner = model.base_model.layers  # `layers` is a field of transformers' caches
        # Lists, because every token needs them and looking up submodules is slow.
        self.memories = [layer.memory for layer in self.owner]
        self.attentions = [layer.self_attn for layer in self.owner]
        self.locality, self.sliding = self.owner[0].locality, self.owner[0].locality.sliding
        self.block_size = 2**62 if self.locality.kind == "full" else self.locality.block_size
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.streams: list[LayerCache] = []
        self.seen: list[int] = []  # tokens in closed blocks, by row
        self.opened: list[int] = []  # tokens in the open block, by row
        self.columns = 0  # columns fed so far, padding included
        self.tokens: Tensor | None = None  # ids of the open block
        self.name: str | None = None  # of the text that is being read
        self.parts: list[list[ReadText]] = []  # texts that have ended, by row
        self.digests: list[str | None] = []  # of the present text's ids in memory, by row; None if unknown
        self.texts: list[str] = []  # digests of the texts that callers noted as read, newest last
        self.decoder: Any = None  # captured steps: fast/decoder.py
        self.decoding = False  # whether the decoder's buffers hold this cache's open blocks
        self.recording = False  # whether to keep `before`
        self.before: Any = None  # this cache as it was when its newest block closed
        self.undo: dict[str, Any] | None = None  # during a call: the fields to restore if it fails

    @property
    def clock(self) -> list[int]:
        """Tokens read so far, by row."""
        return [seen + opened for seen, opened in zip(self.seen, self.opened, strict=True)]

    @property
    def batch(self) -> int:
        """Number of rows; 0 before the first call."""
        return len(self.seen)

    # -- the loop ------------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # clocks and buffers are Python objects; compiled models stream uncompiled
    @torch.inference_mode(False)  # a cache filled in inference mode must be usable outside it
    @torch.no_grad()  # innermost: leaving inference mode would enable gradients again
    def feed(
        self,
        backbone: Any,
        ids: Tensor | None,
        embeds: Tensor | None,
        mask: Tensor | None,
        keep: int = 0,
        every: bool = False,
    ) -> list[Float[Tensor, "batch column width"]]:
        """Read columns of tokens into each row's open block, and close blocks as they fill.

        Returns the hidden states of the last `keep` columns (0: of all columns): those of the last layer, or with
        `every` the embeddings and those of all layers.
        """
        if self.owner is not backbone.layers:
            raise ValueError("past_key_values belongs to another model: save it, and load it with this one")
        ids = None if ids is None else check_ids(ids).long()
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
        if ids is not None and rows is None and keep and not every and columns - keep > 2 * self.block_size:
            source = ids = ids[:, self.read_ahead(ids[:, :-keep]) :]
            columns = source.shape[1]
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
                self.advance_blocks(whole, known)
            else:
                self.advance(takes, known)
            done = [start + take for start, take in zip(done, takes, strict=True)]
        self.columns += columns
        kept = outputs.finished()
        return [*kept[:-1], backbone.norm(kept[-1])]

    def _through_layers(
        self, backbone: Any, hidden: Tensor, takes: list[int], whole: int
    ) -> Iterator[Float[Tensor, "batch token width"]]:
        """The embeddings and each layer's output: for `whole` blocks, or the next tokens of open ones."""
        step: Callable[..., Tensor]
        if whole:
            step = partial(LayerCache.pass_blocks, rope=backbone.rope(self.block_size), seen=self.seen[0])
        else:
            step = partial(LayerCache.step, segment=self.segment(takes, backbone, hidden.device))
        for layer, stream in zip(backbone.layers, self.streams, strict=True):
            yield hidden
            hidden = layer(hidden, step=partial(step, stream))
        yield hidden

    def _close_full(self, backbone: Any, unfinished: list[bool]) -> bool:
        """Write full blocks of unfinished rows into memory. Returns whether there were any."""
        full = [row for row, opened in enumerate(self.opened) if opened == self.block_size and unfinished[row]]
        if full:
            self.record()
            self.close_rows(backbone, full)
        return bool(full)

    def close_rows(self, backbone: Any, rows: list[int]) -> None:
        """Write the open blocks of `rows` into memory; rows with the same clock together."""
        groups: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            groups.setdefault((self.seen[row], self.opened[row]), []).append(row)
        rope = backbone.rope()
        for (seen, opened), group in groups.items():
            for layer, stream in zip(backbone.layers, self.streams, strict=True):
                stream.close(layer, rope, group, seen, opened)
            blocks = [None] * len(group) if self.tokens is None else self.tokens[group, :opened].cpu()
            for row, ids in zip(group, blocks, strict=True):
                self.digests[row] = digest(self.digests[row], ids)
                self.seen[row] += opened
                self.opened[row] = 0
        if self.tokens is not None:  # a failing call restores these ids: the next block must not overwrite them
            self.tokens = self.tokens.clone()

    def _decode(self, backbone: Any, ids: Int[Tensor, "batch 1"]) -> Float[Tensor, "batch 1 width"]:
        """One token of each row by the captured step, whose buffers are filled again whenever blocks close."""
        decoders = find("decoder").Decoder
        settled = self.decoder.settled if self.decoder is not None and self.decoding else None
        if settled != decoders.conditions(backbone, self.streams) or self.block_size in self.opened:
            self.mark()
            self.refresh()
            if self._close_full(backbone, [True] * len(ids)):
                self.mark(anew=True)  # the decoder overwrites the blocks that were just closed
            self.decoder = decoders.fitting(self, backbone, ids)
            self.tokens = self.decoder.take(self.streams, self.seen, self.opened, self.tokens)
            self.decoding = True
        hidden = self.decoder(ids, max(self.opened))  # type: ignore[misc]
        self.opened = [opened + 1 for opened in self.opened]
        self.columns += 1
        return hidden

    def read_ahead(self, ids: Int[Tensor, "batch token"]) -> int:
        """Read leading columns of `ids`, whose hidden states nobody needs, in parallel. Returns how many."""
        raise NotImplementedError

    # -- clocks --------------------------------------------------------------------------------------------------------

    def begin(self, batch: int, device: torch.device) -> None:
        """Start `batch` rows, or check that a call with so many fits this cache; one row may become several."""
        if not self.streams:
            self.mark()
            self.streams = [LayerCache(layer, batch, device) for layer in self.owner]
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
        """The next tokens of each row, `takes[row]` of them, as layers need them."""
        width = max(takes)
        # Rows that only end sooner need no mask: no token sees what comes after it.
        uniform = len(set(zip(self.seen, self.opened, strict=True))) == 1
        starts = torch.tensor(self.opened[:1] if uniform else self.opened)
        positions = (starts[:, None] + torch.arange(width)).to(device)
        like = torch.empty((), dtype=backbone.embed_tokens.weight.dtype, device=device)
        rope = backbone.rotary_emb(like, positions)
        return Segment(list(self.opened), width, positions, rope, list(self.seen))

    def advance(self, takes: list[int], ids: Int[Tensor, "batch token"] | None) -> None:
        """Move the clocks inside open blocks. Ids are kept: loading a file reads its open block again."""
        if ids is None:
            self.tokens = None
        elif self.tokens is not None or not any(self.opened):
            room = max(opened + ids.shape[1] for opened in self.opened)
            if self.tokens is None or self.tokens.shape[1] < room:
                grown = ids.new_zeros(self.batch, max(64, 1 << (room - 1).bit_length()))
                if self.tokens is not None:
                    grown[:, : self.tokens.shape[1]] = self.tokens
                self.tokens = grown
            starts = torch.tensor(self.opened, device=ids.device)[:, None]
            self.tokens.scatter_(1, starts + torch.arange(ids.shape[1], device=ids.device), ids)
        self.opened = [opened + take for opened, take in zip(self.opened, takes, strict=True)]

    def record(self) -> None:
        """Before blocks close, if recording: keep a copy to roll back to."""
        if self.recording:
            self.before = None  # or copies would hold copies
            self.before = self.fork()

    def whole_blocks(self, remaining: list[int]) -> int:
        """How many whole blocks to read together: only if rows have the same clock, nothing open, and more to read."""
        uniform = len(set(self.seen)) == 1 and not any(self.opened)
        parallel = all(isinstance(memory, ParallelMemory) for memory in self.memories)
        if not uniform or self.recording or self.sliding or not parallel:
            return 0
        blocks = min(min(remaining) - 1, AT_ONCE // self.batch) // self.block_size
        return blocks if blocks > 1 else 0

    def advance_blocks(self, blocks: int, ids: Int[Tensor, "batch token"] | None) -> None:
        """Move the clocks by whole blocks that were written into memory."""
        self.tokens = None if ids is None else self.tokens
        pieces = [None] * blocks if ids is None else ids.cpu().split(self.block_size, dim=1)
        for piece in pieces:
            for row in range(self.batch):
                self.digests[row] = digest(self.digests[row], None if piece is None else piece[row])
        self.seen = [seen + blocks * self.block_size for seen in self.seen]

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Apply changes of retrieval settings since the last call, with a warning where a state changed."""
        if not any([stream.stale for stream in self.streams]):
            return
        rope = self.model.base_model.rope()
        layers = zip(self.owner, self.streams, strict=True)
        changes = {stream.refresh(self.seen, layer.host(rope), self.model.dtype) for layer, stream in layers}
        for change in sorted(filter(None, changes)):
            warnings.warn(f"memory of a warm cache: {change}", stacklevel=4)

    # -- calls that fail -----------------------------------------------------------------------------------------------

    @torch.compiler.disable(recursive=False)  # `forward` itself may be compiled
    def whole_call(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`, and restore the cache if it fails.

        That needs no copies of tensors: a call writes only after the open tokens, and replaces all other tensors.
        """
        if self.undo is not None:  # a call inside a call
            return forward(*args, **kwargs)
        self.undo = {"opened": self.opened, "columns": self.columns}  # all that the decoder changes
        try:
            return forward(*args, **kwargs)
        except BaseException:
            self.__dict__.update(self.undo, decoding=False)
            raise
        finally:
            self.undo = None

    def mark(self, anew: bool = False) -> None:
        """Keep all fields for a restore, before anything but a clock changes; `anew`: replace those kept already."""
        if self.undo is not None and (anew or "streams" not in self.undo):
            self.undo = vars(self._view())

    def _view(self) -> Self:
        """A shallow copy: its own lists, the same tensors."""
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
        """An independent copy; the original is unaffected by what happens to it."""
        copy = self._view()
        copy.tokens = None if self.tokens is None else self.tokens.clone()
        copy.streams = [stream.fork() for stream in self.streams]
        copy.decoder, copy.decoding = None, False  # it has buffers of its own, so its graph must be its own
        copy.before = None if self.before is None else self.before.fork()
        return copy


def whole_calls(forward: Callable) -> Callable:
    """Decorates a model's `forward`: a call that fails leaves its cache unchanged."""

    @wraps(forward)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values", args[3] if len(args) > 3 else None)
        if isinstance(cache, Reader):
            return cache.whole_call(forward, model, *args, **kwargs)
        return forward(model, *args, **kwargs)

    return call


class _Outputs:
    """Hidden states of the last columns of a call, collected piece by piece; `firsts`: the first token, by row."""

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
        """Collect a piece, `takes` tokens of each row after `done`; `index`: layers passed, 0 for embeddings."""
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
        """All that was collected, in the columns of the call."""
        return [self.tail.restore(part) if self.tail else part for part in self.kept.values()]


def _padded_rows(mask: Tensor | None, columns: int) -> Packing | None:
    """The packing that moves real tokens to the front, if the new columns have padding."""
    if mask is None:
        return None
    new = mask[:, -columns:]
    return None if bool(new.all()) else from_mask(new)


def _cut(x: Tensor, starts: list[int], width: int) -> Tensor:
    """`width` tokens of each row from its own start; rows that end sooner repeat their last token."""
    if len(set(starts)) == 1:
        return x[:, starts[0] : starts[0] + width]
    places = torch.tensor(starts, device=x.device)[:, None] + torch.arange(width, device=x.device)
    return x[torch.arange(len(x), device=x.device)[:, None], places.clamp(max=x.shape[1] - 1)]
