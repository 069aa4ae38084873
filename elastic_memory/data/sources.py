"""Documents from files: parquet, JSONL (plain, gz, zst) and text, a part at a time.

A part is the unit of work: read, tokenized and written on its own. So interrupted calls resume, shards divide a corpus
by taking every n-th part, and memory does not grow with the corpus.
"""

import codecs
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from elastic_memory.common.files import sha256
from elastic_memory.data.tokenizers import Skip

LARGEST = 128 << 20  # bytes of a document in a parquet cell or JSON line; text files are streamed and have no limit
PACKED = {".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}


@dataclass
class Document:
    """One text, in chunks; reading them raises Skip if the text cannot be used."""

    name: str
    chunks: Iterable[str]
    licence: str | None = None
    split: str = ""


class Part(Protocol):
    """A part of a corpus."""

    @property
    def name(self) -> str:
        """A name that is the same on every machine."""

    @property
    def split(self) -> str | None:
        """The corpus's own split; None if it has none."""

    @property
    def size(self) -> int:
        """Approximate bytes of text; 0 if unknown."""

    def documents(self) -> Iterator[Document]:
        """The documents of this part, in order."""

    def hashes(self) -> dict[str, str]:
        """SHA-256 of the files that start in this part, by name."""

    def touched(self) -> int:
        """When its files were last written, moved or copied, in nanoseconds; 0 if they cannot change."""


@dataclass(frozen=True)
class ParquetRows:
    """Rows start to stop of one row group."""

    path: Path
    file: str
    group: int
    start: int
    stop: int
    size: int
    text: str
    split: str | None

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.file} group {self.group} rows {self.start} to {self.stop}"

    def documents(self) -> Iterator[Document]:  # noqa: D102
        import pyarrow

        try:
            yield from self._rows()
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"{self.path} is damaged in row group {self.group}: {reason}") from None

    def _rows(self) -> Iterator[Document]:
        import pyarrow.parquet as parquet

        # Buffered: a row group larger than memory is read a page at a time.
        with parquet.ParquetFile(self.path, pre_buffer=False, buffer_size=1 << 20) as file:
            columns = [name for name in ("id", "license", self.text) if name in file.schema_arrow.names]
            row = 0
            for batch in file.iter_batches(batch_size=8, row_groups=[self.group], columns=columns):
                for index in range(max(0, self.start - row), min(batch.num_rows, self.stop - row)):
                    cells = {name: batch.column(name)[index] for name in columns}
                    yield self._document(cells, f"{self.file}:{self.group}:{row + index}")
                row += batch.num_rows
                if row >= self.stop:
                    return

    def _document(self, cells: dict[str, Any], place: str) -> Document:
        text = cells[self.text]
        if text.is_valid and text.as_buffer().size > LARGEST:
            return Document(place, _refuse("too large for one cell"))
        try:
            record = {name: cell.as_py() for name, cell in cells.items()}
        except UnicodeDecodeError:
            return Document(place, _refuse("invalid UTF-8"))
        return _from_record(record, self.text, place)

    def hashes(self) -> dict[str, str]:  # noqa: D102
        return {self.file: sha256(self.path)} if self.group == self.start == 0 else {}

    def touched(self) -> int:  # noqa: D102
        return self.path.stat().st_ctime_ns


@dataclass(frozen=True)
class JsonLines:
    """The lines that start in bytes `start` to `stop` of the unpacked file."""

    path: Path
    file: str
    start: int
    stop: int
    text: str
    split: str | None

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.file} bytes {self.start} to {self.stop}"

    @property
    def size(self) -> int:  # noqa: D102
        return self.stop - self.start

    def documents(self) -> Iterator[Document]:  # noqa: D102
        with unpacked(self.path) as file:
            place = _to_line(file, self.start)
            while place < self.stop and (line := file.readline(LARGEST)):
                yield self._document(line, f"{self.file}:{place}")
                place += len(line)
                while not line.endswith(b"\n") and (line := file.readline(LARGEST)):
                    place += len(line)

    def _document(self, line: bytes, place: str) -> Document:
        if len(line) == LARGEST and not line.endswith(b"\n"):
            return Document(place, _refuse("too large for one line"))
        if not line.strip():
            return Document(place, _refuse("empty"))
        try:
            record = json.loads(line)
        except UnicodeDecodeError:
            return Document(place, _refuse("invalid UTF-8"))
        except (ValueError, RecursionError):
            return Document(place, _refuse("not JSON"))
        return _from_record(record, self.text, place)

    def hashes(self) -> dict[str, str]:  # noqa: D102
        return {self.file: sha256(self.path)} if self.start == 0 else {}

    def touched(self) -> int:  # noqa: D102
        return self.path.stat().st_ctime_ns


@dataclass(frozen=True)
class TextFiles:
    """Some files of a folder, each a document."""

    root: Path
    files: tuple[str, ...]
    size: int
    split: str | None

    @property
    def name(self) -> str:  # noqa: D102
        return (
            self.files[0] if len(self.files) == 1 else f"{len(self.files)} files, {self.files[0]} to {self.files[-1]}"
        )

    def documents(self) -> Iterator[Document]:  # noqa: D102
        for file in self.files:
            yield Document(file, _read_text(self.root / file))

    def hashes(self) -> dict[str, str]:  # noqa: D102
        if len(self.files) == 1:
            return {self.name: sha256(self.root / self.files[0])}
        every = hashlib.sha256()
        for file in self.files:
            every.update(os.fsencode(file) + b"\0" + sha256(self.root / file).encode())
        return {self.name: every.hexdigest()}

    def touched(self) -> int:  # noqa: D102
        return max((self.root / file).stat().st_ctime_ns for file in self.files)


def _from_record(record: object, text: str, place: str) -> Document:
    if not isinstance(record, dict) or text not in record:
        return Document(place, _refuse(f"no field {text!r}"))
    if not isinstance(record[text], str):
        return Document(place, _refuse("empty" if record[text] is None else f"field {text!r} is not text"))
    name, licence = record.get("id"), record.get("license")
    name = str(name) if isinstance(name, str | int) else place
    return Document(name, [record[text]], licence if isinstance(licence, str) else None)


def _refuse(reason: str) -> Iterator[str]:
    raise Skip(reason)
    yield


def _read_text(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with open(path, "rb") as file:
        while True:
            try:
                block = file.read(1 << 20)
            except OSError as error:
                raise ValueError(f"{path} cannot be read: {error.strerror}") from None
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError:
                raise Skip("invalid UTF-8") from None
            if not block:
                return


def unpacked(path: Path) -> BinaryIO:
    """Open a JSONL file, compressed or not, as plain bytes."""
    packing = next((packing for suffix, packing in PACKED.items() if path.name.endswith(suffix)), None)
    return _Unpacked(path, packing) if packing else open(path, "rb")


class _Unpacked(io.BufferedReader):
    """A compressed file as plain bytes; errors name the file."""

    def __init__(self, path: Path, packing: str):
        import pyarrow

        self.path = path
        super().__init__(pyarrow.input_stream(str(path), compression=packing))

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            return super().read(size)
        except OSError as error:
            raise ValueError(f"{self.path} is damaged: {error}") from None


def _to_line(file: BinaryIO, start: int) -> int:
    """Move to the first line that starts at or after byte `start`, and return its position."""
    place = 0
    if start and file.seekable():
        place = file.seek(start - 1)
    while place < start - 1:
        place += len(file.read(min(1 << 20, start - 1 - place)))
    while start and (line := file.readline(LARGEST)):
        place += len(line)
        if line.endswith(b"\n"):
            break
    return place
