"""Divide files into parts: by the files alone, so that every call and every shard finds the same parts."""

import os
import re
from collections import Counter
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from elastic_memory.data.sources import PACKED, JsonLines, ParquetRows, Part, TextFiles, unpacked

PART = 64 << 20  # bytes of text in a part, roughly
PART_FILES = 4096
MOST_EXPANSION = 1000  # text does not compress further; files made to exhaust memory do
SPLITS = ("train", "validation", "test")

_SPLIT_NAMES = {name: name for name in SPLITS} | {"valid": "validation", "val": "validation", "dev": "validation"}
_TABLES = (".parquet", ".jsonl", ".ndjson", *PACKED)
_RECORDS = (".json", ".csv", ".tsv")
_ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tar.xz", ".7z", ".rar")


def file_parts(sources: list[Path], text: str, passed_over: Counter[str]) -> list[Part]:
    """The parts of all files in `sources`, in a fixed order; `passed_over` counts other files by reason."""
    folders = [source.absolute() if source.is_dir() else source.absolute().parent for source in sources]
    base = Path(os.path.commonpath(folders))
    parts: list[Part] = []
    found: dict[str, Path] = {}
    for source in sources:
        files = [os.path.relpath(file, base) for file in _files(source.absolute(), passed_over)]
        _refuse_repeats(files, source, found)
        _refuse_records(files, source)
        tables = [file for file in files if file.endswith(_TABLES)]
        for file in tables:
            parts += (_parquet_parts if file.endswith(".parquet") else _json_parts)(base / file, file, text)
        if tables:
            passed_over["neither parquet nor JSONL"] += len(files) - len(tables)
        else:
            parts += _text_parts(base, files)
    if not {"train"} < {part.split for part in parts} - {None}:
        # A single split, such as a lone train.parquet, is no division.
        return [replace(part, split=None) for part in parts]  # type: ignore[type-var]
    passed_over["in no split"] += sum(part.split is None for part in parts)
    return [part for part in parts if part.split]


def _refuse_repeats(files: list[str], source: Path, found: dict[str, Path]) -> None:
    """Documents that are read twice count twice in training and in measures."""
    for file in files:
        if file in found:
            raise ValueError(f"{file} is given twice, by {found[file]} and by {source}: leave one of them out")
        found[file] = source


def _refuse_records(files: list[str], source: Path) -> None:
    """As plain text, field names, quotes and numbers of a table would be trained on."""
    if files and all(file.lower().endswith(_RECORDS) for file in files):
        raise ValueError(
            f"{source} holds records, not plain text: convert {Path(files[0]).name} to parquet or JSONL (rename it to "
            ".jsonl if each line is an object, to .txt if it is to be read as text)"
        )


def _files(source: Path, passed_over: Counter[str]) -> list[str]:
    """The regular files of a folder, sorted, without hidden files and links that lead out of it."""
    if source.name.endswith(_ARCHIVES):
        raise ValueError(f"{source} is an archive, and archives are never unpacked: unpack it and give the folder")
    if source.is_file():
        return [str(source)]
    if not source.is_dir():
        raise ValueError(f"{source} is neither a file nor a folder")
    root, files, folders = source.resolve(), [], [str(source)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif reason := _unfit(entry, root):
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
        rows, facts = metadata.row_group(group).num_rows, metadata.row_group(group).column(column)
        size = facts.total_uncompressed_size
        if size > max(PART, MOST_EXPANSION * facts.total_compressed_size):
            raise ValueError(
                f"{path}: row group {group} unpacks from {facts.total_compressed_size:,} to {size:,} bytes, more "
                "than any text: leave the file out"
            )
        step = max(1, rows * PART // max(size, PART))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            share = size * (stop - start) // rows
            parts.append(ParquetRows(path, file, group, start, stop, share, text, _split_of(file)))
    return parts


def _json_parts(path: Path, file: str, text: str) -> list[Part]:
    size, step = path.stat().st_size, PART
    if file.endswith(tuple(PACKED)):
        with unpacked(path) as file_bytes:
            size = sum(len(block) for block in iter(lambda: file_bytes.read(1 << 20), b""))
        # Each part unpacks the file from its start: with more parts this would take longer than tokenizing.
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
    """The split that a path names: `test/...`, `test.txt`, `test-00000-of-00003.parquet`."""
    *folders, last = file.lower().split("/")
    stem = re.split(r"[^a-z]", last)[0] if last.endswith(_TABLES) else last.split(".")[0]
    return next((_SPLIT_NAMES[word] for word in (*folders, stem) if word in _SPLIT_NAMES), None)
