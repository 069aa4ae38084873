"""What no file may contain: ways for data to become code; and what no import may need: the network."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "elastic_memory"
FILES = sorted(PACKAGE.rglob("*.py"))
OTHERS = sorted(path for name in ("tests", "benchmarks", "scripts") for path in (ROOT / name).rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "pty", "torch.hub"}
NAMES = {
    "eval", "exec", "__import__", "builtins.eval", "builtins.exec", "builtins.__import__", "torch.load", "torch.hub",
    "torch.jit.load", "torch.package", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all",
    "yaml.full_load", "yaml.full_load_all", "yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader", "os.system",
    "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "runpy", "pandas.read_pickle",
    *(f"os.{how}{what}" for how in ("exec", "spawn") for what in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
}  # fmt: skip
FALSE = {"shell", "trust_remote_code", "allow_pickle"}  # options that may be given only as False
SHELLS = ("sh", "bash", "dash", "zsh")


def dangers(source: str, tensors: bool = False) -> list[str]:
    """What of a program could let data become code. Names are followed through imports, called or not.

    With `tensors`, torch.load with weights_only=True may be called by its full name.
    """
    tree, known, found = ast.parse(source), {}, []
    safe = [node.func for node in ast.walk(tree) if tensors and isinstance(node, ast.Call) and _reads_tensors(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if _in(alias.name, MODULES | NAMES)]
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            full = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found += [name for name in full.values() if _in(name, MODULES | NAMES)]
            known |= full
    for node in ast.walk(tree):
        if node in safe:
            continue
        if isinstance(node, ast.Name | ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            found += [name for name in [".".join([known.get(first, first), *rest])] if name in NAMES]
        elif isinstance(node, ast.Call):
            found += _in_call(node, known)
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            found += [key.value for key, value in pairs if isinstance(key, ast.Constant) and _risky(key.value, value)]
        elif isinstance(node, ast.List | ast.Tuple):
            words = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
            found += ["a shell" for one, two in itertools.pairwise(words) if _is_shell(one) and two == "-c"]
    return found


def _reads_tensors(call: ast.Call) -> bool:
    options = {word.arg: ast.unparse(word.value) for word in call.keywords}
    return ast.unparse(call.func) == "torch.load" and options.get("weights_only") == "True"


def _in(name: str, names: set[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in names)


def _in_call(node: ast.Call, known: dict[str, str]) -> list[str]:
    found = [str(word.arg) for word in node.keywords if _risky(word.arg, word.value)]
    arguments = [item.value for item in node.args if isinstance(item, ast.Constant)]
    if ast.unparse(node.func) in ("getattr", "operator.attrgetter", "attrgetter"):
        found += [word for word in arguments if any(f".{word}" == name[-len(str(word)) - 1 :] for name in NAMES)]
        found += [word for word in arguments if word in NAMES]
    found += ["a shell" for word in arguments[:1] if isinstance(word, str) and _is_shell(word.split(" -c")[0])]
    return found


def _risky(name: object, value: ast.expr) -> bool:
    return name in FALSE and ast.unparse(value) != "False"


def _is_shell(word: object) -> bool:
    return isinstance(word, str) and word.rpartition("/")[2] in SHELLS


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_data_never_becomes_code(path):
    assert dangers(path.read_text()) == []


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nor_in_tests_benchmarks_and_scripts(path):
    assert dangers(path.read_text(), tensors=True) == []


def test_tensors_alone_are_read_only_where_it_is_said():
    assert dangers("torch.load(f, weights_only=True)", tensors=True) == []
    for line in ("torch.load(f)", "torch.load(f, weights_only=flag)", "from torch import load", "f = torch.load"):
        assert dangers(line, tensors=True), line


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "import pickle as p", "import torch.hub", "import _pickle",
        "torch.load('x')", "torch.load(f, weights_only=False)", "torch.load(f, weights_only=flag)",
        "from torch import load", "from torch import load as read", "import torch as t\nt.load('x')", "f = torch.load",
        "torch.hub.load('a/b', 'c')", "from torch import hub", "from torch.hub import load", "torch.jit.load(f)",
        "from torch import jit\njit.load(f)", "from torch import jit as j\nf = j.load",
        "eval('1')", "exec('1')", "map(eval, lines)", "builtins.eval('1')", "from builtins import eval as e",
        "__import__('os')", "getattr(os, 'system')('ls')", "getattr(torch, 'load')(f)", "getattr(builtins, 'eval')",
        "yaml.load(f)", "from yaml import load", "import yaml as y\ny.unsafe_load(f)", "yaml.load_all(f)",
        "compose(f, Loader=yaml.Loader)",
        "os.system('ls')", "from os import system", "import os as o\no.popen('ls')", "os.execvp('sh', a)",
        "from subprocess import getoutput", "run('ls', shell=True)", "run('ls', shell=flag)",
        "run('ls', **{'shell': True})", "run(['sh', '-c', line])", "run(('/bin/bash', '-c', line))", "run('sh -c x')",
        "f(trust_remote_code=True)", "f(trust_remote_code=flag)", "f(**{'trust_remote_code': True})",
        "numpy.load(f, allow_pickle=True)", "import runpy", "from runpy import run_path",
    ],
)  # fmt: skip
def test_the_scan_sees_what_it_looks_for(line):
    assert dangers(line)


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()", "json.load(f)", "yaml.safe_load(f)", "f(trust_remote_code=False)", "re.compile('x')",
        "run([sys.executable, '-c', line])", "getattr(model, 'config')", "np.load(f, allow_pickle=False)",
    ],
)  # fmt: skip
def test_the_scan_lets_pass_what_is_harmless(line):
    assert dangers(line) == []


def test_every_module_imports_without_a_network():
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in FILES]
    code = (
        "import socket, importlib\n"
        "def refuse(*args, **kwargs): raise OSError('network')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        f"[importlib.import_module(name.removesuffix('.__init__')) for name in {names!r}]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
