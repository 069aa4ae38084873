"""A fingerprint covers all that a model computes with, stays cheap, and follows every change."""

import copy
import hashlib
from inspect import signature

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import elastic_memory as em
from elastic_memory.streaming import fingerprint as fingerprints
from elastic_memory.streaming import memory_file
from elastic_memory.streaming.fingerprint import fingerprint
from tests.conftest import small_model

BASE = {"rope_type": "default", "rope_theta": 500000.0}
OTHERS = {
    "rope_theta": dict(rope_parameters=BASE | {"rope_theta": 500.0}),
    "rms_norm_eps": dict(rms_norm_eps=0.1),
    "hidden_act": dict(hidden_act="relu"),
    "heads": dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16),
    "sampling": dict(sampling="uniform"),
}


def llama(**settings):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)
    return LlamaForCausalLM(LlamaConfig(**sizes | settings)).eval()


@pytest.mark.parametrize("name", OTHERS)
def test_equal_weights_with_other_settings_are_another_model(name):
    one, other = small_model(), small_model(**OTHERS[name])
    if name != "heads":  # whose projections have other shapes
        other.load_state_dict(one.state_dict())
    assert fingerprint(one) != fingerprint(other)
    if name not in ("heads", "sampling"):
        kept = {key: value for key, value in OTHERS[name].items() if key != "rope_parameters"}
        assert fingerprint(llama()) != fingerprint(llama(**kept or {"rope_parameters": BASE}))


@pytest.mark.parametrize(
    "memory, options",
    [("infini", {"update": "linear"}), ("infini", {"memory_norm": "qk"}), ("memorizing", {"positions": "full"})],
)
def test_options_of_a_memory_count(memory, options, ids, tmp_path):
    one, other = small_model(memory), small_model(memory, memory_options=options)
    other.load_state_dict(one.state_dict())
    assert fingerprint(one) != fingerprint(other)
    cache = em.MemoryCache(one)
    one(ids, past_key_values=cache)
    cache.save(tmp_path / "memory")
    ((name, value),) = options.items()
    before = signature(type(next(iter(one.memories.values()))).__init__).parameters[name].default
    with pytest.raises(ValueError, match=f"other settings: memory.{name}: {before} there, {value} here"):
        em.MemoryCache.load(tmp_path / "memory", other)
    assert em.MemoryCache.load(tmp_path / "memory", other, force=True).clock == [45, 45]


def attached(**settings):
    return em.attach_memory(llama(pad_token_id=0), memory="infini", block_size=8, **settings).eval()


@pytest.mark.parametrize("attach", [False, True])
def test_the_window_counts_however_the_memory_came(attach):
    def made(**window):
        settings = dict(block_size=8, local_attention="sliding", sampling="uniform", **window)
        return em.attach_memory(llama(), **settings) if attach else small_model(**settings)

    assert fingerprint(made()) == fingerprint(made(window=8)) != fingerprint(made(window=16))


@pytest.mark.parametrize("make", [lambda **options: small_model("infini", memory_options=options), attached])
def test_what_counts_is_the_options_in_effect(make, ids, tmp_path, monkeypatch):
    """A model keeps its options when a later version has other defaults, and so it keeps its memory files."""
    one, said = make(), make(memory_norm="none")
    said.load_state_dict(one.state_dict())
    assert fingerprint(one) == fingerprint(said), "given or left to the default: the same model"
    one.save_pretrained(tmp_path / "model")
    cache = em.MemoryCache(one)
    one(ids, past_key_values=cache)
    cache.save(tmp_path / "memory")
    kind = type(next(iter(one.memories.values())))
    monkeypatch.setattr(kind.__init__, "__kwdefaults__", kind.__init__.__kwdefaults__ | {"memory_norm": "output"})
    later = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    later = em.attach_memory(later) if make is attached else later
    assert em.MemoryCache.load(tmp_path / "memory", later).clock == cache.clock
    assert fingerprint(later) == fingerprint(one)
    changed = make()  # and nothing of its configuration says so
    changed.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match=r"memory.memory_norm: none there, output here"):
        em.MemoryCache.load(tmp_path / "memory", changed)


def test_a_file_of_earlier_versions_is_compared_by_what_was_given(ids, tmp_path, monkeypatch):
    one = small_model("infini")
    cache = em.MemoryCache(one)
    one(ids, past_key_values=cache)
    monkeypatch.setattr(memory_file, "settings", fingerprints.given)
    cache.save(tmp_path / "memory")
    monkeypatch.undo()
    assert em.MemoryCache.load(tmp_path / "memory", one).clock == cache.clock
    other = small_model("infini", memory_options={"update": "linear"})
    other.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match=r"other settings: memory_options: None there, {'update': 'linear'} here"):
        em.MemoryCache.load(tmp_path / "memory", other)


@pytest.mark.parametrize("name", ["rope_theta", "rms_norm_eps", "hidden_act", "sampling"])
def test_a_memory_file_of_other_settings_is_refused(name, model, ids, tmp_path):
    cache = em.MemoryCache(model)
    model(ids, past_key_values=cache)
    cache.save(tmp_path / "memory")
    other = small_model(**OTHERS[name])
    other.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match=r"other settings: (rope_parameters|rms_norm_eps|hidden_act|memory.sampling)"):
        em.MemoryCache.load(tmp_path / "memory", other)


