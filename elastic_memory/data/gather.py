"""Combine the parts of a corpus: one file of rows per split, and the manifest."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import elastic_memory
from elastic_memory.common.files import sha256, whole_file, write_json
from elastic_memory.data.parts import SPLITS
from elastic_memory.data.samples import FORMAT, MANIFEST, split_files
from elastic_memory.data.tokenize_part import RowMaker


class NothingKept(ValueError):  # noqa: N818
    """No document was long enough."""


@dataclass(frozen=True)
class Preparation:
    """What is prepared. Calls may share a folder only if these fields are equal."""

    length: int
    tokenizer: str
    tokenizer_sha256: str
    shares: list[float] | None
    parts: int
    corpus_sha256: str


def part_files(folder: Path, index: int) -> tuple[Path, Path]:
    """The file with the rows of a part, and the record of its documents, which is written after it."""
    return folder / ".work" / f"{index:06d}.bin", folder / ".work" / f"{index:06d}.json"


def gather(folder: Path, plan: Preparation, maker: RowMaker, names: list[str], passed_over: Counter[str]) -> None:
    """Combine the rows of all parts by split; the manifest is written last and marks the folder as complete."""
    facts = _facts(folder, plan, passed_over)
    row_bytes = plan.length * maker.dtype.itemsize
    splits = {split: _gather_split(folder, plan, split, row_bytes) for split in SPLITS if facts["rows"][split]}
    saved = folder / ".work" / "tokenizer"
    for old in (saved, folder / "tokenizer"):
        shutil.rmtree(old, ignore_errors=True)
    maker.tokenizer.save(saved)
    saved.rename(folder / "tokenizer")
    tokenizer = {key: getattr(maker.tokenizer, key) for key in ("name", "sha256", "vocab_size")}
    manifest = {
        "format": FORMAT,
        "tool": f"elastic-memory {elastic_memory.__version__}",
        "length": plan.length,
        "dtype": maker.dtype.name,
        "tokenizer": tokenizer,
        "source": {"names": names, **facts["source"]},
        "splits": splits,
        "longest": facts["longest"],
        "skipped": facts["skipped"],
        "plan": asdict(plan),
    }
    write_json(folder / MANIFEST, manifest)


def _facts(folder: Path, plan: Preparation, passed_over: Counter[str]) -> dict[str, Any]:
    """Totals over all parts; refuses damaged parts, and a corpus without rows."""
    rows, licences, skipped = dict.fromkeys(SPLITS, 0), Counter[str](), Counter(passed_over)
    files: dict[str, str] = {}
    longest = size = 0
    for path, record in _records(folder, plan):
        if sha256(path) != record["sha256"]:
            raise ValueError(f"{path} is damaged: delete it and its .json, and run the same command again")
        files |= record["sources"]
        skipped.update(record["skipped"])
        longest, size = max(longest, record["longest"]), size + record["bytes"]
        for document in record["documents"]:
            rows[document["split"]] += document["rows"]
            licences[document["licence"] or "unknown"] += 1
    left_out = dict(sorted((+skipped).items()))
    if not any(rows.values()):
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        if not longest and not left_out.keys() & {"too short", "empty"}:
            named = any(reason.startswith(("no field", "field")) for reason in left_out)
            give = "name the field of the text with --text" if named else "give text in UTF-8, parquet or JSONL"
            raise NothingKept(f"no document could be read as text ({reasons}): {give}")
        raise NothingKept(
            f"no document is longer than {plan.length} tokens; the longest has {longest} ({reasons}). "
            "Choose a shorter --length"
        )
    source = {"bytes": size, "licences": dict(sorted(licences.items())), "sha256": files}
    return {"rows": rows, "source": source, "longest": longest, "skipped": left_out}


def _gather_split(folder: Path, plan: Preparation, split: str, row_bytes: int) -> dict[str, Any]:
    rows_path, documents_path = split_files(folder, split)
    count = {"documents": 0, "tokens": 0, "rows": 0}
    rows_sha256, documents_sha256 = hashlib.sha256(), hashlib.sha256()
    with whole_file(rows_path) as rows, whole_file(documents_path) as documents:
        for path, record in _records(folder, plan):
            with open(path, "rb") as part:
                for document in record["documents"]:
                    if document["split"] != split:
                        part.seek(document["rows"] * row_bytes, 1)
                        continue
                    for _ in range(document["rows"]):
                        row = part.read(row_bytes)
                        rows.write(row)
                        rows_sha256.update(row)
                    line = json.dumps(document).encode() + b"\n"
                    documents.write(line)
                    documents_sha256.update(line)
                    count["documents"] += 1
                    count["tokens"] += document["tokens"]
                    count["rows"] += document["rows"]
    return count | {"sha256": rows_sha256.hexdigest(), "documents_sha256": documents_sha256.hexdigest()}


def _records(folder: Path, plan: Preparation) -> Iterator[tuple[Path, dict[str, Any]]]:
    for index in range(plan.parts):
        rows, record = part_files(folder, index)
        yield rows, json.loads(record.read_bytes())
