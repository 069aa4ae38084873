"""One file per table: `EXPERIMENT` for those with trained models, `run(tier, out)` for the others."""

import ast
import importlib
from functools import cache
from pathlib import Path
from types import ModuleType

from elastic_memory.common.names import suggest
from elastic_memory.reproduction.experiment import Experiment
from elastic_memory.reproduction.lab import Measurement, Trained

FOLDER = Path(__file__).parent
TABLE_ORDER = ("main", "corruption", "learning-rate", "memory-scaling")  # most important first; others follow
NAMES = sorted(
    (path.stem.replace("_", "-") for path in FOLDER.glob("[!_]*.py")),
    key=lambda name: (TABLE_ORDER.index(name) if name in TABLE_ORDER else len(TABLE_ORDER), name),
)


def load(table: str) -> ModuleType:
    """The module of a table."""
    if table not in NAMES:
        raise ValueError(f"table {table!r}: {suggest(table, NAMES)}")
    return importlib.import_module(f"{__name__}.{table.replace('-', '_')}")


def summary(table: str) -> str:
    """The first sentence of a table's file, read without importing it."""
    text = (FOLDER / f"{table.replace('-', '_')}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


@cache
def experiments() -> dict[str, Experiment]:
    """All tables with trained models."""
    found = {name: getattr(load(name), "EXPERIMENT", None) for name in NAMES}
    return {name: experiment for name, experiment in found.items() if experiment is not None}


def wanted(model: Trained) -> list[Measurement]:
    """All measurements of a model that any table needs: taken together, while its weights exist."""
    return list(dict.fromkeys(pair for experiment in experiments().values() for pair in experiment.wanted(model)))
