"""The tree is the data flow: imports run one way, mechanisms are named in one place."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "elastic_memory"
ORDER = (
    "shapes", "common", "hippo", "sampling", "operators", "attention", "memory", "streaming", "model", "fast", "data",
    "training", "evaluation", "report", "reproduction", "commands", "cli",
)  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(path for folder in ("elastic_memory", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def part(path: Path) -> str:
    """The part of the package a file belongs to: `memory/elastic.py` to memory, `hippo.py` to hippo."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.Module) -> set[str]:
    """Parts of the package that a file imports, anywhere in it."""
    return {name.split(".")[1] for name in modules(tree)}


def modules(tree: ast.Module) -> set[str]:
    """What a file imports of the package: modules, and names that may be modules."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports name the whole path"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("elastic_memory.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_what_stands_above_it(path):
    if path == PACKAGE / "__init__.py":
        return
    own = part(path)
    assert own in ORDER, f"{own} has no place in the tree"
    later = {name for name in imported(parse(path)) - {own} if ORDER.index(name) > ORDER.index(own)}
    assert not later, f"{own} stands above {later} and must not import from it"


@pytest.mark.parametrize("name", ["hippo", "sampling"])
def test_the_mathematics_stands_alone(name):
    for path in FILES:
        if part(path) == name:
            assert imported(parse(path)) - {name} <= {"shapes", "common"}, path


def test_kernels_stand_alone():
    for path in (PACKAGE / "fast" / "kernels").glob("*.py"):
        names = modules(parse(path))
        assert all(name.startswith(("elastic_memory.fast.kernels", "elastic_memory.shapes")) for name in names), path


def test_only_one_lookup_knows_of_fast():
    """Everything works without the folder `fast/` (tests/test_without_fast.py), so nothing outside may import it."""
    for path in FILES:
        if part(path) != "fast":
            assert "fast" not in imported(parse(path)), f"{path.relative_to(ROOT)}: use common.speedups.find instead"
            named = any(
                isinstance(node, ast.Constant) and str(node.value).startswith("elastic_memory.fast")
                for node in ast.walk(parse(path))
            )
            assert named == (path == PACKAGE / "common" / "speedups.py"), path
            assert "kernels" not in {name.rpartition(".")[2] for name in modules(parse(path))}, path


@pytest.mark.parametrize("name", ["hippo", "sampling", "operators", "attention", "memory"])
def test_the_memory_knows_nothing_of_transformers(name):
    for path in FILES:
        if part(path) == name:
            assert not re.search(r"^\s*(import|from) transformers", path.read_text(), re.MULTILINE), path


def test_no_mechanism_is_singled_out_outside_its_file():
    from elastic_memory.memory import MEMORIES

    names = set(MEMORIES) - {"none"}
    classes = {memory.__name__ for memory in MEMORIES.values()}
    for path in FILES:
        if part(path) == "memory" or PACKAGE / "reproduction" / "tables" in path.parents:
            continue
        for node in ast.walk(parse(path)):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Compare):
                words = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)}
                assert not words & names, f"{where} compares with {words & names}: ask the registry instead"
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                kinds = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
                assert not kinds & classes, f"{where} asks for {kinds & classes}: ask the contract instead"


def test_no_mechanism_is_named_outside_memory():
    """But by the default of configurations, by the demonstration, and by tables and recipes."""
    from elastic_memory.memory import MEMORIES

    named = {"model/configuration.py": 1, "commands/demo.py": 2}
    for path in FILES:
        if part(path) == "memory" or PACKAGE / "reproduction" / "tables" in path.parents:
            continue
        words = [node.value for node in ast.walk(parse(path)) if isinstance(node, ast.Constant)]
        found = [word for word in words if isinstance(word, str) and word in set(MEMORIES) - {"none"}]
        assert len(found) <= named.get(str(path.relative_to(PACKAGE)), 0), f"{path.relative_to(ROOT)} names {found}"


def test_no_mechanism_is_imported_outside_memory():
    """But by the file of `fast/` that makes this one faster."""
    from elastic_memory.memory import MEMORIES

    files = {kind.__module__ for kind in MEMORIES.values()}
    for path in FILES:
        if part(path) == "memory":
            continue
        for name in modules(parse(path)):
            module = next((file for file in files if name == file or name.startswith(f"{file}.")), None)
            own = PACKAGE / "fast" / f"{str(module).rpartition('.')[2]}.py"
            assert module is None or path == own, f"{path.relative_to(ROOT)} imports {name}: ask the registry instead"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_are_short(path):
    assert len(path.read_text().splitlines()) <= 400
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} has {node.end_lineno - node.lineno + 1} lines"


def test_a_class_has_a_name_of_its_own():
    """One name, one meaning, in the whole package."""
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_the_page_shows_the_tree():
    text = page("architecture.md")
    for path in FILES:
        name = path.relative_to(PACKAGE).parts[0]
        if not name.startswith("__"):
            assert re.search(rf"^\s+{re.escape(name)}\b", text, re.MULTILINE), f"docs/architecture.md lacks {name}"


def test_equations_lead_to_functions_that_exist():
    import importlib

    names = re.findall(
        r"`((?:hippo|sampling|operators|attention|memory|model|evaluation)\.[\w.]+)`", page("equations.md")
    )
    assert len(names) > 30
    for name in names:
        found, parts = importlib.import_module("elastic_memory"), name.split(".")
        for depth, word in enumerate(parts, 1):
            if not hasattr(found, word):
                importlib.import_module(".".join(["elastic_memory", *parts[:depth]]))
            found = getattr(found, word)


def test_every_choice_that_code_points_to_is_written_down():
    headings = set(re.findall(r"^### (.+)$", page("choices.md"), re.MULTILINE))
    for path in SOURCES:
        for name in re.findall(r'choices\.md, "([^"]+)"', path.read_text()):
            assert name in headings, f"{path.relative_to(ROOT)} points to {name!r}"


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()
