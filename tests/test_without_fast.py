"""Without the folder `fast/` everything behaves the same, on plain PyTorch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Of every mechanism: streams, static caches, causality, reach, gradients, probes; and what they are built of.
TESTS = ["tests/memory/test_contract.py", "tests/test_attention.py", "tests/test_sampling.py"]
CHOSEN = "attention or sampling or future or static or reaches or any_split or checkpointing or probed"
SCRIPT = """
import torch
import elastic_memory as em
from elastic_memory.common.speedups import find

print(find("compile"))
model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny"))
try:
    model.compile_blocks()
except ValueError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs Python in a copy of the package and its tests that has no `fast/`."""
    copy = tmp_path_factory.mktemp("copy")
    for name, ignored in (("tests", "__pycache__"), ("elastic_memory", "fast")):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ignored))
    shutil.copy(ROOT / "pyproject.toml", copy)
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*words):
        return subprocess.run([sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True)

    return run


def test_behaviour_is_the_same(run):
    done = run("-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *TESTS, "-k", CHOSEN)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 100


def test_compilation_says_what_is_missing(run):
    done = run("-c", SCRIPT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "None",
        "compile_blocks: the folder elastic_memory/fast is missing here; train without compiling",
    ]
