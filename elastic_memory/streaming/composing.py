"""What a cache has read: one text after another, each known by its tokens' digest; and texts read apart, joined."""

import hashlib
from collections.abc import Iterable
from typing import Any, Self

import torch

from elastic_memory.shapes import Int, Tensor
from elastic_memory.streaming import joining
from elastic_memory.streaming.layer_cache import Part

# What a mixin is mixed into: a cache of transformers.
Mixed: Any = object


class Composing(Mixed):
    """Mixin for `MemoryCache`: what was read, as parts of more."""

    seen: list[int]
    opened: list[int]
    columns: int
    tokens: Tensor | None
    digests: list[str | None]
    parts: list[list[Part]]
    name: str | None

    def holds(self, ids: Int[Tensor, "rows column"], mask: Int[Tensor, "rows column"] | None = None) -> bool:
        """Whether `ids` is a whole sequence that begins with all that was read. Of embeddings nobody can tell."""
        if len(ids) % self.batch or ids.shape[1] < self.columns:
            return False
        repeats, columns = len(ids) // self.batch, ids[:, : self.columns].cpu().long()
        real = torch.ones_like(columns) if mask is None else mask[:, : self.columns].cpu()
        return all(self._has_read(row // repeats, columns[row, real[row] != 0]) for row in range(len(ids)))

    def _has_read(self, row: int, ids: Int[Tensor, " token"]) -> bool:
        """Whether these are the tokens of a row, padding in front of them aside."""
        seen, opened, known = self.seen[row], self.opened[row], self.digests[row]
        if known is None or len(ids) < seen + opened or (opened and self.tokens is None):
            return False
        ids = ids[len(ids) - seen - opened :]
        if opened and not torch.equal(ids[seen:], self.tokens[row, :opened].cpu()):  # type: ignore[index]
            return False
        for part in [*self.parts[row], Part(self.name, self._begun(row), known)]:
            found: str | None = ""
            for block in ids[: part.tokens].split(self.block_size) if part.tokens else ():
                found = digest(found, block)
            if found != part.digest:
                return False
            ids = ids[part.tokens :]
        return True

    def close(self) -> None:
        """End the text that is being read, and the open block with it: what follows begins a block of its own.

        Then `name` stands for the text that follows.
        """
        if self.locality.kind != "block":
            raise ValueError(f"close(): {self.locality.kind} attention has no blocks that could end early")
        if self.streams:
            self.whole_call(self._close)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _close(self) -> None:
        self.mark()
        groups: dict[tuple[int, int], list[int]] = {}
        for row, span in enumerate(zip(self.seen, self.opened, strict=True)):
            groups.setdefault(span, []).append(row)
        self.refresh()
        self.record()
        parts = [self.ended_parts(row) for row in range(self.batch)]
        for (seen, opened), rows in groups.items():
            if opened:
                self.close_rows(self.model.base_model, rows, seen, opened)
        self.parts, self.digests, self.name, self.decoding = parts, [""] * self.batch, None, False

    @classmethod
    def join(cls, caches: Iterable[Self], approximate: bool = False) -> Self:
        """The cache that has read what these have read, in this order; they stay as they are.

        It is the cache that one stream gives which is closed (`close`) behind each of them but the last. Where that
        holds only approximately, with several memory layers or sliding attention, `approximate=True` must say so.
        """
        return joining.join(caches, approximate)

    def read(self, ids: Int[Tensor, "batch token"], group: Any = None) -> None:
        """Read tokens whose logits nobody needs: as a call of the model does, to rounding, but faster.

        All blocks are read side by side and joined, where that is exact; elsewhere they are read in order. `group`, of
        torch.distributed, lets processes read a share each: all give the whole `ids`, and all get the whole memory.
        """
        self.whole_call(joining.read, self, ids, group)

    def ended_parts(self, row: int) -> list[Part]:
        """The parts of a row, if the text that is being read ended here."""
        tokens = self._begun(row) + self.opened[row]
        return [*self.parts[row], Part(self.name, tokens, self.digest_with_open(row))] if tokens else self.parts[row]

    def _begun(self, row: int) -> int:
        """Tokens in memory of the text that is being read."""
        return self.seen[row] - sum(part.tokens for part in self.parts[row])

    def digest_with_open(self, row: int) -> str | None:
        """What identifies the ids of the text that is being read, the open block included."""
        opened = self.opened[row]
        if not opened:
            return self.digests[row]
        return digest(self.digests[row], None if self.tokens is None else self.tokens[row, :opened].cpu())

    def read_open_again(self) -> None:
        """Read the open block anew, as after a change of what came before it; embeddings cannot be."""
        ids, opened, columns = self.tokens, self.opened, self.columns
        if not any(opened):
            return
        if ids is None:
            raise ValueError("the open block was fed as embeddings, so it cannot be read again: close() it first")
        ids = ids[:, : max(opened)].clone()
        mask = torch.arange(ids.shape[1], device=ids.device) < torch.tensor(opened, device=ids.device)[:, None]
        self.opened = [0] * self.batch
        self.model.base_model(input_ids=ids, attention_mask=mask.long(), past_key_values=self, keep=1)
        self.columns = columns


def digest(before: str | None, block: Int[Tensor, " token"] | None) -> str | None:
    """What identifies the tokens of all blocks so far, given what identified those before this one."""
    if before is None or block is None:
        return None
    return hashlib.blake2b(before.encode() + block.long().numpy().tobytes(), digest_size=16).hexdigest()
