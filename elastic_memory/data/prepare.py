"""From a corpus to a folder of token rows for training and evaluation.

1. The corpus is divided into parts (`parts`, `corpora`).
2. Each part is tokenized into a file of rows and a record of its documents in `.work` (`tokenize_part`).
3. The rows of all parts are combined by split into `train.bin`, `validation.bin` and `test.bin` (`gather`). The
   manifest is written last: a folder with a manifest is finished.

An interrupted call repeats only the part it was in. A shard does every n-th part and stops before step 3; a call
without a shard then finds all parts done and combines them: the same bytes as from a single call.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from elastic_memory.common.defaults import LENGTH, SHARES
from elastic_memory.common.files import DISK_FULL, sha256, whole_file, write_json
from elastic_memory.common.locks import locked
from elastic_memory.data.corpora import find_parts
from elastic_memory.data.gather import NothingKept, Preparation, gather, part_files
from elastic_memory.data.samples import MANIFEST, read_manifest
from elastic_memory.data.sources import Part
from elastic_memory.data.tokenize_part import Outcome, RowMaker
from elastic_memory.data.tokenizers import load_tokenizer


class PrepareProgress(NamedTuple):
    """Parts done, of how many; bytes read, of how many (0 if unknown); documents kept."""

    part: int
    parts: int
    bytes: int
    total_bytes: int
    kept: int


def prepare(
    sources: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path,
    length: int = LENGTH,
    shares: tuple[float, ...] | None = None,
    text: str | None = None,
    shard: tuple[int, int] = (0, 1),
    workers: int | None = None,
    watch: Callable[[PrepareProgress], None] = lambda progress: None,
) -> dict[str, Any] | None:
    """Prepare a corpus of `CORPORA`, or parquet, JSONL or text files; returns the manifest, or None for a shard.

    `shares` divides the documents into train, validation and test where the corpus has no splits of its own: 90, 5 and
    5 of 100, unless given. `text`: the column or field of parquet and JSONL files that holds the text, if not "text".
    """
    _check(length, shares or SHARES, shard)
    names = [str(source) for source in ([sources] if isinstance(sources, str | Path) else sources)]
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: choose another --out")
    maker = RowMaker(load_tokenizer(tokenizer), length, shares or SHARES, workers)
    passed_over: Counter[str] = Counter()
    parts = find_parts(names, text, passed_over)
    if shares and parts[0].split:
        raise ValueError("shares (--shares) have no effect: the corpus has splits of its own; leave them out")
    plan = _plan(parts, maker)
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        _compare(folder, manifest["plan"], plan)
        _compare_content(folder, manifest["source"]["sha256"], parts)
        # A call that was killed before it could clean up leaves this.
        shutil.rmtree(folder / ".work", ignore_errors=True)
        return manifest
    with _lock(folder, shard), _explain_full_disk(folder):
        _write_plan(folder, plan)
        _tokenize(folder, parts, range(shard[0], len(parts), shard[1]), maker, watch)
        if shard != (0, 1):
            return None
        try:
            gather(folder, plan, maker, [Path(name).name for name in names], passed_over)
        except NothingKept:
            shutil.rmtree(folder / ".work")
            raise
        shutil.rmtree(folder / ".work")
        return read_manifest(folder)


def _check(length: int, shares: tuple[float, ...], shard: tuple[int, int]) -> None:
    if length < 2:
        raise ValueError(f"length {length}: a row has at least 2 tokens")
    if len(shares) != 3 or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"shares {shares}: give three numbers for train, validation and test that add up to 1")
    if not 0 <= shard[0] < shard[1]:
        raise ValueError(f"shard {shard[0]}/{shard[1]}: give 0/{shard[1]} to {shard[1] - 1}/{shard[1]}")


def _plan(parts: list[Part], maker: RowMaker) -> Preparation:
    corpus = json.dumps([[part.name, part.split, part.size] for part in parts])
    return Preparation(
        length=maker.length,
        tokenizer=maker.tokenizer.name,
        tokenizer_sha256=maker.tokenizer.sha256,
        shares=None if parts[0].split else list(maker.shares),
        parts=len(parts),
        corpus_sha256=hashlib.sha256(corpus.encode()).hexdigest(),
    )


def _write_plan(folder: Path, plan: Preparation) -> None:
    """Write the plan, or compare it with the plan of the call that started here."""
    begun = folder / ".work" / "plan.json"
    if begun.exists():
        _compare(folder, json.loads(begun.read_bytes()), plan)
    else:
        write_json(begun, asdict(plan))


def _compare(folder: Path, found: dict[str, Any], plan: Preparation) -> None:
    differ = {key: now for key, now in asdict(plan).items() if found.get(key) != now}
    if differ:
        changed = "; ".join(f"{key} was {found.get(key)}, now {now}" for key, now in differ.items())
        raise ValueError(f"{folder} was prepared with other settings ({changed}): choose another --out")


def _compare_content(folder: Path, recorded: dict[str, str], parts: list[Part]) -> None:
    """Compare the hashes of files that were touched after the folder was finished."""
    finished = (folder / MANIFEST).stat().st_ctime_ns
    for part in parts:
        if part.touched() > finished:
            for name, known in part.hashes().items():
                if recorded.get(name) != known:
                    raise ValueError(f"{folder} was prepared from another version of {name}: choose another --out")


def _tokenize(
    folder: Path, parts: list[Part], indices: range, maker: RowMaker, watch: Callable[[PrepareProgress], None]
) -> None:
    """Tokenize the parts that are not done yet."""
    done = PrepareProgress(0, len(indices), 0, sum(parts[index].size for index in indices), 0)

    def report(outcome: Outcome) -> None:
        watch(done._replace(bytes=done.bytes + outcome.bytes, kept=done.kept + len(outcome.documents)))

    for index in indices:
        part = parts[index]
        rows, record = part_files(folder, index)
        touched = part.touched()
        if not record.exists() or record.stat().st_ctime_ns < touched:
            record.unlink(missing_ok=True)
            with whole_file(rows) as file:
                outcome = maker.write(part, file, report)
            if part.touched() != touched:
                raise ValueError(f"{part.name} changed while it was read: run the same command again")
            write_json(record, {**outcome.record(), "sources": part.hashes(), "sha256": sha256(rows)})
        kept = len(json.loads(record.read_bytes())["documents"])
        done = done._replace(part=done.part + 1, bytes=done.bytes + part.size, kept=done.kept + kept)
        watch(done)


@contextmanager
def _lock(folder: Path, shard: tuple[int, int]) -> Iterator[None]:
    """Lock the folder for one process, or for one process per shard."""
    fresh = not folder.exists()
    work = folder / ".work"
    if work.is_symlink():
        raise ValueError(f"{work} is a link, and nothing is written outside of {folder}: remove it")
    try:
        with ExitStack() as locks:
            locks.enter_context(locked(work / "lock", shared=shard != (0, 1)))
            if shard != (0, 1):
                locks.enter_context(locked(work / f"lock-{shard[0]}-of-{shard[1]}"))
            yield
    finally:
        if fresh and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def _explain_full_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise ValueError(f"no space left for {folder}: free some and repeat the command to resume") from None
