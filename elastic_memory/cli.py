"""The command `elastic`: one function of `elastic_memory.commands` per subcommand, imported when it is called."""

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from elastic_memory.commands.options import Command, one_line

COMMANDS = {
    "demo": "See the memory at work on this machine, in a few minutes.",
    "prepare": "Tokenize a corpus into rows of one length.",
    "attach": "Give a pretrained model a memory, to fine-tune it.",
    "train": "Train a model from a recipe, fine-tune one, or resume a run.",
    "evaluate": "Measure a model: perplexity, LongPPL, probes of its memory.",
    "generate": "Continue a text of any length; keep its memory in a file.",
    "memory": "Read texts into memory files; join and inspect them.",
    "reproduce": "Regenerate tables of the paper, with its values beside ours.",
    "report": "Make one self-contained HTML page of results, with charts.",
    "explore": "The memory microscope: a page that shows what a memory keeps.",
    "bench": "Compare the speed of all memories with a model without memory.",
    "doctor": "Show versions, devices and fast paths, and what makes this machine slow.",
    "selfcheck": "Check on this machine that fast and plain computation agree.",
}


class LazyGroup(TyperGroup):
    """Imports the module of a subcommand only when it is called, so that `elastic --help` is fast."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: D102
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:  # noqa: D102
        return TyperCommand(name, short_help=COMMANDS[name]) if name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: D102
        name, _, rest = super().resolve_command(ctx, args)
        function = getattr(importlib.import_module(f"elastic_memory.commands.{name}"), str(name))
        if isinstance(function, typer.Typer):  # has subcommands of its own
            return name, typer.main.get_command(function), rest
        one = typer.Typer(add_completion=False)
        one.command(name, cls=Command)(function)
        return name, typer.main.get_command(one), rest


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Elastic Memory: a fixed-size memory for Llama. `elastic COMMAND --help` explains each command.",
)


@app.callback()
def _root() -> None:
    pass


EXPECTED = (ValueError, OSError, KeyError, RecursionError)
EXPECTED_BY_NAME = {"SafetensorError", "StrictDataclassError"}  # of packages that are too slow to import for --help


def main() -> None:
    """Run the command line; an expected error is one line on stderr and exit code 2, never a traceback."""
    try:
        app()
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if not isinstance(error, EXPECTED) and not kinds & EXPECTED_BY_NAME:
            raise
        print(f"elastic: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
