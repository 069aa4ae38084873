"""Corpora by name: `CORPORA`. To add one, add an entry."""

import hashlib
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elastic_memory.common.names import suggest
from elastic_memory.data.parts import file_parts
from elastic_memory.data.sources import Document, Part


class Corpus(Protocol):
    """Where documents come from, and under which licence."""

    @property
    def licence(self) -> str:
        """The licence of the collection."""

    def parts(self) -> list[Part]:
        """The parts to prepare, in order."""


@dataclass(frozen=True)
class Hub:
    """Files of a data set on the Hugging Face hub, streamed by `datasets`; no code of the data set is run."""

    hub: str
    builder: str
    files: dict[str, str]
    licence: str
    text: str = "text"

    def parts(self) -> list[Part]:  # noqa: D102
        root, parts = self.root(), []
        for split in self.files:
            count = self.open(root, split).num_shards
            parts += [HubShard(self, root, split, index, count) for index in range(count)]
        return list(parts)

    def open(self, root: str, split: str) -> Any:
        """One split as a streaming data set."""
        from datasets import load_dataset

        return load_dataset(self.builder, data_files=f"{root}/{self.files[split]}", split="train", streaming=True)

    def root(self) -> str:
        """Where the files are, at the current commit, so that a resumed call reads the same ones."""
        try:
            import datasets  # noqa: F401
            from huggingface_hub import HfApi
        except ImportError:
            raise ValueError(f"{self.hub} needs the package datasets: pip install 'elastic-memory[data]'") from None
        try:
            return f"hf://datasets/{self.hub}@{HfApi().dataset_info(self.hub).sha}"
        except Exception as error:  # the hub's client raises whatever its network library does
            raise ValueError(f"cannot reach {self.hub} on the Hugging Face hub ({type(error).__name__})") from None


@dataclass(frozen=True)
class HubShard:
    """One file of a data set on the hub."""

    corpus: Hub
    root: str
    section: str
    index: int
    count: int
    size: int = 0

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.root} {self.section} {self.index} of {self.count}"

    @property
    def split(self) -> str | None:  # noqa: D102
        return self.section if len(self.corpus.files) > 1 else None

    def documents(self) -> Iterator[Document]:  # noqa: D102
        rows = self.corpus.open(self.root, self.section).shard(num_shards=self.count, index=self.index)
        for row, record in enumerate(rows):
            name = record.get("id") or f"{self.section}:{self.index}:{row}"
            yield Document(str(name), [record[self.corpus.text] or ""], self.corpus.licence)

    def hashes(self) -> dict[str, str]:  # noqa: D102
        return {self.root: self.root.rpartition("@")[2]}

    def touched(self) -> int:  # noqa: D102
        return 0


class StandardLibrary:
    """The source code of Python's standard library: always there, no download.

    Single files are short, so each package is one document, and so are all single modules with the same first letter.
    Files are in alphabetical order, each after a line with its path.
    """

    licence = "PSF-2.0"
    held_out = dict.fromkeys(("email", "logging", "modules a"), "validation")
    held_out |= dict.fromkeys(("asyncio", "unittest", "modules i"), "test")
    # third-party code, tests and generated tables
    left_out = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__phello__"})

    def parts(self) -> list[Part]:  # noqa: D102
        root = Path(sysconfig.get_paths()["stdlib"])
        documents: dict[str, list[str]] = {}
        for path in sorted(root.rglob("*.py")):
            *folders, file = path.relative_to(root).parts
            if not self.left_out.intersection(folders) and not any(name.startswith("config-") for name in folders):
                name = folders[0] if folders else f"modules {file[0].lower()}"
                documents.setdefault(name, []).append("/".join((*folders, file)))
        if not documents:
            raise ValueError(f"this Python has no source code of its standard library in {root}: choose another corpus")
        return [
            Package(root, name, tuple(documents[name]), self.held_out.get(name, "train")) for name in sorted(documents)
        ]


@dataclass(frozen=True)
class Package:
    """The files of one package of the standard library, as one document."""

    root: Path
    name: str
    files: tuple[str, ...]
    split: str | None

    @property
    def size(self) -> int:  # noqa: D102
        return sum((self.root / file).stat().st_size for file in self.files)

    def documents(self) -> Iterator[Document]:  # noqa: D102
        yield Document(self.name, self._text(), StandardLibrary.licence)

    def _text(self) -> Iterator[str]:
        for file in self.files:
            yield f"# {file}\n{(self.root / file).read_text('utf-8', errors='replace')}\n"

    def hashes(self) -> dict[str, str]:  # noqa: D102
        return {self.name: hashlib.sha256("".join(self._text()).encode()).hexdigest()}

    def touched(self) -> int:  # noqa: D102
        return max((self.root / file).stat().st_ctime_ns for file in self.files)


CORPORA: dict[str, Corpus] = {
    # a copy of deepmind/pg19, which holds only a script that downloads the books
    "pg19": Hub(
        "emozilla/pg19",
        "parquet",
        {split: f"data/{split}-*.parquet" for split in ("train", "validation", "test")},
        licence="Apache-2.0 (collection); the books are in the public domain in the United States",
    ),
    "proof-pile": Hub(
        "hoskinson-center/proof-pile",
        "json",
        {"train": "train/*.jsonl.gz", "validation": "dev/*.jsonl.gz", "test": "test/*.jsonl.gz"},
        licence="Apache-2.0",
    ),
    "fineweb-edu": Hub(
        "HuggingFaceFW/fineweb-edu", "parquet", {"train": "sample/100BT/*.parquet"}, licence="ODC-By-1.0"
    ),
    "stdlib": StandardLibrary(),
}


def find_parts(sources: list[str], text: str | None, passed_over: Counter[str]) -> list[Part]:
    """The parts of a corpus of `CORPORA`, or of files and folders; `text`: the column or field, if not "text"."""
    if len(sources) == 1 and sources[0] in CORPORA:
        if text:
            raise ValueError(f"text={text!r} (--text) has no effect on the corpus {sources[0]}: leave it out")
        return CORPORA[sources[0]].parts()
    for source in sources:
        if source in CORPORA:
            raise ValueError(f"{source} is a named corpus: prepare it without other sources")
        if not Path(source).exists():
            raise ValueError(
                f"no corpus or file {source!r}: {suggest(source, CORPORA)}; or give parquet files, JSONL (.jsonl, "
                ".jsonl.gz, .jsonl.zst) or a folder of text"
            )
    parts = file_parts([Path(source) for source in sources], text or "text", passed_over)
    if not parts:
        raise ValueError(f"nothing to read in {', '.join(sources)}{_counts(passed_over)}")
    if text and not any(hasattr(part, "text") for part in parts):
        raise ValueError(f"text={text!r} (--text) has no effect on plain text files: leave it out")
    return parts


def _counts(passed_over: Counter[str]) -> str:
    reasons = [f"{count} {reason}" for reason, count in passed_over.items() if count]
    return f" (skipped: {', '.join(reasons)})" if reasons else ""
