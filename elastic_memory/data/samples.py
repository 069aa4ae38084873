"""Prepared rows of tokens, memory-mapped: `samples(folder, split)`."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elastic_memory.common.checksums import MANIFEST
from elastic_memory.common.names import suggest
from elastic_memory.common.progress import watched_sha256
from elastic_memory.data.tokenizers import Tokenizer, load_tokenizer
from elastic_memory.shapes import Tensor

FORMAT = "elastic-memory rows 1"
SPARE_TOKENS = 1024  # how many more tokens a model may have than its tokenizer, to make its size round


def samples(folder: str | Path, split: str = "train") -> "Samples":
    """The rows of one split of a folder written by `elastic prepare`."""
    return Samples(folder, split)


class Samples:
    """Map-style rows of one length: `rows[i]["input_ids"]` is a LongTensor; no row crosses documents."""

    def __init__(self, folder: str | Path, split: str = "train"):
        self.folder, self.split = Path(folder), split
        self.manifest = read_manifest(self.folder)
        if split not in self.manifest["splits"]:
            raise ValueError(f"{folder} has no split {split!r}: {suggest(split, self.manifest['splits'])}")
        facts = self.manifest["splits"][split]
        self.length: int = self.manifest["length"]
        self._rows, self._documents = split_files(self.folder, split)
        self._shape = (facts["rows"], self.length)
        self._dtype = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        expected = facts["rows"] * self.length * self._dtype.itemsize
        found = self._rows.stat().st_size if self._rows.exists() else 0
        if found != expected:
            raise ValueError(f"{self._rows} has {found:,} bytes, the manifest says {expected:,}: prepare it again")

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return {"input_ids": torch.from_numpy(self._array[index].astype(np.int64))}

    def __reduce__(self) -> tuple:
        # DataLoader workers open the file themselves instead of receiving its content.
        return Samples, (self.folder, self.split)

    @cached_property
    def _array(self) -> np.ndarray:
        return np.memmap(self._rows, dtype=self._dtype, mode="r", shape=self._shape)

    @cached_property
    def documents(self) -> list[dict[str, Any]]:
        """The documents of this split in the order of their rows: id, tokens, rows, licence."""
        with open(self._documents, encoding="utf-8") as file:
            try:
                found = [json.loads(line) for line in file]
                counted = sum(document["rows"] for document in found)
            except (ValueError, LookupError, TypeError, RecursionError):
                counted = -1
        if counted != len(self):
            raise ValueError(f"{self._documents} does not match the {len(self):,} rows: prepare the corpus again")
        return found

    @cached_property
    def row_documents(self) -> np.ndarray:
        """For each row the index of its document in `documents`."""
        return np.repeat(np.arange(len(self.documents)), [document["rows"] for document in self.documents])

    def document(self, index: int) -> int:
        """The index in `documents` of the document that row `index` comes from."""
        return int(self.row_documents[index])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the rows, from the manifest."""
        return self.manifest["splits"][self.split]["sha256"]

    @property
    def vocab_size(self) -> int:
        """Number of token ids: all ids in the rows are smaller."""
        return self.manifest["tokenizer"]["vocab_size"]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made these rows; ValueError if the folder now holds another one."""
        saved, made = load_tokenizer(self.folder / "tokenizer"), self.manifest["tokenizer"]["sha256"]
        if not saved.known_as(made):
            raise ValueError(
                f"{self.folder / 'tokenizer'} is tokenizer {saved.sha256[:12]}, the rows were made with {made[:12]} "
                f"({self.manifest['tokenizer']['name']}): prepare the corpus again"
            )
        return saved

    def verify_rows(self) -> None:
        """Read all rows; ValueError if they have changed."""
        self._verify(self._rows, "sha256")

    def _verify(self, path: Path, key: str) -> None:
        if watched_sha256(path) != self.manifest["splits"][self.split][key]:
            raise ValueError(f"{path} is damaged: its SHA-256 is not that of the manifest; prepare the corpus again")

    def verify(self) -> None:
        """Read everything; ValueError if a file has changed."""
        self.verify_rows()
        self._verify(self._documents, "documents_sha256")
        largest = max(int(row.max()) for row in self._array)
        if largest >= self.vocab_size:
            raise ValueError(f"{self._rows} has the id {largest}, outside the vocabulary of {self.vocab_size}")
        self.documents  # noqa: B018 - reading them compares their rows


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a prepared folder."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        begun = (Path(folder) / ".work").is_dir()
        hint = "its preparation is not finished: repeat the command" if begun else "make it with elastic prepare"
        raise FileNotFoundError(f"{folder} has no prepared rows: {hint}")
    try:
        manifest = json.loads(path.read_bytes())
        sizes = [manifest["length"], *(facts["rows"] for facts in manifest["splits"].values())]
        sound = manifest["dtype"] in ("uint16", "uint32") and all(isinstance(size, int) and size > 0 for size in sizes)
        sound = sound and manifest["format"] == FORMAT
        words = [manifest["tokenizer"]["name"], manifest["tokenizer"]["sha256"]]
        words += [facts[key] for facts in manifest["splits"].values() for key in ("sha256", "documents_sha256")]
        sound = sound and all(isinstance(word, str) for word in words)
        sound = sound and isinstance(manifest["tokenizer"]["vocab_size"], int)
        tables = [manifest["source"]["licences"], manifest["source"]["sha256"], manifest["skipped"], manifest["plan"]]
        sound = sound and all(isinstance(table, dict) for table in tables)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise ValueError(f"{path} is not a manifest of the format {FORMAT!r}: prepare the corpus again")
    return manifest


def split_files(folder: Path, split: str) -> tuple[Path, Path]:
    """The files of a split: token rows, and one JSON line per document."""
    return folder / f"{split}.bin", folder / f"{split}.jsonl"


def check_vocabulary(rows: Samples, model: str, own: Tokenizer | None, size: int) -> None:
    """Raise unless the rows have the model's tokenizer: by hash if the model has one saved, and by vocabulary size."""
    made = rows.manifest["tokenizer"]
    if own is not None and own.sha256 != made["sha256"]:
        raise ValueError(
            f"{rows.folder} was prepared with {made['name']} ({made['sha256'][:12]}), {model} has another "
            f"tokenizer ({own.sha256[:12]}): prepare with --tokenizer {model}"
        )
    if not made["vocab_size"] <= size <= made["vocab_size"] + SPARE_TOKENS:
        raise ValueError(
            f"{rows.folder} has a vocabulary of {made['vocab_size']:,} ({made['name']}), {model} of {size:,}: "
            "prepare with the model's tokenizer"
        )
