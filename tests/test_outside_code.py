"""Files from outside name things; they never run, load or place anything outside of where they belong."""

import json
import shutil
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from elastic_memory.data import load_tokenizer, prepare
from elastic_memory.training.build import build_config
from elastic_memory.training.recipe import Recipe
from tests.conftest import small_model
from tests.test_cli import call

CODE = "from pathlib import Path\nPath({marker!r}).write_text('ran')\n"


def recipe(name="x", **config):
    return {
        "name": name,
        "model": {"preset": "tiny", "config": config},
        "training": {"tokens": 100, "length": 10, "batch_tokens": 10},
    }


@pytest.mark.parametrize(
    "name", ["../../escape", "/tmp/escape", "a/b", "..", ".hidden", "", "a\nb", "a b", "-x", "x" * 101]
)
def test_a_recipe_cannot_name_a_place_outside_its_folder(name):
    with pytest.raises(ValueError, match=r"recipe: name: .* letters, digits"):
        Recipe.parse(recipe(name), "recipe")


@pytest.mark.parametrize("name", ["smoke-elastic", "transformer++", "100m_4x", "v1.2"])
def test_usual_names_fit(name):
    assert Recipe.parse(recipe(name), "recipe").name == name


@pytest.mark.parametrize(
    "key", ["attn_implementation", "experts_implementation", "_attn_implementation", "_name_or_path", "__class__"]
)
def test_a_recipe_cannot_reach_the_machinery_behind_a_config(key):
    with pytest.raises(ValueError, match=f"model.config.{key}"):
        build_config(Recipe.parse(recipe(**{key: "someone/kernel"}), "recipe"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model of bytes and rows for it; copies of both whose files ask for code of their own."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("a long enough text " * 40)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder / "tokenizer")
    prepare(folder / "text", folder / "rows", tokenizer=folder / "tokenizer", length=64, shares=(1, 0, 0))
    small_model(vocab_size=256).save_pretrained(folder / "model")
    load_tokenizer(folder / "tokenizer").save(folder / "model")
    (folder / "recipe.yaml").write_text(json.dumps(recipe()).replace("10}", "64}").replace(": 10,", ": 64,"))
    return folder


@pytest.fixture
def copied(place, tmp_path, monkeypatch):
    """A copy of the place in which the user would answer yes to anything."""
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return tmp_path


def demand_code(folder, file, auto_map, **more):
    """Let a config ask for a class of a file beside it, which leaves a marker when it is imported."""
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | {"auto_map": auto_map} | more))
    marker = folder.parent / "marker"
    (folder / "evil.py").write_text(CODE.format(marker=str(marker)))
    return marker


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_the_code_of_a_model_is_never_run(copied, monkeypatch, capsys, command):
    marker = demand_code(
        copied / "model",
        "config.json",
        {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        model_type="evil",
    )
    rest = ["--data", "rows", "--split", "train"] if command == "evaluate" else ["--prompt", "x"]
    code, _, said = call(monkeypatch, capsys, command, "model", *rest)
    assert not marker.exists()
    assert (code, said.count("\n")) == (2, 1), said
    assert "its own code" in said


@pytest.mark.parametrize(
    ("where", "arguments"),
    [
        ("tokenizer", ["prepare", "text", "--tokenizer", "tokenizer", "--out", "other", "--length", "64"]),
        ("rows/tokenizer", ["prepare", "--inspect", "rows"]),
        ("rows/tokenizer", ["train", "recipe.yaml", "--data", "rows"]),
        ("model", ["generate", "model", "--prompt", "x"]),
    ],
)
def test_the_code_of_a_tokenizer_is_never_run(copied, monkeypatch, capsys, where, arguments):
    marker = demand_code(
        copied / where,
        "tokenizer_config.json",
        {"AutoTokenizer": ["evil.Slow", "evil.Fast"]},
        tokenizer_class="EvilTokenizer",
    )
    code, _, said = call(monkeypatch, capsys, *arguments)
    assert not marker.exists() and not (copied / "marker").exists() and not list(copied.rglob("marker"))
    assert (code, said.count("\n")) == (2, 1), said
    assert "evil" not in sys.modules


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_config_cannot_name_a_kernel_of_the_hub(copied, monkeypatch, capsys, key):
    path = copied / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "someone/kernel"}))

    def refuse(*_, **__):
        raise AssertionError("the kernel loader was asked")

    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", refuse)
    code, _, said = call(monkeypatch, capsys, "generate", "model", "--prompt", "x")
    assert (code, said.count("\n")) == (2, 1), said
    assert "someone/kernel" in said
