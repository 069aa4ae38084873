"""Tokenize one part of a corpus into rows, on all cores, and count what is left out."""

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from elastic_memory.data.parts import SPLITS
from elastic_memory.data.sources import Document, Part
from elastic_memory.data.tokenizers import PIECE, Piece, Skip, Tokenizer, encode, pieces

Item = TypeVar("Item")
Result = TypeVar("Result")

SIGNATURE = 1 << 16  # characters that decide a document's split: copies of a document get the same split


@dataclass
class Kept:
    """A document that was long enough for rows."""

    id: str
    split: str
    tokens: int
    rows: int
    licence: str | None


@dataclass
class Outcome:
    """What was kept and skipped of a part."""

    documents: list[Kept] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    longest: int = 0
    bytes: int = 0

    def record(self) -> dict[str, Any]:
        """The outcome as JSON types."""
        return {**vars(self), "documents": [vars(document) for document in self.documents]}


class WorkItem(NamedTuple):
    """A piece of a document to tokenize, or the end of the document if `piece` is None."""

    document: Document
    piece: Piece | None = None
    skipped: str | None = None


class RowMaker:
    """Turns parts into rows of `length` tokens with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, length: int, shares: tuple[float, ...], workers: int | None = None):
        self.tokenizer = tokenizer
        self.length = length
        self.shares = shares
        self.workers = workers or os.cpu_count() or 1
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32).newbyteorder("<")

    def write(self, part: Part, file: BinaryIO, watch: Callable[[Outcome], None]) -> Outcome:
        """Write the rows of a part to `file`; the result does not depend on the number of workers."""
        outcome = Outcome()
        rows = RowWriter(file, self.length)
        with ThreadPoolExecutor(self.workers) as cores:
            for batch in _in_order(cores, self._tokenize, _batches(self._read(part, outcome)), 4 * self.workers):
                for item, ids in batch:
                    if ids is not None:
                        rows.add(ids)
                        continue
                    outcome.longest = max(outcome.longest, 0 if item.skipped else rows.tokens)
                    skipped = item.skipped or ("too short" if rows.tokens <= self.length else None)
                    if skipped:
                        outcome.skipped[skipped] += 1
                        rows.forget()
                    else:
                        document = item.document
                        outcome.documents.append(Kept(document.name, document.split, *rows.finish(), document.licence))
                watch(outcome)
        return outcome

    def _read(self, part: Part, outcome: Outcome) -> Iterator[WorkItem]:
        for document in part.documents():
            document.split, skipped = part.split or "", None
            try:
                for piece in pieces(self._checked(document, outcome), self.tokenizer):
                    yield WorkItem(document, piece)
            except Skip as reason:
                skipped = str(reason)
            yield WorkItem(document, skipped=skipped)

    def _checked(self, document: Document, outcome: Outcome) -> Iterator[str]:
        """The text, if it may be long enough: documents with too few bytes are skipped without tokenizing."""
        size, held = 0, []
        for chunk in document.chunks:
            if "\0" in chunk:
                raise Skip("NUL character")
            try:
                added = len(chunk.encode())
            except UnicodeEncodeError:
                raise Skip("invalid Unicode") from None
            size += added
            outcome.bytes += added
            document.split = document.split or self._split(chunk)
            held.append(chunk)
            most = self.tokenizer.most_tokens(size)
            # Also compared with the longest so far, to report the longest even if all are too short.
            if most is None or most > min(self.length, outcome.longest):
                yield "".join(held)
                held.clear()
        if held or size == 0:
            raise Skip("too short" if size else "empty")

    def _split(self, text: str) -> str:
        signature = hashlib.sha256(text[:SIGNATURE].encode()).digest()
        place, edge = int.from_bytes(signature[:8], "big") / 2**64, 0.0
        for split, share in zip(SPLITS, self.shares, strict=True):
            edge += share
            if place < edge:
                return split
        return SPLITS[0]

    def _tokenize(self, batch: list[WorkItem]) -> list[tuple[WorkItem, np.ndarray | None]]:
        return [(item, encode(item.piece, self.tokenizer).astype(self.dtype) if item.piece else None) for item in batch]


class RowWriter:
    """Cuts documents into rows; a document can be taken back until it is finished."""

    def __init__(self, file: BinaryIO, length: int):
        self.file = file
        self.length = length
        self.position = 0
        self._begin()

    def _begin(self) -> None:
        self.start = self.position
        self.tokens = 0
        self.held: list[np.ndarray] = []
        self.waiting = 0

    def add(self, ids: np.ndarray) -> None:
        """More tokens of the current document."""
        self.held.append(ids)
        self.tokens += len(ids)
        self.waiting += len(ids)
        if self.waiting >= self.length:
            joined = np.concatenate(self.held)
            whole = len(joined) - len(joined) % self.length
            self.position += self.file.write(joined[:whole].tobytes())
            self.held, self.waiting = [joined[whole:]], len(joined) - whole

    def finish(self) -> tuple[int, int]:
        """The document's numbers of tokens and rows; tokens after the last full row are dropped."""
        tokens = self.tokens
        self._begin()
        return tokens, tokens // self.length

    def forget(self) -> None:
        """Take back all rows of the current document."""
        if self.position > self.start:
            self.position = self.file.seek(self.start)
            self.file.truncate()
        self._begin()


def _batches(items: Iterable[WorkItem]) -> Iterator[list[WorkItem]]:
    """Group short documents, so that handing work to a thread costs little compared with the work."""
    batch: list[WorkItem] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item.piece.text) if item.piece else 0
        if size >= PIECE or len(batch) == 1024:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _in_order(
    cores: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """`map` on all cores, in order, with at most `ahead` items in flight."""
    begun: deque[Future[Result]] = deque()
    for item in items:
        begun.append(cores.submit(function, item))
        if len(begun) >= ahead:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()
