"""The command `elastic`: one function of `elastic_memory.commands` per subcommand, imported when it is called."""

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "demo": "Train two tiny models on this machine and compare them.",
    "prepare": "Turn text into rows of tokens of one length.",
    "train": "Train what a recipe says; resume what was interrupted.",
    "evaluate": "Perplexity, LongPPL and probes of a checkpoint.",
    "generate": "Continue a text of any length, with the memory kept in a file.",
    "memory": "Read texts into memory files, join the files, look into them.",
    "reproduce": "Regenerate a table of the paper, its values beside ours.",
    "report": "One self-contained HTML page of results, with charts.",
    "explore": "The memory microscope: a page that shows what a memory keeps.",
    "bench": "A short version of the benchmarks, as ratios.",
    "selfcheck": "Check every equivalence the library relies on, on this machine.",
}


class Command(TyperCommand):
    """A subcommand; torch, transformers and our models, which it will need, are imported when it runs."""

    def invoke(self, ctx: Any) -> Any:  # noqa: D102
        importlib.import_module("elastic_memory.model")
        return super().invoke(ctx)


class LazyGroup(TyperGroup):
    """Imports a subcommand's module only when it is called, so that `elastic --help` needs none of them."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: D102
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:  # noqa: D102
        return TyperCommand(name, short_help=COMMANDS[name]) if name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: D102
        name, _, rest = super().resolve_command(ctx, args)
        function = getattr(importlib.import_module(f"elastic_memory.commands.{name}"), str(name))
        if isinstance(function, typer.Typer):  # a command of several
            return name, typer.main.get_command(function), rest
        one = typer.Typer(add_completion=False)
        one.command(name, cls=Command, help=function.__doc__)(function)
        return name, typer.main.get_command(one), rest


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Elastic Memory.",
)


@app.callback()
def _root() -> None:
    """Elastic Memory: a fixed-size memory for Llama. `elastic COMMAND --help` explains each command."""


EXPECTED = (ValueError, OSError, KeyError, RecursionError)
EXPECTED_BY_NAME = {"SafetensorError", "StrictDataclassError"}  # of packages that the help must not import


def main() -> None:
    """Run the command line; an expected error is one line on stderr and exit code 2, never a traceback."""
    try:
        app()
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if not isinstance(error, EXPECTED) and not kinds & EXPECTED_BY_NAME:
            raise
        print(f"elastic: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)


def _one_line(error: Exception) -> str:
    """What happened, in one line; where in our own code, if the error itself does not tell."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    if isinstance(error, KeyError | RecursionError):
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{text} is missing" if isinstance(error, KeyError) else "a file is nested too deeply"
        return f"{what}: a file is not as expected (found by {Path(place.filename).name} line {place.lineno})"
    return text or type(error).__name__


if __name__ == "__main__":
    main()