def test_every_single_weight_counts(model, ids, tmp_path):
    cache = em.MemoryCache(model)
    model(ids, past_key_values=cache)
    cache.save(tmp_path / "memory")
    before = fingerprint(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[13, 7] += 1e-3
    assert fingerprint(model) != before
    with pytest.raises(ValueError, match="other weights"):
        em.MemoryCache.load(tmp_path / "memory", model)


def changes():
    def swap(weight):
        weight[[0, 1]] = weight[[1, 0]]

    def replace(module):
        module.weight = torch.nn.Parameter(module.weight.detach().flip(0))

    return {
        "in place": lambda module: module.weight.add_(1e-3),
        "one number": lambda module: module.weight[3, 5].mul_(1.01),
        "two rows swapped": lambda module: swap(module.weight),
        "behind autograd's back": lambda module: module.weight.data[3, 5].mul_(1.01),
        "another parameter": replace,
        "an optimizer": lambda module: step(module),
    }


def step(module):
    module.weight.grad = torch.ones_like(module.weight)
    torch.optim.AdamW([module.weight], lr=1e-3).step()


@pytest.mark.parametrize("how", changes())
def test_a_change_is_noticed(how, model):
    before = fingerprint(model)
    assert fingerprint(model) == before
    with torch.no_grad():
        changes()[how](model.model.layers[1].mlp.up_proj)
    assert fingerprint(model) != before


def test_weights_are_hashed_once(model, monkeypatch):
    hashed = []
    sha256 = hashlib.sha256
    monkeypatch.setattr(fingerprints.hashlib, "sha256", lambda *args: hashed.append(1) or sha256(*args))
    first = fingerprint(model)
    whole = len(hashed)
    assert fingerprint(model) == first
    assert len(hashed) < 2 * whole


def test_what_changes_nothing_does_not_count(model, tmp_path):
    """Copies, files, notes in the configuration, training mode."""
    before = fingerprint(model)
    model.save_pretrained(tmp_path)
    assert fingerprint(em.MemoryLlamaForCausalLM.from_pretrained(tmp_path)) == before
    assert fingerprint(copy.deepcopy(model)) == before
    model.config.use_cache, model.config.eos_token_id = False, 3
    model.train().gradient_checkpointing_enable()
    assert fingerprint(model) == before


def test_precision_and_retrieval_count(model):
    seen = {fingerprint(model)}
    model.set_retrieval(points=3)
    seen.add(fingerprint(model))
    seen.add(fingerprint(model.bfloat16()))
    assert len(seen) == 3


def test_a_memory_file_may_be_read_with_other_retrieval_settings(model, ids, tmp_path):
    cache = em.MemoryCache(model)
    model(ids, past_key_values=cache)
    cache.save(tmp_path / "memory")
    model.set_retrieval(sampling="uniform", points=3)
    assert em.MemoryCache.load(tmp_path / "memory", model).clock == [45, 45]


def test_attached_memories_count():
    found = set()
    for options in ({"order": 8}, {"order": 8, "sampling": "uniform"}, {"order": 8, "local_attention": "sliding"}):
        found.add(fingerprint(em.attach_memory(llama(), block_size=16, points=4, **options)))
    assert len(found) == 3


def test_an_attached_memory_from_disk_is_the_same_model(tmp_path):
    model = em.attach_memory(llama(), block_size=16, order=8, points=4)
    model.save_pretrained(tmp_path)
    assert fingerprint(em.attach_memory(LlamaForCausalLM.from_pretrained(tmp_path))) == fingerprint(model)


@torch.inference_mode()
def test_weights_made_in_inference_mode(ids):
    model = small_model()
    before = fingerprint(model)
    model.lm_head.weight[0, 0] += 1
    assert fingerprint(model) != before


def test_weights_that_consist_of_several_tensors(model):
    """As those of quantised models."""
    before = fingerprint(model)
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(TwoTensor(weight, weight.clone()))
    seen = {before, fingerprint(model)}
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(TwoTensor(weight, weight + 1))
    assert len(seen | {fingerprint(model)}) == 3


def test_weights_that_are_nowhere_are_named(model):
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\..*\.weight is not in memory"):
        fingerprint(model)


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_belongs_to_its_model(static, model, ids):
    cache = em.MemoryCache(model, static=static)
    model(ids, past_key_values=cache)
    for other in (small_model(seed=1), copy.deepcopy(model)):
        for new in (ids, ids[:, :1]):
            with pytest.raises(ValueError, match="belongs to another model"):
                other(new, past_key_values=cache)
    assert cache.clock == [45, 45]
    attached = em.attach_memory(llama(), block_size=16, order=8, points=4)
    cache = em.MemoryCache(attached, static=static)
    attached(ids, past_key_values=cache)
    em.attach_memory(em.detach_memory(attached), block_size=16, order=9, points=4)
    with pytest.raises(ValueError, match="belongs to another model"):
        attached(ids, past_key_values=cache)


def test_a_cache_of_a_bare_backbone(model, ids):
    cache = em.MemoryCache(model.model)
    hidden = model.model(ids, past_key_values=cache).last_hidden_state
    torch.testing.assert_close(model.lm_head(hidden), model(ids).logits, atol=1e-4, rtol=0)
