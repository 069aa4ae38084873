"""A cache is changed by its own methods only, and a streamed token passes through few files of the package."""

import ast
import sys
from pathlib import Path

import pytest
import torch

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from tests.conftest import small_model

PACKAGE = Path(em.__file__).parent
OWNERS = {
    "streaming/reader.py": "Reader",
    "streaming/cache.py": "MemoryCache",
    "streaming/layer_cache.py": "LayerCache",
}
PUBLIC = {"name"}  # of the text that is being read: users set it


def definition(tree: ast.AST, name: str) -> ast.ClassDef:
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)


def changed(node: ast.AST) -> tuple[str, str] | None:
    """(object, attribute) if this node assigns, adds to, deletes or sets by name an attribute, or an item of one."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("setattr", "__setattr__"):
        *_, target, name, _ = map(ast.unparse, node.args)
        known = name.strip("'\"") if name != name.strip("'\"") else "streams" if "cache" in target else ""
        return target, known
    if not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
        return None
    if isinstance(node, ast.Subscript):
        node = node.value
    return (ast.unparse(node.value), node.attr) if isinstance(node, ast.Attribute) else None


def fields(file: str, method: str) -> set[str]:
    owner = definition(ast.parse((PACKAGE / file).read_text()), OWNERS[file])
    function = next(node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == method)
    return {found[1] for node in ast.walk(function) if (found := changed(node)) and found[0] == "self"} - PUBLIC


FIELDS = {
    field
    for file, method in (("reader", "__init__"), ("reader", "reset"), ("layer_cache", "__init__"))
    for field in fields(f"streaming/{file}.py", method)
}


def writes(source: str, owner: str | None = None) -> list[str]:
    """Where code changes fields of a cache, the class that owns them aside; `self` and `ctx` are other objects."""
    tree = ast.parse(source)
    own = {id(node) for node in ast.walk(definition(tree, owner))} if owner else set()
    found = [(node.lineno, *changed(node)) for node in ast.walk(tree) if id(node) not in own and changed(node)]
    return [
        f"line {line}: {target}.{name}"
        for line, target, name in found
        if name in FIELDS and target not in ("self", "ctx")
    ]


def test_the_fields_are_found():
    assert {"streams", "seen", "opened", "columns", "tokens", "decoder", "state", "reading", "open"} <= FIELDS


@pytest.mark.parametrize(
    "line",
    [
        "cache.seen = [1]",
        "cache.columns += 1",
        "cache.seen[0] += 1",
        "del past_key_values.opened",
        "a.streams, b = [], 1",
        "setattr(cache, 'opened', [])",
        "setattr(cache, name, [])",
        "object.__setattr__(cache, 'opened', [])",
        "for stream in cache.streams:\n    stream.state = ()",
        "def change(cache):\n    cache.streams[0].open['key'] = None",
    ],
)
def test_a_write_from_outside_is_found(line):
    assert writes(line)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_caches_write_their_fields(path):
    found = writes(path.read_text(), OWNERS.get(str(path.relative_to(PACKAGE))))
    assert not found, "call a method of the cache instead"


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_streamed_token_visits_six_files(memory):
    """Only mechanisms outside the softmax compute something for every token, in files of their own."""
    model = small_model(memory)
    cache, files = em.MemoryCache(model), set()

    def visit(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(str(path.relative_to(PACKAGE)))

    with torch.no_grad():
        model(torch.ones(1, 43, dtype=torch.long), past_key_values=cache)
        sys.setprofile(visit)
        try:
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
        finally:
            sys.setprofile(None)
    assert cache.clock == [44]
    own = {file for file in files if file.startswith("memory/")}
    assert len(files - own) <= 6
    assert not own or not any(memory.shares_softmax for memory in model.memories.values())
