"""`elastic explore`."""

import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_memory.commands.options import check_range, refuse_unused
from elastic_memory.common.defaults import MEMORY_SUFFIX

Files = Annotated[
    list[Path] | None,
    typer.Argument(help="Run or model folders (with --text or --serve), and memory files. Without any: signals."),
]
Serve = Annotated[bool, typer.Option(help="Keep the models loaded, and let them read text pasted into the page.")]


def explore(
    files: Files = None,
    text: Annotated[Path | None, typer.Option(help="The UTF-8 text that the models read.")] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("explore.html"),
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    serve: Serve = False,
    port: Annotated[int, typer.Option(help="Port of --serve, on localhost only; 0 picks a free one.")] = 0,
    tokens: Annotated[int, typer.Option(help="How many tokens of a text are read at most.")] = 4096,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer, if the model folder has none.")] = None,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """The memory microscope: see what a memory keeps, where it looks, and what it changes.

    Writes one HTML page that needs no other file and no network, and opens it. Without a file it shows how well
    signals are rebuilt, at any order, number of sample points, sampling and length. With models and a text it shows
    the text coloured by what memory changes, the attention on each memory token, the words nearest to it, and how
    well old tokens are reconstructed. Two models or two memory files are shown side by side.

        elastic explore

        elastic explore runs/my-model runs/another --text book.txt

        elastic explore one.memory.safetensors two.memory.safetensors

        elastic explore runs/my-model --serve
    """  # fmt: skip
    from elastic_memory.common.files import check_writable, write_text
    from elastic_memory.report import explorer
    from elastic_memory.report.explorer_server import Server

    check_range(2, 10**6, tokens=tokens)
    check_range(0, 65535, port=port)
    memories = [path for path in files or [] if path.name.endswith(MEMORY_SUFFIX)]
    folders = [path for path in files or [] if path not in memories]
    _check(folders, memories, text, serve)
    refuse_unused(context, *(["with --serve", "out"] if serve else ["without --serve", "port"]))
    if not folders:
        refuse_unused(context, "without a model to read a text", "tokens", "tokenizer")
    if not serve:
        check_writable(out)
    book = _read(text) if text else None
    kept = explorer.memory_files(memories)
    readers = _readers([str(path) for path in folders], tokenizer)

    def read(words: str) -> list[dict[str, Any]]:
        return [_document(name, reader, words, tokens) for name, reader in readers.items()]

    subjects = [*(read(book) if book is not None else []), *kept]
    if not serve:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, explorer.page(subjects))
        print(f"written to {out}")
        if show:
            webbrowser.open(out.resolve().as_uri())
        return
    server = Server(explorer.page(subjects, live=True), read, port)
    print(f"{server.address} (Ctrl-C ends it)", flush=True)
    if show:
        webbrowser.open(server.address)
    server.run()


def _document(name: str, reader: tuple[Any, Any], words: str, tokens: int) -> dict[str, Any]:
    """What the page shows of a model that reads a text."""
    from elastic_memory.common.progress import Bars
    from elastic_memory.report import explorer

    with Bars() as progress:
        bar = progress.add_task(f"{name} reads the text", total=None, unit="tokens")

        def watch(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        return explorer.document(*reader, words, name, tokens, watch)


def _check(folders: list[Path], memories: list[Path], text: Path | None, serve: bool) -> None:
    """Refuse what cannot work, or would have no effect, before a model is loaded."""
    for path in (*folders, *memories, *([text] if text else [])):
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
    for path in folders:
        if folders.count(path) > 1:
            raise ValueError(f"{path} is given twice")
        if not path.is_dir():
            raise ValueError(f"{path}: give a run or model folder, or a memory file (*.memory.safetensors)")
    if text and not folders:
        raise ValueError(f"--text {text}: name the model that shall read it, such as runs/my-model")
    if folders and not text and not serve:
        raise ValueError(f"{folders[0]} has nothing to read: give --text book.txt, or --serve to paste a text")
    if serve and not folders:
        raise ValueError("--serve: name the model that shall read what is pasted, such as runs/my-model")


def _readers(folders: list[str], tokenizer: str | None) -> dict[str, tuple[Any, Any]]:
    """Models with their tokenizers, by the name the page gives them."""
    from elastic_memory.commands.generate import load
    from elastic_memory.report.charts import short_names

    names = short_names(Path(folder).resolve().name for folder in folders)
    if len(names) < len(folders):  # folders of one name: their paths tell them apart
        names = {folder: folder for folder in folders}
    return {name: load(folder, tokenizer) for name, folder in zip(names.values(), folders, strict=True)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
