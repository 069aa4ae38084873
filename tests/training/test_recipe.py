import re
import time
import tracemalloc

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elastic_memory.training.build import build_config
from elastic_memory.training.recipe import Recipe, load_recipe, variants
from elastic_memory.training.runs import Run

from .conftest import RECIPES

TIERS = ("smoke", "small", "paper")
FILES = sorted(path for tier in TIERS for path in (RECIPES / tier).glob("*.yaml") if path.name != "base.yaml")
GOOD = """
name: x
model: {preset: tiny}
training: {tokens: 1000, length: 10, batch_tokens: 100}
"""


@pytest.fixture
def load(tmp_path):
    def write_and_load(text: str, *overrides: str) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return load_recipe(path, overrides)

    return write_and_load


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_variant_of_every_recipe_is_a_model(path):
    recipes = variants(path)
    assert recipes[0] == load_recipe(path)
    for recipe in recipes:
        assert recipe.name == f"{path.parent.name}-{path.stem}"
        build_config(recipe)


def test_tier_paper_has_every_model_of_every_table():
    got = [
        (recipe.model.memory, recipe.model.preset, recipe.model.memory_multiple, recipe.model.sampling)
        for path in FILES
        if path.parent.name == "paper"
        for recipe in variants(path)
    ]
    multiples, larger = (1, 2, 4, 8, 16), ("200m", "400m")
    wanted = [(memory, size, 1, None) for memory in ("none", "infini") for size in ("100m", *larger)]
    for memory, samplings in (("memorizing", [None]), ("melodi", [None]), ("elastic", ["exponential", "uniform"])):
        wanted += [(memory, "100m", multiple, sampling) for multiple in multiples for sampling in samplings]
        wanted += [(memory, size, 1, sampling) for size in larger for sampling in samplings]
    assert sorted(got, key=str) == sorted(wanted, key=str)


def test_tier_paper_trains_as_the_paper_says():
    training = load_recipe(RECIPES / "paper" / "elastic.yaml").training
    assert (training.learning_rate, training.beta1, training.beta2, training.epsilon) == (2e-3, 0.9, 0.95, 1e-7)
    assert (training.weight_decay, training.clip, training.seed, training.precision) == (0.1, 1.0, 42, "bf16")
    assert (training.batch, training.steps, training.warmup_steps) == (16, 76293, 763)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("modle: {}", "unknown key modle; did you mean 'model'?"),
        ("training: {tokens: 1, length: 1, batch_tokens: 1, learning_rat: 1}", "training.learning_rat; did you mean"),
        ("model: {preset: tiny, memory_multiple: many}", "model.memory_multiple: 'many', expected a valid integer"),
        ("model: {preset: tiny, memory_multiple: 1.5}", "model.memory_multiple: '1.5', expected a valid integer"),
        ("execution: {compile: 1}", "execution.compile: '1', expected a valid boolean"),
        ("execution: {on_oom: retry}", "execution.on_oom: 'retry', expected 'stop' or 'halve'"),
        ("training: {tokens: 1000, length: 10}", "training.batch_tokens is missing"),
        ("training: {tokens: 1000, length: 7, batch_tokens: 100}", "100, not a multiple of training.length 7"),
        ("training: [1]", "training: '[1]', expected a section"),
        ("training: {tokens: .nan, length: 1, batch_tokens: 1}", "training.tokens: .nan is not a finite number"),
        (
            f"training: {{tokens: {'9' * 5000}, length: 1, batch_tokens: 1}}",
            "tokens: a number of 5,000 digits",
        ),
        ("execution: " + "[" * 10000, "nested deeper than 12"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]", "alias *a"),
        ("name: x\nname: y", "name: given twice"),
        ("name: [", "not YAML"),
        ("name: 2020-01-01", "name: timestamp"),
        ("- a list", "a recipe is a mapping of sections"),
        ("base: ../other.yaml", "base: '../other.yaml', expected another file of the same folder"),
        ("base: recipe.yaml", "expected another file"),
        ("x: " + "y" * 70000, "a recipe has at most"),
    ],
)
def test_bad_recipes_are_refused_by_key_at_once_and_cheaply(load, change, complaint):
    good, changed = yaml.safe_load(GOOD), change.split(":")[0]
    text = change if changed not in good or changed == "name" else f"{change}\n"
    rest = {key: value for key, value in good.items() if key != changed}
    text += "\n" + yaml.safe_dump(rest) if not change.startswith("- ") else ""
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=re.escape(complaint)):
        load(text)
    assert time.perf_counter() - begin < 1
    tracemalloc.start()
    with pytest.raises(ValueError, match=re.escape(complaint)):
        load(text)
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


def test_files_that_are_bases_of_each_other_are_refused(tmp_path):
    for name, base in (("one", "two"), ("two", "one")):
        (tmp_path / f"{name}.yaml").write_text(f"base: {base}.yaml\n")
    with pytest.raises(ValueError, match=r"two\.yaml: base: 'one\.yaml', expected another file"):
        load_recipe(tmp_path / "one.yaml")


def test_overrides_reach_every_level_and_numbers_may_have_exponents(load):
    recipe = load(GOOD, "training.learning_rate=1e-3", "training.tokens=40e9", "model.config.hidden_size=32")
    assert recipe.training.learning_rate == 1e-3
    assert recipe.training.tokens == 40_000_000_000
    assert recipe.model.config == {"hidden_size": 32}
    with pytest.raises(ValueError, match="expected key=value"):
        load(GOOD, "training.tokens")
    with pytest.raises(ValueError, match="did you mean 'tokens'"):
        load(GOOD, "training.token=3")


def test_a_resolved_recipe_reads_back_as_itself(load):
    recipe = load(GOOD, "model.sampling=uniform")
    assert Recipe.parse(yaml.safe_load(yaml.safe_dump(recipe.to_dict())), "copy") == recipe


@given(
    st.sampled_from(["training.seed", "training.learning_rate", "model.memory_multiple", "stability.window"]),
    st.integers(43, 99),
)
def test_the_digest_names_what_is_trained_and_not_how(key, value):
    recipe = load_recipe(RECIPES / "smoke" / "elastic.yaml")
    assert recipe.replace(**{key: value}).digest("data") != recipe.digest("data")
    assert recipe.replace(**{"execution.micro_batch": value}).digest("data") == recipe.digest("data")
    assert recipe.digest("other data") != recipe.digest("data")


def test_a_run_is_named_by_what_differs_and_its_hash_comes_last(tmp_path):
    plain, changed = (
        Run(tmp_path, load_recipe("smoke/elastic", changes), "data")
        for changes in ([], ["training.learning_rate=1e-3", "model.sampling=uniform", "execution.micro_batch=2"])
    )
    assert plain.folder.name == f"smoke-elastic-{plain.digest}"
    assert changed.folder.name == f"smoke-elastic-learning_rate_1e-3-sampling_uniform-{changed.digest}"
    long = Run(tmp_path, load_recipe("smoke/none", [f"model.config.note={'/../' * 50}"]), "data")
    assert long.folder.parent == tmp_path and len(long.folder.name) < 120


def test_a_misspelt_section_is_named_before_the_one_that_is_missing():
    with pytest.raises(ValueError, match=r"trainig.*training"):
        Recipe.parse({"name": "x", "model": {"memory": "none"}, "trainig": {"tokens": 1}}, "here")
