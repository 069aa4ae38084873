"""`elastic train --from`: a model that exists, with memory, is trained further."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from elastic_memory.common.checksums import verify
from elastic_memory.data import load_tokenizer, prepare
from elastic_memory.evaluation.attaching import write_attached
from elastic_memory.evaluation.loading import load_model, starting_model
from elastic_memory.training import session
from elastic_memory.training.build import flops_per_token
from elastic_memory.training.plan import measurements
from elastic_memory.training.recipe import RECIPES, load_recipe, variants
from elastic_memory.training.session import Resume, train
from elastic_memory.training.trainer import parameter_groups
from tests.model.test_attach import SHAPE
from tests.test_cli import call

from .conftest import same_weights, weights

SHORT = [
    "training.length=128", "training.batch_tokens=512", "training.tokens=3072", "execution.micro_batch=2",
    "execution.save_every=2", "training.precision=fp32", "execution.device=cpu", "execution.compile=false",
]  # fmt: skip


LORA = "training.lora={rank: 4, alpha: 8, targets: [q_proj, v_proj, down_proj]}"


def recipe(*changes: str, name: str = "finetune/full"):
    """Six steps of four rows, a checkpoint every two."""
    return load_recipe(name, [*SHORT, *changes])


def attach(folder, family="llama", **settings):
    torch.manual_seed(0)
    plain = folder / "plain"
    load_tokenizer("bytes").save(plain)
    config = AutoConfig.for_model(family, **SHAPE | {"vocab_size": 256, "initializer_range": 0.05})
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(plain)
    given = dict(layers=[1], block_size=32) | settings
    write_attached(str(plain), folder / "attached", **given)
    return str(folder / "attached")


@pytest.fixture(scope="module")
def attached(tmp_path_factory):
    return attach(tmp_path_factory.mktemp("gated"), memory="infini")


@pytest.fixture(scope="module")
def tuned(attached, corpus, tmp_path_factory):
    """The folder of a fine-tuning run that nothing happened to."""
    out = tmp_path_factory.mktemp("tuned")
    return out / train(recipe(), corpus, out, start=starting_model(attached))["name"]


@pytest.fixture
def crash(monkeypatch):
    """Fail in the n-th step of the runs that follow, once."""
    real, count = session.start_model, [0]

    def at(call):
        def build(*args):
            model = real(*args)
            forward = model.forward

            def counted(*args, **kwargs):
                count[0] += "labels" in kwargs
                if count[0] == call and "labels" in kwargs:
                    raise KeyError("power cut")
                return forward(*args, **kwargs)

            model.forward = counted
            return model

        monkeypatch.setattr(session, "start_model", build)

    return at


def test_it_learns_and_comes_back_with_its_memory(attached, tuned, corpus):
    lines = [json.loads(line) for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.05
    before, after = load_model(attached), load_model(str(tuned))
    assert after.dtype == torch.float32 and list(after.memories) == [1]
    assert before.dtype == torch.bfloat16
    assert not torch.equal(after.memories[1].gate, before.memories[1].gate.float())
    assert verify(tuned / "model")["step"] == 6
    result = json.loads((tuned / "result.json").read_text())
    assert result["recipe"]["model"] is None
    assert result["recipe"]["start"] == {"path": attached, "sha256": starting_model(attached).sha256}
    assert result["parameters"] == after.num_parameters()
    assert "em.attach_memory(" in (tuned / "model" / "README.md").read_text()
    assert load_tokenizer(str(tuned / "model")).sha256 == load_tokenizer("bytes").sha256


def test_an_interrupted_run_resumes_to_the_same_weights(attached, tuned, corpus, tmp_path, crash):
    crash(7)  # in step 4; the checkpoint is of step 2
    with pytest.raises(KeyError):
        train(recipe(), corpus, tmp_path, start=starting_model(attached))
    (run,) = tmp_path.iterdir()
    assert run.name == tuned.name  # what is trained names it
    train(recipe(), corpus, tmp_path, Resume(allowed=True), start=starting_model(attached))
    assert same_weights(run, tuned)


def test_the_start_names_the_run(attached, tuned, corpus, tmp_path):
    """Another start is another run; the same one in another folder is not."""
    moved = shutil.copytree(attached, tmp_path / "moved")
    start = starting_model(str(moved))
    assert start.sha256 == starting_model(attached).sha256
    other = starting_model(attach(tmp_path, memory="infini", block_size=64))
    runs = {one.sha256: train(recipe("training.tokens=512"), corpus, tmp_path / "runs", start=one)["name"]
            for one in (start, other)}  # fmt: skip
    assert len(set(runs.values())) == 2


def test_one_of_our_own_runs_is_trained_further(undisturbed, corpus, tmp_path):
    result = train(recipe(), corpus, tmp_path, start=starting_model(str(undisturbed)))
    before, after = load_model(str(undisturbed)), load_model(str(tmp_path / result["name"]))
    assert type(after) is type(before) and after.config.memory == "elastic"
    assert result["final_loss"] < json.loads((undisturbed / "result.json").read_text())["final_loss"]
    assert "fine-tuned from" in (tmp_path / result["name"] / "model" / "README.md").read_text()


def test_what_does_not_fit_is_refused_and_leaves_nothing(attached, undisturbed, corpus, tmp_path):
    start = starting_model(attached)
    for change, kept, message in [
        (["training.length=64"], start, "the rows have 128 tokens"),
        (["model.preset=tiny"], start, "has a section model, and --from"),
        ([], None, "has no section model: give --from FOLDER"),
        (["start.path=x", "start.sha256=y"], None, "has no section model: give --from FOLDER"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(recipe(*change), corpus, tmp_path / "runs", start=kept)
    with pytest.raises(ValueError, match="model, start: a model is built or taken from a folder"):
        recipe("model.preset=tiny", "start.path=x", "start.sha256=y")
    with pytest.raises(ValueError, match=r"training\.lora adapts a model that exists"):
        train(load_recipe("smoke/none", ["training.length=128", LORA]), corpus, tmp_path / "runs")
    with pytest.raises(ValueError, match="a model without memory; give it one with elastic attach"):
        starting_model(str(Path(attached).parent / "plain"))
    with pytest.raises(ValueError, match="give a folder"):
        starting_model("owner/name")
    assert not (tmp_path / "runs").exists()


def test_rows_of_another_tokenizer_are_refused(attached, tmp_path):
    """By its hash where the model has one, whatever its size."""
    from transformers import PreTrainedTokenizerFast

    from tests.data.conftest import byte_level

    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the sea kept its own slow book of days " * 300)
    PreTrainedTokenizerFast(tokenizer_object=byte_level()).save_pretrained(tmp_path / "tokenizer")
    prepare(tmp_path / "texts", tmp_path / "rows", tokenizer=str(tmp_path / "tokenizer"), length=128, shares=(1, 0, 0))
    with pytest.raises(ValueError, match="prepare with --tokenizer"):
        train(recipe(), tmp_path / "rows", tmp_path / "runs", start=starting_model(attached))


def test_damaged_weights_are_refused(attached, corpus, tmp_path):
    folder = shutil.copytree(attached, tmp_path / "copy")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="SHA-256 differs"):
        starting_model(str(folder))


def test_gates_have_their_own_learning_rate(attached):
    groups = parameter_groups(starting_model(attached).load(), load_recipe("finetune/full"))
    rates = {id(p): group.get("lr", 1e-4) for group in groups for p in group["params"]}
    model = starting_model(attached).load()
    assert sorted(set(rates.values())) == [1e-4, pytest.approx(1e-2)]
    assert sum(group.get("lr") is not None for group in groups) == 1
    assert model.memories[1].gate.numel() == groups[-1]["params"][0].numel()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma"])
def test_compiled_training_is_the_same(family, corpus, tmp_path, monkeypatch):
    """`execution.compile` compiles the layers of an attached model; here by a backend that only traces."""
    from elastic_memory.model.modeling import MemoryCausalLM

    real = MemoryCausalLM.compile_blocks
    monkeypatch.setattr(MemoryCausalLM, "compile_blocks", lambda self: real(self, backend="eager"))
    start = starting_model(attach(tmp_path, family, memory="elastic", order=11, points=5))
    losses = [
        train(recipe("training.tokens=1024", f"execution.compile={on}"), corpus, tmp_path / on, start=start)
        for on in ("true", "false")
    ]
    assert losses[0]["final_loss"] == pytest.approx(losses[1]["final_loss"], rel=1e-4)


def test_flops_of_an_attached_model_are_those_of_ours():
    from elastic_memory import MemoryLlamaConfig

    shape = {key: SHAPE[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")}
    ours = MemoryLlamaConfig.preset("tiny", memory="none", block_size=8, **shape)
    theirs = AutoConfig.for_model("qwen2", **shape, intermediate_size=ours.intermediate_size,
                                  num_hidden_layers=ours.num_hidden_layers)  # fmt: skip
    theirs.elastic_memory = {"block_size": 8, "local_attention": "block"}
    assert flops_per_token(theirs, 64) == flops_per_token(ours, 64)


@pytest.mark.parametrize("path", sorted((RECIPES / "finetune").glob("[!b]*.yaml")), ids=lambda path: path.stem)
def test_packaged_recipes(path):
    (made,) = variants(path)
    assert made == load_recipe(f"finetune/{path.stem}")
    assert made.name == f"finetune-{path.stem}" and made.model is None
    assert made.training.learning_rate * made.training.gate_lr_scale == pytest.approx(1e-2)


def test_plans_of_other_runs_leave_it_out(tuned, tmp_path):
    """`elastic train --plan` reads all results that it finds; one without a model says nothing of others."""
    result = json.loads((tuned / "result.json").read_text())
    result["machine"]["device"] = "H200"
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert measurements(tmp_path) == []


def test_by_command(attached, corpus, tmp_path, monkeypatch, capsys):
    words = [word for change in SHORT for word in ("--set", change)]
    code, _, said = call(monkeypatch, capsys, "train", "finetune/full", "--data", str(corpus), *words)
    assert code == 2 and "give --from FOLDER" in said
    out = ["--data", str(corpus), "--out", str(tmp_path), "--from", attached]
    code, _, said = call(monkeypatch, capsys, "train", "finetune/full", *out, "--plan", *words)
    assert code == 2 and "leave out --from" in said
    code, said, error = call(monkeypatch, capsys, "train", "finetune/full", *out, *words)
    assert code == 0, error
    assert "finished, loss" in said + error


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_without_peft_it_says_what_to_install(attached, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'elastic-memory\[lora\]'"):
        train(recipe(LORA), corpus, tmp_path / "runs", start=starting_model(attached))
    assert not (tmp_path / "runs").exists()


def test_adapters_are_trained_with_the_memory_and_merged(attached, corpus, tmp_path, crash):
    """Only what they adapt changes, and the memory; resumed in between, the weights are the same."""
    pytest.importorskip("peft")
    start = starting_model(attached)
    whole = train(recipe(LORA), corpus, tmp_path / "whole", start=start)
    crash(7)
    with pytest.raises(KeyError):
        train(recipe(LORA), corpus, tmp_path / "parts", start=start)
    parts = train(recipe(LORA), corpus, tmp_path / "parts", Resume(allowed=True), start=start)
    run = tmp_path / "whole" / whole["name"]
    assert same_weights(run, tmp_path / "parts" / parts["name"])
    before, after = start.load().float().state_dict(), weights(run)
    changed = {name for name in after if not torch.equal(before[name].to(after[name].dtype), after[name])}
    adapted = {name for name in after if name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight"))}
    assert changed == adapted | {name for name in after if ".memory." in name}
    load_model(str(run))
    assert whole["parameters"] == json.loads((run / "result.json").read_text())["parameters"]


def test_targets_that_do_not_exist_are_refused(attached, corpus, tmp_path):
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match="have no qkv_proj"):
        train(recipe("training.lora={rank: 4, alpha: 8, targets: [q_proj, qkv_proj]}"), corpus, tmp_path,
              start=starting_model(attached))  # fmt: skip


def test_adapters_compile(attached, corpus, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    from elastic_memory.model.modeling import MemoryCausalLM

    real = MemoryCausalLM.compile_blocks
    monkeypatch.setattr(MemoryCausalLM, "compile_blocks", lambda self: real(self, backend="eager"))
    start = starting_model(attach(tmp_path, memory="elastic", order=11, points=5))
    train(recipe("training.tokens=1024", "execution.compile=true", LORA), corpus, tmp_path / "runs", start=start)
