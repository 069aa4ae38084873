"""A small prepared corpus, and a recipe that trains on it in a second."""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from elastic_memory.data import prepare
from elastic_memory.training import session
from elastic_memory.training.recipe import RECIPES, Recipe, load_recipe
from tests.conftest import disturber

QUICK = [
    "training.length=128", "training.batch_tokens=512", "training.tokens=6144", "execution.micro_batch=2",
    "execution.save_every=4", "model.config.block_size=32", "model.config.num_hidden_layers=2",
]  # fmt: skip
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "MemoryLayer", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}  # fmt: skip


@pytest.fixture(autouse=True)
def always_brief(brief_collections):
    """In every test of training."""


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Sums are the same for the same number of threads; one is what child processes use too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def write_corpus(folder: Path) -> Path:
    """Rows of 128 bytes, from sentences that repeat enough to be learnt."""
    words = ["the", "sea", "kept", "its", "own", "slow", "book", "of", "days", "and", "ships"]
    for i in range(12):
        draw = random.Random(i)
        (folder / f"{i}.txt").write_text(" ".join(draw.choice(words) for _ in range(400)))
    prepare(folder, folder / "prepared", tokenizer="bytes", length=128, shares=(0.8, 0.1, 0.1))
    return folder / "prepared"


@pytest.fixture
def quick() -> Recipe:
    """Twelve steps of four rows, a checkpoint every four."""
    return load_recipe(RECIPES / "smoke" / "elastic.yaml", QUICK)


@pytest.fixture(scope="session")
def undisturbed(corpus, tmp_path_factory) -> Path:
    """The folder of a quick run that nothing happened to."""
    out = tmp_path_factory.mktemp("undisturbed")
    return out / session.train(load_recipe(RECIPES / "smoke" / "elastic.yaml", QUICK), corpus, out)["name"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="session")
def died_in_step_9(corpus, tmp_path_factory) -> Path:
    """The folder of a run that did, for tests that copy it."""

    def crash(model, out):
        raise KeyError

    out = tmp_path_factory.mktemp("died")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError):
        disturber(patch)([17], crash)
        session.train(load_recipe(RECIPES / "smoke" / "elastic.yaml", QUICK), corpus, out)
    (run,) = out.glob("*-*")
    return run


@pytest.fixture
def stopped_at_8(died_in_step_9, tmp_path) -> Path:
    """A run that died in step 9, with checkpoints of steps 4 and 8."""
    return Path(shutil.copytree(died_in_step_9, tmp_path / died_in_step_9.name))
