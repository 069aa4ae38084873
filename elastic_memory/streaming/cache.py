"""`MemoryCache`: what a model remembers between calls, in constant memory; for `generate` and streams of any length."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import torch

from elastic_memory.memory import State
from elastic_memory.shapes import Int, Tensor
from elastic_memory.streaming import joining, memory_file
from elastic_memory.streaming.reader import Reader, check_ids
from elastic_memory.streaming.texts import ReadText, digest, digest_text

TEXTS = 1000  # how many digests of texts a cache keeps, 32 characters each in a memory file


class MemoryCache(Reader):
    """The memory, the open block and the clock of each row of a batch. Pass it as `past_key_values`.

    A cache of one row given to a call with several rows is forked for each of them: one book, many questions.

    `static=True` allocates a whole block from the start, and decodes single tokens by a CUDA graph.

    Set `name` to name the text that is being read; joined caches and memory files list the names of their parts.
    """

    # -- rows and rollback ---------------------------------------------------------------------------------------------

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

    def __copy__(self) -> Self:
        return self.fork()

    def __deepcopy__(self, memo: dict) -> Self:
        return self.fork()  # of the same model: its weights are not part of a cache

    def rollback(self, tokens: int) -> None:
        """Take back the newest tokens of every row: exact inside the open block, an error beyond it.

        After `activate_past_recording()` the block before the open one can be taken back too, if all rows are back in
        it then.
        """
        if tokens < 0 or not isinstance(tokens, Integral):
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
        """Whether every row's time in `clock` lies in its open block."""
        spans = zip(self.seen, clock, self.clock, strict=True)
        return bool(self.streams) and all(seen <= then <= now for seen, then, now in spans)

    @contextmanager
    def newest_again(self) -> Iterator[None]:
        """Take the newest token back for a second read in this context; without one, put it back at the end."""
        opened, columns = self.opened, self.columns
        self.rollback(1)
        clock = self.clock
        try:
            yield
        finally:
            if self.clock == clock:
                self.opened, self.columns = opened, columns

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Decode single tokens by captured steps in this context, as a static cache does."""
        static, self.static = self.static, True
        try:
            yield
        finally:
            self.static = static

    # -- texts ---------------------------------------------------------------------------------------------------------

    def holds(self, ids: Int[Tensor, "rows column"], mask: Int[Tensor, "rows column"] | None = None) -> bool:
        """Whether `ids` begins with all that was read. False if some of that was embeddings, whose ids are unknown."""
        check_ids(ids)
        if len(ids) % self.batch or ids.shape[1] < self.columns:
            return False
        repeats, columns = len(ids) // self.batch, ids[:, : self.columns].cpu().long()
        real = torch.ones_like(columns) if mask is None else mask[:, : self.columns].cpu()
        return all(self._has_read(row // repeats, columns[row, real[row] != 0]) for row in range(len(ids)))

    def _has_read(self, row: int, ids: Int[Tensor, " token"]) -> bool:
        """Whether a row has read exactly the last of these tokens: what comes before them is padding."""
        seen, opened, known = self.seen[row], self.opened[row], self.digests[row]
        if known is None or len(ids) < seen + opened or (opened and self.tokens is None):
            return False
        ids = ids[len(ids) - seen - opened :]
        if opened and not torch.equal(ids[seen:], self.tokens[row, :opened].cpu()):  # type: ignore[index]
            return False
        for part in [*self.parts[row], ReadText(self.name, self._closed_tokens(row), known)]:
            if digest_text(ids[: part.tokens], self.block_size) != part.digest:
                return False
            ids = ids[part.tokens :]
        return True

    def close(self) -> None:
        """End the text that is being read, and the open block with it: what follows starts a new block.

        `name` is then that of the text that follows.
        """
        if self.locality.kind != "block":
            raise ValueError(f"close(): {self.locality.kind} attention has no blocks that could end early")
        if self.streams:
            self.whole_call(self._close)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _close(self) -> None:
        self.mark()
        self.refresh()
        self.record()
        parts = [self.ended_parts(row) for row in range(self.batch)]
        self.close_rows(self.model.base_model, [row for row in range(self.batch) if self.opened[row]])
        self.parts, self.digests, self.name, self.decoding = parts, [""] * self.batch, None, False

    def ended_parts(self, row: int) -> list[ReadText]:
        """The parts of a row, if the text that is being read ended here."""
        opened, known = self.opened[row], self.digests[row]
        if opened:
            known = digest(known, None if self.tokens is None else self.tokens[row, :opened].cpu())
        tokens = self._closed_tokens(row) + opened
        return [*self.parts[row], ReadText(self.name, tokens, known)] if tokens else self.parts[row]

    def _closed_tokens(self, row: int) -> int:
        """Tokens in memory of the text that is being read."""
        return self.seen[row] - sum(part.tokens for part in self.parts[row])

    @classmethod
    def join(cls, caches: Iterable[Self], approximate: bool = False) -> Self:
        """The cache that has read what these have read, in this order; they are not changed.

        It equals one stream that is closed (`close`) after each of them but the last. Where that holds only
        approximately, with several memory layers or sliding attention, `approximate=True` is required.
        """
        return joining.join(caches, approximate)  # type: ignore[return-value]

    def read(self, ids: Int[Tensor, "batch token"], group: Any = None) -> None:
        """Read tokens without computing their logits: the same memory as a call of the model gives, but faster.

        Blocks are compressed in parallel and joined where that is exact; elsewhere they are read in order. With a
        `group` of torch.distributed each process reads a share: all give the whole `ids` and get the whole memory.
        """
        self.whole_call(joining.read, self, check_ids(ids), group)

    def read_ahead(self, ids: Int[Tensor, "batch token"]) -> int:
        """Whole blocks of `ids` in parallel, where that is exact."""
        return joining.read_blocks(self, ids)

    def note_text(self, *digests: str) -> None:
        """Remember that texts were read, each given by 32 hexadecimal digits: memory files list them."""
        self.texts = [*self.texts, *digests][-TEXTS:]

    # -- states made elsewhere: joined, compressed in parallel, loaded -------------------------------------------------

    def prepend(self, states: dict[int, State], parts: list[list[ReadText]], columns: int, texts: list[str]) -> None:
        """Put other `parts` before what was read; `states`: by layer, after those parts and all that is in memory."""
        self.before = None
        for row, ended in enumerate(parts):
            self.seen[row] += sum(part.tokens for part in ended)
            self.parts[row] = [*ended, *self.parts[row]]
        self.columns += columns
        self.texts = [*texts, *self.texts][-TEXTS:]
        self._replace_states(states, keep_open=self.sliding)
        if not self.sliding:  # the open block has not seen what came before
            self.read_open_again()

    def absorb(self, states: dict[int, State], ids: Int[Tensor, "batch token"]) -> None:
        """Advance by `ids`, the open block and whole blocks after it; `states`: by layer, after all of them."""
        self.columns += ids.shape[1] - max(self.opened)
        self.opened, self.tokens = [0] * self.batch, None
        self.advance_blocks(ids.shape[1] // self.block_size, ids)
        self._replace_states(states, keep_open=False)

    def _replace_states(self, states: dict[int, State], keep_open: bool) -> None:
        rope = self.model.base_model.rope()
        for index, (layer, stream) in enumerate(zip(self.owner, self.streams, strict=True)):
            state = states.get(index, stream.state)
            stream.replace_state(state, self.seen, layer.host(rope), self.model.dtype, keep_open)
        self.decoding = False

    def read_open_again(self) -> None:
        """Read the open block again, as after a change of what came before it; embeddings cannot be."""
        ids, opened, columns = self.tokens, self.opened, self.columns
        if not any(opened):
            return
        if ids is None:
            raise ValueError("the open block was fed as embeddings, so it cannot be read again: close() it first")
        ids = ids[:, : max(opened)].clone()
        mask = torch.arange(ids.shape[1], device=ids.device) < torch.tensor(opened, device=ids.device)[:, None]
        self.opened = [0] * self.batch
        self.feed(self.model.base_model, ids, None, mask, keep=1)
        self.columns = columns

    def described(self) -> dict[str, Any]:
        """Clocks and texts, as a memory file describes them."""
        fields = ("seen", "opened", "columns", "digests", "name", "texts")
        return {name: getattr(self, name) for name in fields} | {"parts": self.parts if any(self.parts) else []}

    def restore(self, described: dict[str, Any], tokens: Tensor | None, layers: list[dict[str, Tensor]]) -> None:
        """Take over the contents of a memory file: its header, the ids of the open block, the tensors of each layer.

        Files written before digests and parts were kept lack those.
        """
        rows = len(described["seen"])
        self.reset()
        self.begin(rows, next(self.model.parameters()).device)
        self.seen, self.columns = list(described["seen"]), described["columns"]
        self.digests = described.get("digests", [None] * rows)
        self.name, self.texts = described.get("name"), described["texts"]
        self.parts = [[ReadText(*part) for part in row] for row in described.get("parts") or [()] * rows]
        rope = self.model.base_model.rope()
        for layer, stream, named in zip(self.owner, self.streams, layers, strict=True):
            stream.restore(named, self.seen, layer.host(rope), self.model.dtype)
        self.opened, self.tokens = list(described["opened"]), tokens

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, exact: bool = False) -> None:
        """Write a memory file: state, clock, and the open block as token ids, which loading reads again.

        `exact=True` stores the open block's keys and values instead: larger, and bit for bit what was saved.
        """
        memory_file.save(self, Path(path), exact)

    @classmethod
    def load(cls, path: str | Path, model: Any, force: bool = False, static: bool = False) -> Self:
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
        """As for a cache that has kept everything; no such mask is ever used."""
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
        """Keep one more block, so that speculative decoding can take back tokens across the end of a block.

        It stays on until `reset()`: a cache that has served speculative decoding holds up to twice as much.
        """
        self.recording = True

    is_compileable = False
    is_initialized = True
    is_croppable = True

    @property
    def is_sliding(self) -> list[bool]:
        """No layer is of transformers' sliding kind."""
        return [False] * len(self.memories)

    def __len__(self) -> int:
        return len(self.memories)

    def __repr__(self) -> str:
        return f"MemoryCache(rows={self.batch}, clock={self.clock}, bytes={self.nbytes():,})"
