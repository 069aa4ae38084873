"""`elastic reproduce`: one file of `experiments/` per table of the paper."""

import ast
import difflib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TIERS = ("smoke", "small", "paper")


def reproduce(
    table: Annotated[str, typer.Argument(help="The table's name, for instance `signals`; `list` shows them all.")],
    tier: Annotated[str, typer.Option(help="smoke: minutes; small: one GPU; paper: the paper's own sizes.")] = "smoke",
    out: Annotated[Path, typer.Option(help="Folder for tables and JSON, and for the runs they are made of.")] = Path(
        "results"
    ),
    data: Annotated[
        Path | None, typer.Option(help="Folder with prepared rows in pg19/, proof-pile/ and fineweb-edu/.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The model that finds LongPPL's key tokens: a run, a folder, a name on the hub.")
    ] = None,
) -> None:
    """Regenerate a table of the paper, its values beside ours.

    Prints the table and writes it to --out as JSON and Markdown. `signals` needs no training and takes seconds:

        elastic reproduce signals

    Others train their models first, from the recipes of the tier, and measure them. Runs, and what was measured of
    them, are kept in OUT/runs and shared between tables; after an interruption the same command goes on. Tier smoke
    brings its own text; the others need the corpora:

        elastic reproduce main

        elastic prepare proof-pile --tokenizer meta-llama/Llama-2-7b-hf --length 8192 --out rows/proof-pile

        elastic reproduce memory-scaling --tier small --data rows

        elastic reproduce injection --tier paper --data rows32k --reference meta-llama/Llama-3.1-8B

    `elastic reproduce list` says what there is.
    """
    from rich.console import Console

    if table == "list":
        print("\n".join(f"{name:16}{_summary(name)}" for name in tables()))
        return
    if tier not in TIERS:
        raise ValueError(f"tier {tier!r}: {', '.join(TIERS)} fit")
    run = load(table).run
    options = {name: value for name, value in (("data", data), ("reference", reference)) if value is not None}
    for name in options.keys() - inspect.signature(run).parameters.keys():
        raise ValueError(f"table {table!r} has no use for --{name}: leave it out")

    from elastic_memory.training.runs import StoppedError

    try:
        Console().print(run(tier, out, **options).rich())
    except StoppedError as error:
        print(f"elastic: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"written to {out}")


def tables() -> list[str]:
    """Names of all tables that can be reproduced."""
    if not EXPERIMENTS.is_dir():
        raise FileNotFoundError("the folder experiments/ is missing: run from a clone of the repository, not a wheel")
    return sorted(path.stem.replace("_", "-") for path in EXPERIMENTS.glob("[!_]*.py"))


def _summary(table: str) -> str:
    """The first sentence of an experiment's file, which is not run for it."""
    return (ast.get_docstring(ast.parse(_path(table).read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _path(table: str) -> Path:
    return EXPERIMENTS / f"{table.replace('-', '_')}.py"


def load(table: str) -> ModuleType:
    """The experiment of that name: a module with `run(tier, out)`, which writes its results and returns the table.

    One that trains its models takes `data` and `reference` as well.
    """
    if table not in tables():
        close = difflib.get_close_matches(table, tables(), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"table {table!r}: {hint}known: {', '.join(tables())}")
    path = _path(table)
    spec = importlib.util.spec_from_file_location(f"experiments.{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
