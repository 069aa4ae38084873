"""What several commands share: how they begin, their help, checks of options, and errors as one line."""

import importlib
import inspect
import signal
import traceback
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

LARGEST_MEMORY = 100_000  # coefficients or sample points: more would take minutes, and exceed memory


def paragraphs(text: str) -> str:
    """Help of a command, for terminals of 80 columns or more: a paragraph in one line, an indented example in bold.

    Without the markup, typer would remove the indentation of examples at the end.
    """
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(f"[bold]{part}[/]" if part.startswith(" ") else " ".join(part.split()) for part in parts)


class Command(TyperCommand):
    """A subcommand; torch, transformers and our models are imported when it runs."""

    def __init__(self, *args: Any, help: str, **kwargs: Any):
        super().__init__(*args, help=paragraphs(help), **kwargs)

    def invoke(self, ctx: Any) -> Any:  # noqa: D102
        importlib.import_module("elastic_memory.model")
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            # until here Ctrl-C ended the process at once (elastic_command.py)
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return super().invoke(ctx)


def refuse_unused(context: typer.Context | None, when: str, *names: str) -> None:
    """Refuse options and arguments that have no effect, if they were given; `when` says why they have none.

    Without a context, the command was called as a Python function.
    """
    if context is None:
        return
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            named = next((word for word in parameter.opts if word.startswith("--")), str(parameter.name).upper())
            raise ValueError(f"{named} has no effect {when}: leave it out")


def check_range(least: int, most: float = float("inf"), **options: float | list[int] | None) -> None:
    """Refuse numbers outside a range by the name of their option; None means that an option was not given."""
    for name, given in options.items():
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not least <= value <= most:
                bounds = f"{least:,} or more" if most == float("inf") else f"{least:,} to {most:,}"
                raise ValueError(f"--{name.replace('_', '-')} {value}: give {bounds}")


def one_line(error: Exception) -> str:
    """The error in one line; with a place in the code if the message alone would not explain it."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    if isinstance(error, KeyError | RecursionError):
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{text} is missing" if isinstance(error, KeyError) else "a file is nested too deeply"
        return f"{what}: a file is not as expected (found by {Path(place.filename).name} line {place.lineno})"
    return text or type(error).__name__
