"""What no file of the package may contain: ways for data to become code, and network access on import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "elastic_memory"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen"}
KEYWORDS = {"shell", "trust_remote_code"}


def dangers(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in MODULES:
            found.append(str(node.module))
        if isinstance(node, ast.Call):
            found += [name for name in [ast.unparse(node.func)] if name in CALLS]
            found += [word.arg for word in node.keywords if word.arg in KEYWORDS]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_data_never_becomes_code(path):
    assert dangers(path.read_text()) == []


@pytest.mark.parametrize(
    "line", ["import pickle", "torch.load('x')", "eval('1')", "run('ls', shell=True)", "f(trust_remote_code=True)"]
)
def test_the_scan_sees_what_it_looks_for(line):
    assert dangers(line)


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
