"""EleutherAI's evaluation harness on saved models: in a program that imports us, and by its own command line."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from elastic_memory.memory import MEMORIES
from tests.conftest import small_model
from tests.model.conftest import text

TEXTS = [text(seed, words=40) for seed in range(3)]
TASKS = {
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_target": 1, "doc_to_choice": ["a", "b"],
    },
    "said": {
        "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{said}}",
        "generation_kwargs": {"until": ["<never>"], "max_gen_toks": 12, "do_sample": False},
    },
}  # fmt: skip
METRICS = {"rolling": "word_perplexity", "choice": "acc", "said": "exact_match"}


@torch.no_grad()
def expected(model, tokenizer):
    """Perplexity per word, and how often b follows rather than a; what is said."""
    ids = tokenizer(TEXTS, return_tensors="pt").input_ids
    end = torch.full((len(ids), 1), tokenizer.eos_token_id)
    loss = model(torch.cat((end, ids), dim=1), labels=torch.cat((end, ids), dim=1)).loss
    a, b = tokenizer("a b").input_ids
    last = model(ids).logits[:, -1]
    words = model.generate(ids, max_new_tokens=12, do_sample=False)[:, ids.shape[1] :]
    return {"rolling": math.exp(loss), "choice": (last[:, b] > last[:, a]).float().mean().item()}, words


@pytest.fixture
def lm_eval():
    return pytest.importorskip("lm_eval")


@pytest.fixture
def tasks(folder, tokenizer, tmp_path):
    """A folder of tasks, the folder of a model, and what comes out of it."""

    def write(memory):
        found, words = expected(small_model(memory, initializer_range=0.1), tokenizer)
        said = tokenizer.batch_decode(words, skip_special_tokens=True)
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(json.dumps({"text": t, "said": s}) + "\n" for t, s in zip(TEXTS, said, strict=True)))
        for name, task in TASKS.items():
            data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}, "test_split": "test"}
            metric = {"metric_list": [{"metric": METRICS[name]}]}
            (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name} | data | task | metric))
        return folder(memory), found | {"said": 1.0}

    return write


def check(results, found):
    for name, value in found.items():
        assert results[name][f"{METRICS[name]},none"] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("memory", MEMORIES)
def test_in_a_program(memory, lm_eval, tasks, tmp_path):
    model, found = tasks(memory)
    done = lm_eval.simple_evaluate(
        "hf",
        model_args={"pretrained": model, "dtype": "float32"},
        tasks=list(TASKS),
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
        batch_size=2,
        device="cpu",
        bootstrap_iters=0,
    )
    check(done["results"], found)


def test_by_its_command_line(lm_eval, tasks, tmp_path):
    """It imports us through the line of code that is saved with the model."""
    model, found = tasks("elastic")
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--tasks", *TASKS]
    command += ["--model_args", f"pretrained={model},dtype=float32,trust_remote_code=True"]
    command += ["--include_path", str(tmp_path), "--batch_size", "2", "--device", "cpu"]
    command += ["--output_path", str(tmp_path / "found")]
    places = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    subprocess.run(command, check=True, env=places, capture_output=True, timeout=300)
    (file,) = (tmp_path / "found").rglob("results*.json")
    check(json.loads(file.read_text())["results"], found)
