"""`elastic prepare`: text on disk becomes rows of tokens."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_memory.commands.options import check_range, refuse_unused
from elastic_memory.common.defaults import LENGTH, SHARES

PORTIONS = "/".join(f"{100 * share:g}" for share in SHARES)


def prepare(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="pg19, proof-pile, fineweb-edu, stdlib; or parquet, JSONL (.gz, .zst), folders of text."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write.")] = None,
    tokenizer: Annotated[str, typer.Option(help="A folder, a name on the hub, or `bytes`.")] = "",
    length: Annotated[int, typer.Option(help="Tokens in a row; documents that are not longer are left out.")] = LENGTH,
    text: Annotated[
        str | None, typer.Option(help="The column or field of parquet and JSONL with the text (default: text).")
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option(
            help=f"Shares of documents for train/validation/test, if the corpus has no splits (default {PORTIONS})."
        ),
    ] = None,
    shard: Annotated[
        str, typer.Option(help="i/n: do share i (from 0) of n. When all are done, run once without --shard to finish.")
    ] = "0/1",
    workers: Annotated[int | None, typer.Option(help="Tokenizer threads (default: one per core).")] = None,
    inspect: Annotated[Path | None, typer.Option(help="Show and verify a prepared folder instead.")] = None,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Tokenize a corpus into rows of one length, ready to train on.

    Each document longer than --length tokens is cut into rows of exactly that length. What is left at its end is
    dropped, so that no row holds parts of two documents. To resume an interrupted call, repeat the same command.

        elastic prepare stdlib --tokenizer bytes --length 8192 --out rows

        elastic prepare --inspect rows
    """
    if inspect:
        making = ("sources", "out", "tokenizer", "length", "text", "shares", "shard", "workers")
        refuse_unused(context, "with --inspect", *making)
        return _inspect(inspect)
    usage = "elastic prepare SOURCE --tokenizer NAME --out FOLDER (or --inspect FOLDER)"
    if not sources:
        raise ValueError(f"no source given: {usage}")
    if not tokenizer:
        raise ValueError(f"--tokenizer is missing: a folder, a name on the hub, or bytes (one token per byte); {usage}")
    if not out:
        raise ValueError(f"--out is missing: the folder to write; {usage}")
    check_range(1, 10_000, workers=workers)
    which = _numbers(shard, 2, "--shard 0/8")
    manifest = _run(
        sources, out, tokenizer=tokenizer, length=length, text=text, workers=workers, shard=(which[0], which[1]),
        shares=_portions(shares) if shares else None,
    )  # fmt: skip
    if manifest is None:
        print(f"shard {shard} is done; when all are, run the same command without --shard")
    else:
        _show(out, manifest)


def _run(sources: list[str], out: Path, **options: Any) -> dict[str, Any] | None:
    """Call `elastic_memory.data.prepare` with a progress bar; returns its manifest, None for a shard."""
    from elastic_memory.common.progress import Bars
    from elastic_memory.data.prepare import PrepareProgress
    from elastic_memory.data.prepare import prepare as run

    bar = Bars()
    task = bar.add_task("reading", total=None, unit="bytes")

    def watch(state: PrepareProgress) -> None:
        bar.start()  # only once there is progress: an error in the arguments stays one line
        description = f"part {state.part}/{state.parts}, {state.kept} documents kept"
        bar.update(task, description=description, completed=state.bytes, total=state.total_bytes or None)

    try:
        return run(sources, out, **options, watch=watch)
    finally:
        if bar.live.is_started:
            bar.stop()


def _numbers(text: str, count: int, example: str) -> list[int]:
    if not re.fullmatch(rf"\d+(/\d+){{{count - 1}}}", text):
        raise ValueError(f"{text!r}: write it like {example}")
    return [int(number) for number in text.split("/")]


def _portions(shares: str) -> tuple[float, ...]:
    numbers = _numbers(shares, 3, f"--shares {PORTIONS}")
    if not sum(numbers):
        raise ValueError("--shares 0/0/0 leaves nothing: give at least one number above 0")
    return tuple(number / sum(numbers) for number in numbers)


def _inspect(folder: Path) -> None:
    from elastic_memory.data.samples import read_manifest, samples

    manifest = read_manifest(folder)
    _show(folder, manifest)
    for split in manifest["splits"]:
        rows = samples(folder, split)
        rows.verify()
        lengths = sorted(document["tokens"] for document in rows.documents)
        middle = lengths[len(lengths) // 2]
        print(f"{split}: checksums match; documents of {lengths[0]:,} to {lengths[-1]:,} tokens, median {middle:,}")
    first = samples(folder, next(iter(manifest["splits"])))
    print(f"\nthe first row, from {first.documents[0]['id']!r}, starts with:\n")
    print(first.tokenizer().decode(first[0]["input_ids"][:200].tolist()))


def _show(folder: Path, manifest: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from elastic_memory.data.parts import SPLITS

    table = Table("split", "documents", "tokens", "rows", title=f"rows of {manifest['length']:,} tokens")
    for split, facts in manifest["splits"].items():
        table.add_row(split, *(f"{facts[key]:,}" for key in ("documents", "tokens", "rows")))
    Console().print(table)
    tokenizer, skipped = manifest["tokenizer"], manifest["skipped"]
    print(f"tokenizer {tokenizer['name']} ({tokenizer['vocab_size']:,} ids, sha256 {tokenizer['sha256'][:12]})")
    print("licences: " + ", ".join(f"{name} ({count})" for name, count in manifest["source"]["licences"].items()))
    print("left out: " + (", ".join(f"{count:,} {reason}" for reason, count in skipped.items()) or "nothing"))
    missing = [split for split in SPLITS if split not in manifest["splits"]]
    if missing:
        print(f"no documents for {' and '.join(missing)}: see --shares")
    print(f"in {folder}")
