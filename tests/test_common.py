"""Small things that everybody needs stand in one place, and nobody else has a second copy."""

import ast
import re
from pathlib import Path

from elastic_memory.common.defaults import BLOCK_SIZE, LENGTH, ORDER
from elastic_memory.common.names import nearest, suggest

PACKAGE = Path(__file__).parents[1] / "elastic_memory"


def holding(words: str, *folders: str) -> list[str]:
    """The files of some folders in which a pattern occurs."""
    paths = [path for folder in folders for path in sorted((PACKAGE / folder).rglob("*.py"))]
    return [str(path.relative_to(PACKAGE)) for path in paths if re.search(words, path.read_text(encoding="utf-8"))]


def test_there_is_one_did_you_mean():
    folders = ("common", "data", "training", "evaluation", "report", "reproduction", "commands")
    assert holding("get_close_matches", *folders) == ["common/names.py"]


def test_the_papers_sizes_are_stated_once():
    """Tables and benchmarks' records name them as data; kernels have tiles of such sizes."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name.startswith(("reproduction/tables/", "fast/kernels/")) or name == "report/speed.py":
            continue
        numbers = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not numbers & {BLOCK_SIZE, LENGTH, ORDER} or name == "common/defaults.py", name


def test_evaluation_and_data_need_nothing_of_training():
    assert holding(r"elastic_memory\.training", "data", "evaluation", "report") == []


def test_an_unknown_name_gets_the_nearest_known_one_and_all_of_them():
    assert nearest("signal", ["main", "signals"]) == "signals"
    assert nearest("xyz", ["main", "signals"]) is None
    assert suggest("signal", ["main", "signals"]) == "did you mean 'signals'? known: main, signals"
    assert suggest("xyz", ["main", "signals"]) == "known: main, signals"
