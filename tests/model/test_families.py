"""Which decoders of transformers a memory can be attached to, and that others are refused by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import elastic_memory as em
from elastic_memory.model.attach import FAMILIES
from tests.model.test_attach import MEMORY, SHAPE


def tiny(family: str, **settings):
    """A random model of this family, with biases and norms that do something."""
    torch.manual_seed(0)
    shape = {name: value for name, value in SHAPE.items() if (family, name) != ("qwen2", "head_dim")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **settings)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_family(family, ids, tmp_path):
    """The first block is the model's own, streams are the whole, a generation needs no cache, and it comes back."""
    model = tiny(family)
    before = model(ids[:, :8]).logits
    em.attach_memory(model, **MEMORY)
    whole = model(ids).logits
    torch.testing.assert_close(whole[:, :8], before, atol=1e-5, rtol=1e-5)
    cache, parts = em.MemoryCache(model), []
    for part in ids.split([1, 6, 2, 20, 16], dim=1):
        parts.append(model(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)
    options = dict(max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))
    model.save_pretrained(tmp_path)
    loaded = em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert torch.equal(loaded(ids).logits, whole)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_block_by_block_without_memory(family, ids):
    model = tiny(family)
    blocks = torch.cat([model(block).logits for block in ids.split(8, dim=1)], dim=1)
    em.attach_memory(model, memory="none", block_size=8)
    torch.testing.assert_close(model(ids).logits, blocks, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["granite", "smollm3", "ministral", "olmo2", "gemma2", "phi3", "cohere"])
def test_other_families_are_refused_by_name(family):
    """Multipliers, layers without positions, windows by layer, norms behind, soft caps, joined projections."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE))
    with pytest.raises(ValueError, match=r"causal LMs of arcee, gemma, jais2, llama, mistral, qwen2, qwen3"):
        em.attach_memory(model)


def test_a_known_family_with_further_parts_is_refused():
    """What a checkpoint adds to its family must not be dropped silently."""
    model = tiny("llama")
    model.model.layers[1].post_norm = torch.nn.Identity()
    model.model.layers[1].self_attn.sinks = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"has post_norm, self_attn\.sinks: memory can be attached to"):
        em.attach_memory(model)
    model = tiny("llama")
    model.model.layers[2].self_attn.scaling = 0.1
    with pytest.raises(ValueError, match=r"attention scores scaled by 0\.1"):
        em.attach_memory(model)
    with pytest.raises(ValueError, match="bidirectional"):
        em.attach_memory(tiny("gemma", use_bidirectional_attention=True))
    half = dict(rope_type="linear", factor=1.0, rope_theta=1e4, partial_rotary_factor=0.5)
    model = tiny("llama")
    model.model.rotary_emb = type(model.model.rotary_emb)(type(model.config)(**SHAPE, rope_parameters=half))
    with pytest.raises(ValueError, match="rotary positions of 4 of 8 features"):
        em.attach_memory(model)
