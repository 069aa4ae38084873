"""`elastic memory`: read texts into memory files, join the files, show what they hold."""

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_memory.commands.generate import READ, chunks, encoded, load
from elastic_memory.commands.options import Command, check_range, one_line, paragraphs
from elastic_memory.common.defaults import MEMORY_SUFFIX

memory = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help=paragraphs("""
    Read texts into memory files, join the files, show what they hold.

    For example, read a book chapter by chapter and join the chapters. When one
    changes, only that one is read again:

        elastic memory read chapters/*.txt --model runs/my-model --out chapters

        elastic memory join chapters/*.memory.safetensors \\
          --out book.memory.safetensors

        elastic memory show book.memory.safetensors

        elastic generate runs/my-model --memory book.memory.safetensors \\
          --prompt "In the end"
    """),
)


@memory.command(cls=Command)
def read(
    texts: Annotated[list[Path], typer.Argument(help="UTF-8 text files; each gets its own memory file.")],
    model: Annotated[str, typer.Option(help="A run folder, a model folder, or a name on the hub.")],
    out: Annotated[Path, typer.Option(help="Folder for the memory files; created if missing.")],
    processes: Annotated[int, typer.Option(help="Number of texts to read in parallel.")] = 1,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer, if the model has none.")] = None,
) -> None:
    """Read texts into memory files, one file per text.

        elastic memory read chapters/*.txt --model runs/my-model --out chapters \\
          --processes 2

    Texts with an up-to-date memory file are skipped, so an interrupted command
    can simply be repeated.
    """  # fmt: skip
    check_range(1, processes=processes)
    targets = {path: out / f"{path.stem}{MEMORY_SUFFIX}" for path in texts}
    for path, target in targets.items():
        if not path.is_file():
            raise ValueError(f"{path}: not a file of text")
        same = [other for other in targets if targets[other] == target]
        if len(same) > 1:
            raise ValueError(f"{same[0]} and {same[1]} would both be written to {target}: read them into two folders")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")
    out.mkdir(parents=True, exist_ok=True)
    processes = min(processes, len(targets))
    if processes == 1:
        failed = [
            error for path, target in targets.items() if (error := _report(_read, path, target, model, tokenizer))
        ]
    else:
        threads = max(1, (os.cpu_count() or 1) // processes)
        # Ctrl-C reaches the workers too, but is handled here.
        pool = ProcessPoolExecutor(
            processes, get_context("spawn"), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
        )
        try:
            jobs = [pool.submit(_read, *pair, model, tokenizer, threads) for pair in targets.items()]
            failed = [error for job in as_completed(jobs) if (error := _report(job.result))]
        except KeyboardInterrupt:
            for process in list(pool._processes.values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    if failed:
        raise ValueError(f"{len(failed)} of {len(targets)} texts were not read: {'; '.join(failed)}")


@memory.command(cls=Command)
def join(
    files: Annotated[list[Path], typer.Argument(help="Memory files, in reading order.")],
    out: Annotated[Path, typer.Option(help="The joined memory file; replaced if it exists.")],
    model: Annotated[str | None, typer.Option(help="The model that made them, if its folder has moved.")] = None,
    approximate: Annotated[
        bool, typer.Option(help="Join even if the result is approximate (docs/composing.md).")
    ] = False,
) -> None:
    """Join memory files, as if their texts had been read in this order.

        elastic memory join one.memory.safetensors two.memory.safetensors \\
          --out both.memory.safetensors

    No text is read again, except the last, unfinished block of the last file.
    The joined file lists the names and lengths of its parts.
    """  # fmt: skip
    from elastic_memory.evaluation.loading import load_model
    from elastic_memory.streaming import memory_file
    from elastic_memory.streaming.cache import MemoryCache

    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: give a file, in a folder that exists")
    if out.resolve() in [path.resolve() for path in files]:
        raise ValueError(f"--out {out} is one of the files to join, which would be replaced: name another file")
    if model is None:
        model = str(memory_file.describe(files[0]).get("model"))
        if not Path(model).is_dir():  # never download a model that a file names
            raise ValueError(f"{files[0]} was made by the model {model!r}, which is no folder here: give --model")
    loaded = load_model(model)

    def caches() -> Any:
        for path in files:
            cache = MemoryCache.load(path, loaded)
            cache.name = cache.name or path.name.removesuffix(MEMORY_SUFFIX)
            yield cache

    joined = MemoryCache.join(caches(), approximate=approximate)
    joined.save(out)
    typer.echo(
        f"{out}: {len(files)} {'file' if len(files) == 1 else 'files'}, {joined.clock[0]:,} tokens in {_size(out)}"
    )


@memory.command(cls=Command)
def show(files: Annotated[list[Path], typer.Argument(help="Memory files.")]) -> None:
    """Show what memory files hold: model, tokens, parts, size.

        elastic memory show book.memory.safetensors

    Every file is checked against its checksum; a damaged one is an error.
    """  # fmt: skip
    from elastic_memory.streaming import memory_file

    for path in files:
        header = memory_file.describe(path)
        config = header["config"]
        layers = [f"{kind} in layer {index}" for index, (kind, state) in enumerate(config["layers"]) if state]
        blocks = f"{config['local_attention']} attention, {config['block_size']:,} tokens"
        typer.echo(f"{path}: {_size(path)}, checksum ok")
        typer.echo(f"  model   {header.get('model') or 'unnamed'}, weights {str(header.get('weights'))[:12]}")
        typer.echo(f"  memory  {', '.join(layers) or 'none'}; {blocks}")
        for row, (seen, opened) in enumerate(zip(header["seen"], header["opened"], strict=True)):
            name = f"row {row}" if len(header["seen"]) > 1 else "tokens"
            typer.echo(f"  {name:6}  {seen + opened:,}: {seen:,} in memory, {opened:,} in the open block")
            _show_parts(header, row)


def _show_parts(header: dict[str, Any], row: int) -> None:
    """Print a line for each text that was read, if there are several or the only one has a name."""
    parts = (header.get("parts") or {row: []})[row]
    rest = header["seen"][row] + header["opened"][row] - sum(tokens for _, tokens, _ in parts)
    every = [(name, tokens) for name, tokens, _ in parts] + ([(header.get("name"), rest)] if rest else [])
    if len(every) == 1 and every[0][0] is None:
        return
    for number, (name, tokens) in enumerate(every, 1):
        typer.echo(f"  part {number:3}  {tokens:>12,}  {name or 'unnamed'}")


def _read(path: Path, target: Path, model: str, tokenizer: str | None, threads: int | None = None) -> str:
    """Read a text into its memory file, unless that is up to date; returns a line that says what was done."""
    from elastic_memory.model import MemoryCache

    loaded, encoder = _load(model, tokenizer, threads)
    hashed = hashlib.blake2b(digest_size=16)
    ids = _encode(path, encoder, hashed).to(loaded.device)
    if target.exists():
        try:
            cache = MemoryCache.load(target, loaded)
        except ValueError as error:
            raise ValueError(f"{error}; delete it to have {path} read again") from None
        if cache.clock == [ids.shape[1]] and cache.holds(ids):
            return f"{target}: up to date, {ids.shape[1]:,} tokens"
    begin = time.perf_counter()
    cache = MemoryCache(loaded)
    cache.name = path.stem
    for piece in _watched(ids, path.name) if threads is None else (ids,):
        cache.read(piece)
    cache.note_text(hashed.hexdigest())  # so that `elastic generate` does not read it again
    cache.save(target)
    rate = ids.shape[1] / (time.perf_counter() - begin)
    return f"{target}: {ids.shape[1]:,} tokens in {_size(target)}, {rate:,.0f} tokens/s"


@lru_cache(maxsize=1)
def _load(model: str, tokenizer: str | None, threads: int | None) -> tuple[Any, Any]:
    """The model and its tokenizer, loaded once per process."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    return load(model, tokenizer)


def _encode(path: Path, encoder: Any, hashed: Any) -> Any:
    """The ids of a text, encoded in pieces; `hashed` is updated with the text."""
    import torch

    with path.open("rb") as file:
        texts = encoded(chunks(file, path, hashed), encoder, str(path))
        parts = [torch.from_numpy(ids.astype("int64")) for _, ids in texts]
    if not parts:
        raise ValueError(f"{path} is empty: there is nothing to read")
    return torch.cat(parts)[None]


def _watched(ids: Any, name: str) -> Iterator[Any]:
    """The ids in long pieces, with a progress bar."""
    from elastic_memory.common.progress import Bars

    with Bars(transient=True) as progress:
        task = progress.add_task(name, total=ids.shape[1], unit="tokens")
        for piece in ids.split(READ, dim=1):
            yield piece
            progress.advance(task, piece.shape[1])


def _report(work: Any, *arguments: Any) -> str | None:
    """Print the line that `work` returns; if it fails, return the reason."""
    try:
        typer.echo(work(*arguments))
    except (ValueError, OSError) as error:
        return one_line(error)
    return None


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
