"""A hundred losses that must not drift: equal on the same torch and processor, to rounding on any other.

`OMP_NUM_THREADS=1 python -m tests.training.test_golden` records them anew, after a change that is meant to move them.
"""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from elastic_memory.training.recipe import load_recipe
from elastic_memory.training.session import train

from .conftest import QUICK, RECIPES, write_corpus
from .test_session import lines, only_run

GOLDEN = Path(__file__).with_name("golden.json")
HERE = f"torch {torch.__version__.split('+')[0]} {torch.backends.cpu.get_cpu_capability()}"
MEMORIES = ("none", "elastic", "memorizing", "infini", "melodi")
# a low learning rate: rounding must not have grown in a hundred steps
HUNDRED = [*QUICK, "training.tokens=51200", "training.learning_rate=3e-4", "execution.save_every=100"]


def losses(corpus, out, memory):
    train(load_recipe(RECIPES / "smoke" / f"{memory}.yaml", HUNDRED), corpus, out)
    return [line["loss"] for line in lines(only_run(out))]


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_losses_are_those_on_record(corpus, tmp_path, memory):
    golden, got = json.loads(GOLDEN.read_text()), losses(corpus, tmp_path, memory)
    assert len(got) == 100
    recorded = {machine: record for machine, record in golden.items() if memory in record}
    assert recorded
    for machine, record in recorded.items():
        assert got == (record[memory] if machine == HERE else pytest.approx(record[memory], abs=2e-6))


if __name__ == "__main__":
    torch.set_num_threads(1)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        rows = write_corpus(Path(folder))
        golden[HERE] = {memory: losses(rows, Path(folder) / memory, memory) for memory in MEMORIES}
    GOLDEN.write_text(json.dumps(golden) + "\n")
