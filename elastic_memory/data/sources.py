"""Documents from files: parquet, JSONL (plain, gz, zst) and folders of text, divided into parts of bounded size.

A part is the unit of work: it is read, tokenised and written on its own, so that a run continues where it
stopped, shards share a corpus by taking every n-th part, and memory does not grow with the corpus. Which parts
there are depends on the files alone.
"""

import codecs
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from elastic_memory.data.tokenizers import Skip

PART = 64 << 20  # bytes of text in a part, roughly
PART_FILES = 4096
LARGEST = 128 << 20  # bytes of a document in a parquet cell or a line of JSON; text files stream and have no limit
SPLITS = ("train", "validation", "test")

_SPLIT_NAMES = {name: name for name in SPLITS} | {"valid": "validation", "val": "validation", "dev": "validation"}
_PACKED = {".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
_TABLES = (".parquet", ".jsonl", ".ndjson", *_PACKED)
_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz", ".7z", ".rar")


@dataclass
class Document:
    """One text, in chunks; reading them raises Skip where the text cannot be used."""

    name: str
    chunks: Iterable[str]
    licence: str | None = None
    split: str = ""


class Part(Protocol):
    """A stretch of a corpus. `split` is None where the corpus has no splits of its own; `size` counts bytes."""

    @property
    def name(self) -> str:
        """What this part is, the same on every machine."""

    @property
    def split(self) -> str | None:
        """The corpus's own split, if it has any."""

    @property
    def size(self) -> int:
        """Bytes of text, roughly; 0 where nobody knows."""

    def documents(self) -> Iterator[Document]:
        """The documents of this part, in order."""

    def hashes(self) -> dict[str, str]:
        """SHA-256 by name of the files that begin in this part."""


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
        return _from_record({name: cell.as_py() for name, cell in cells.items()}, self.text, place)

    def hashes(self) -> dict[str, str]:  # noqa: D102
        return {self.file: _sha256(self.path)} if self.group == self.start == 0 else {}


@dataclass(frozen=True)
class JsonLines:
    """The lines that begin in bytes start to stop of the (unpacked) file."""

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
        with _unpacked(self.path) as file:
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
        return {self.file: _sha256(self.path)} if self.start == 0 else {}


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
            return {self.name: _sha256(self.root / self.files[0])}
        every = hashlib.sha256()
        for file in self.files:
            every.update(os.fsencode(file) + b"\0" + _sha256(self.root / file).encode())
        return {self.name: every.hexdigest()}


def file_parts(sources: list[Path], text: str, passed_over: Counter[str]) -> list[Part]:
    """The parts of all files under `sources`, in a fixed order; counts the files that are none of ours by reason."""
    folders = [source.absolute() if source.is_dir() else source.absolute().parent for source in sources]
    base = Path(os.path.commonpath(folders))
    parts: list[Part] = []
    for source in sources:
        files = [os.path.relpath(file, base) for file in _files(source.absolute(), passed_over)]
        tables = [file for file in files if file.endswith(_TABLES)]
        for file in tables:
            parts += (_parquet_parts if file.endswith(".parquet") else _json_parts)(base / file, file, text)
        if tables:
            passed_over["neither parquet nor JSONL"] += len(files) - len(tables)
        else:
            parts += _text_parts(base, files)
    if not {"train"} < {part.split for part in parts} - {None}:
        # One name alone, such as a lone train.parquet, divides nothing.
        return [replace(part, split=None) for part in parts]  # type: ignore[type-var]
    passed_over["in no split"] += sum(part.split is None for part in parts)
    return [part for part in parts if part.split]


def _files(source: Path, passed_over: Counter[str]) -> list[str]:
    """The regular files of a folder, sorted; hidden ones and links that lead out of it are left alone."""
    if source.name.endswith(_ARCHIVES):
        raise ValueError(f"{source} is an archive, and archives are never unpacked here: unpack it and give the folder")
    if source.is_file():
        return [str(source)]
    if not source.is_dir():
        raise ValueError(f"{source} is neither a file nor a folder")
    files, folders = [], [str(source)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif reason := _unfit(entry, source.resolve()):
                    passed_over[reason] += 1
                else:
                    files.append(entry.path)
    return sorted(files)


def _unfit(entry: os.DirEntry, root: Path) -> str | None:
    if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root):
        return "link out of the folder"
    if not entry.is_file():
        return "not a regular file"
    return "archive" if entry.name.endswith(_ARCHIVES) else None


def _parquet_parts(path: Path, file: str, text: str) -> list[Part]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as opened:
            metadata, schema = opened.metadata, opened.schema_arrow
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a readable parquet file: {error}") from None
    if text not in schema.names or str(schema.field(text).type) not in ("string", "large_string"):
        raise ValueError(f"{path} has no column {text!r} of text; its columns: {', '.join(schema.names)} (--text)")
    column = [metadata.schema.column(index).path for index in range(metadata.num_columns)].index(text)
    parts: list[Part] = []
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        size = metadata.row_group(group).column(column).total_uncompressed_size
        step = max(1, rows * PART // max(size, PART))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            share = size * (stop - start) // rows
            parts.append(ParquetRows(path, file, group, start, stop, share, text, _split_of(file)))
    return parts


def _json_parts(path: Path, file: str, text: str) -> list[Part]:
    size, step = path.stat().st_size, PART
    if file.endswith(tuple(_PACKED)):
        with _unpacked(path) as unpacked:
            size = sum(len(block) for block in iter(lambda: unpacked.read(1 << 20), b""))
        # Each part unpacks the file from its beginning: with more parts that would take longer than tokenising.
        step = max(PART, -(-size // 16))
    return [JsonLines(path, file, at, min(at + step, size), text, _split_of(file)) for at in range(0, size, step)]


def _text_parts(root: Path, files: list[str]) -> list[Part]:
    parts: list[Part] = []
    begun: list[str] = []
    size = 0
    for file, following in zip_longest(files, files[1:]):
        begun.append(file)
        size += (root / file).stat().st_size
        ends = following is None or _split_of(following) != _split_of(file)
        if ends or size >= PART or len(begun) == PART_FILES:
            parts.append(TextFiles(root, tuple(begun), size, _split_of(file)))
            begun, size = [], 0
    return parts


def _split_of(file: str) -> str | None:
    """The split a path names: `test/...`, `test.txt`, and for tables also `test-00000-of-00003.parquet`."""
    *folders, last = file.lower().split("/")
    stem = re.split(r"[^a-z]", last)[0] if last.endswith(_TABLES) else last.split(".")[0]
    return next((_SPLIT_NAMES[word] for word in (*folders, stem) if word in _SPLIT_NAMES), None)


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
            block = file.read(1 << 20)
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError:
                raise Skip("invalid UTF-8") from None
            if not block:
                return


def _unpacked(path: Path) -> BinaryIO:
    packing = next((packing for suffix, packing in _PACKED.items() if path.name.endswith(suffix)), None)
    return _Unpacked(path, packing) if packing else open(path, "rb")


class _Unpacked(io.BufferedReader):
    """A packed file as its unpacked bytes; damage is an error that names the file."""

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
    """Move to the first line that begins at or after byte `start`, and return where that is."""
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


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
