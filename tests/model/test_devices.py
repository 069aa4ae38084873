"""Models whose weights are elsewhere: offloaded ones run, those spread over devices are refused in one line."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from elastic_memory.model.modeling import refuse_spread
from tests.conftest import small_model

GREEDY = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
PARTS = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
MAPS = {
    "all": {"": "disk"},
    "some": PARTS | {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"},
}


def assert_same(offloaded, model, ids):
    with torch.no_grad():
        for static in (False, True):
            cache = em.MemoryCache(offloaded, static=static)
            parts = [offloaded(piece, past_key_values=cache).logits for piece in ids.split([20, 1, 1, 23], dim=1)]
            torch.testing.assert_close(torch.cat(parts, dim=1), model(ids).logits, atol=1e-4, rtol=0)
        assert torch.equal(offloaded(ids).logits, model(ids).logits)
        torch.testing.assert_close(offloaded(ids, labels=ids).loss, model(ids, labels=ids).loss)
        assert torch.equal(offloaded.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


@pytest.mark.parametrize("where", MAPS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_offloaded_models_are_the_models(memory, where, ids, tmp_path):
    model = small_model(memory, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "model")
    options = dict(device_map=MAPS[where], offload_folder=tmp_path / "weights")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options).eval()
    assert any(parameter.is_meta for parameter in loaded.parameters())
    assert_same(loaded, model, ids)


def attachable():
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=61)
    return LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.2, pad_token_id=0)).eval()


def test_memory_for_an_offloaded_model(ids, tmp_path):
    """One without parameters; others would have none to put."""
    attachable().save_pretrained(tmp_path / "model")
    options = dict(device_map=MAPS["some"], offload_folder=tmp_path / "weights")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options).eval()
    with pytest.raises(ValueError, match="parameters of 'melodi' have no place"):
        em.attach_memory(loaded, memory="melodi", order=3, block_size=8)
    whole = em.attach_memory(attachable(), order=11, points=5, block_size=8, silent=False)
    assert_same(em.attach_memory(loaded, order=11, points=5, block_size=8, silent=False), whole, ids)


def test_models_spread_over_devices_are_refused(model, tmp_path):
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cuda:1", "lm_head": "cpu", "model.norm": "disk"}
    with pytest.raises(ValueError, match="cuda:0, cuda:1"):
        refuse_spread(model)
    other = attachable()
    other.hf_device_map = model.hf_device_map
    with pytest.raises(ValueError, match="cuda:0, cuda:1"):
        em.attach_memory(other)
    for fits in ({"": 0}, {"model": torch.device("cuda:1"), "lm_head": "cpu"}, {"model": "cuda", "lm_head": 0}):
        model.hf_device_map = fits
        refuse_spread(model)


def test_no_tensor_parallelism_is_declared(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert not model.supports_tp_plan and not model.supports_pp_plan
    with pytest.raises(ValueError, match="tensor parallelism"):
        em.MemoryLlamaForCausalLM.from_pretrained(tmp_path, tp_plan="auto")
    attached = em.attach_memory(attachable())
    assert not attached.supports_tp_plan and not attached.supports_pp_plan
    assert em.detach_memory(attached).supports_tp_plan
