"""Adapters (peft) on our models: LoRA without targets, and on quantised weights."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from tests.conftest import small_model
from tests.model.test_attach import SHAPE

OPTIONS = {
    "LoraConfig": {"r": 2, "init_lora_weights": False},
    "LoHaConfig": {"r": 2, "init_weights": False},
    "OFTConfig": {"r": 0, "oft_block_size": 4},
}


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


@pytest.mark.parametrize("kind", ["LoraConfig", "LoHaConfig", "OFTConfig"])
def test_without_targets_adapters_go_where_they_go_in_llama(kind, peft, ids):
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS

    adapted = peft.get_peft_model(small_model(), getattr(peft, kind)(**OPTIONS[kind]))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert {part for name in trained for part in TARGETS["llama"] if f".{part}." in name} == set(TARGETS["llama"])
    adapted(ids, labels=ids).loss.backward()
    assert all(parameter.grad.any() for parameter in adapted.parameters() if parameter.requires_grad)


def test_blends_learn_beside_adapters_and_are_saved_when_merged(peft, ids, tmp_path):
    base = em.attach_memory(LlamaForCausalLM(LlamaConfig(**SHAPE)), layers=[1], order=11, points=5, block_size=8)
    model = peft.get_peft_model(base, peft.LoraConfig(**OPTIONS["LoraConfig"], task_type="CAUSAL_LM"))
    (memory,) = model.get_base_model().memories.values()
    assert not memory.blend.requires_grad
    memory.blend.requires_grad_()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    merged = model.eval().merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert torch.equal(again.memories[1].blend, memory.blend) and memory.blend.abs().min() > 1e-3
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, merged(ids).logits)


@pytest.mark.parametrize("memory", MEMORIES)
def test_lora_on_4_bits(memory, peft, ids, tmp_path):
    """QLoRA: a few steps lower the loss, weights in 4 bits stay, the adapter is saved and loaded."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    # The kernels for CPUs take 64 weights at a time.
    shape = dict(hidden_size=64, intermediate_size=64, initializer_range=0.1)
    small_model(memory, **shape).save_pretrained(tmp_path / "plain")
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    load = lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=how)  # noqa: E731
    base = peft.prepare_model_for_kbit_training(load(), use_gradient_checkpointing=True)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, task_type="CAUSAL_LM")).train()
    frozen = {name: copy.deepcopy(value) for name, value in base.state_dict().items() if "lora_" not in name}
    assert any(value.dtype == torch.uint8 for value in frozen.values())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(6):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(base.state_dict()[name], value) for name, value in frozen.items())
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits, atol=1e-3, rtol=1e-3)
