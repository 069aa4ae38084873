"""Every kernel compiles for Hopper, on a machine without a GPU too, keeps its numbers in registers and fits."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHARED = 227 * 1024  # bytes that a program can have
LAUNCHED = {
    "mix_kernel", "mix_gradient_kernel", "matrix_gradient_kernel", "fold_kernel", "fold_gradient_kernel",
    "chain_kernel", "_losses",
    "_climb", "_column", "_project", "_attend", "_merge", "_expand", "_contract",
}  # fmt: skip


def test_kernels_compile_and_nothing_is_spilled():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.fast.kernels.hopper"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {one["kernel"] for one in found} == LAUNCHED
    assert not [one for one in found if one["spilled"] or one["shared"] > SHARED]
