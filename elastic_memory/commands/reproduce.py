"""`elastic reproduce`: one file of `experiments/` per table of the paper."""

import difflib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TIERS = ("smoke", "small", "paper")


def reproduce(
    table: Annotated[str, typer.Argument(help="The table's name, for instance `signals`; `list` shows them all.")],
    tier: Annotated[str, typer.Option(help="smoke: minutes; small: one GPU; paper: the paper's own sizes.")] = "smoke",
    out: Annotated[Path, typer.Option(help="Folder for the JSON, the table and the picture.")] = Path("results"),
) -> None:
    """Regenerate a table of the paper, its values beside ours.

    Prints the table and writes it as JSON, Markdown and a picture. Needing no training, `signals` takes seconds:

        elastic reproduce signals
    """
    from rich.console import Console

    if table == "list":
        print("\n".join(tables()))
        return
    if tier not in TIERS:
        raise ValueError(f"tier {tier!r}: {', '.join(TIERS)} fit")
    Console().print(load(table).run(tier, out).rich())
    print(f"written to {out}")


def tables() -> list[str]:
    """Names of all tables that can be reproduced."""
    if not EXPERIMENTS.is_dir():
        raise FileNotFoundError("the folder experiments/ is missing: run from a clone of the repository, not a wheel")
    return sorted(path.stem.replace("_", "-") for path in EXPERIMENTS.glob("[!_]*.py"))


def load(table: str) -> ModuleType:
    """The experiment of that name: a module with `run(tier, out)`, which writes its results and returns the table."""
    if table not in tables():
        close = difflib.get_close_matches(table, tables(), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"table {table!r}: {hint}known: {', '.join(tables())}")
    path = EXPERIMENTS / f"{table.replace('-', '_')}.py"
    spec = importlib.util.spec_from_file_location(f"experiments.{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
