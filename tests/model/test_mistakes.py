"""What users get wrong in Python: an error that says what to give, and no silently wrong result."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import elastic_memory as em
from elastic_memory.memory import MEMORIES, Geometry
from tests.conftest import small_model

SHAPE = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=61, initializer_range=0.2,
)  # fmt: skip


def test_models_of_one_config_keep_memories_of_their_own(tmp_path):
    """Comparing designs in a notebook: each saved model used to record the memory that was attached last."""
    config = LlamaConfig(**SHAPE)
    first, second = (LlamaForCausalLM(config).eval() for _ in range(2))
    em.attach_memory(first, layers=[1], order=11, points=5, block_size=8, silent=False)
    em.attach_memory(second, layers=[2], order=4, points=3, block_size=16, silent=False)
    assert not hasattr(config, "elastic_memory")
    first.save_pretrained(tmp_path)
    again = em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path)).eval()
    ids = torch.randint(61, (1, 50))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, first(ids).logits)


def test_one_config_object_in_all_parts_of_a_model():
    """`set_attn_implementation` changes the object that layers look at, also after the memory is detached."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    em.attach_memory(model, layers=[1], block_size=8)
    em.detach_memory(model)
    model.set_attn_implementation("eager")
    assert {layer.self_attn.config._attn_implementation for layer in model.model.layers} == {"eager"}


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (1, r"layers=1: give a list of layer numbers, such as \[8\]"),
        ("1", "layers='1': give a list"),
        ([], "gives no layer a memory"),
        (["1"], "memory_layers='1': give a whole number"),
        ([True], "memory_layers=True: give a whole number"),
        ([1, 1], r"memory_layers=\[1, 1\]: name each layer once"),
    ],
)
def test_layers_that_are_no_list_of_layers(layers, said):
    with pytest.raises(ValueError, match=said):
        em.attach_memory(LlamaForCausalLM(LlamaConfig(**SHAPE)), layers=layers, block_size=8)


@pytest.mark.parametrize("layers", [(1,), range(1, 3)])
def test_any_sequence_of_layers_can_be_saved(layers, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    em.attach_memory(model, layers=layers, block_size=8)
    model.save_pretrained(tmp_path)
    again = em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert list(again.memories) == list(layers)


def test_a_name_instead_of_a_model():
    with pytest.raises(ValueError, match=r"'HuggingFaceTB/SmolLM2-135M': give a loaded model"):
        em.attach_memory("HuggingFaceTB/SmolLM2-135M", layers=[1])


@pytest.mark.parametrize("given", [{"order": 1.5}, {"order": True}, {"points": "8"}, {"sampling_options": 0.9}])
@pytest.mark.parametrize("memory", ["elastic", "recent", "clock"])
def test_retrieval_settings_of_a_wrong_type(memory, given):
    geometry = Geometry(width=32, heads=4, kv_heads=2, head_dim=8, layers=3, block_size=8)
    built = MEMORIES[memory].build(geometry, {})
    name, value = next(iter(given.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r}: give"):
        built.set_retrieval(**given)


@pytest.mark.parametrize("thing", ["a name", em.MemoryLlamaConfig.preset("tiny")], ids=["str", "config"])
def test_a_cache_needs_a_model(thing):
    with pytest.raises(ValueError, match=f"MemoryCache of a {type(thing).__name__}: give the model"):
        em.MemoryCache(thing)


def test_tokens_without_rows_and_without_columns():
    model, ids = small_model(), torch.randint(61, (20,))
    for call in (model, lambda ids: model.generate(ids, max_new_tokens=1)):
        with pytest.raises(ValueError, match=r"tokens of shape \[20\]: give \[batch, column\], such as ids\[None\]"):
            call(ids)
        with pytest.raises(ValueError, match="no tokens: give at least one column"):
            call(ids[None, :0])
    cache = em.MemoryCache(model)
    model(ids[None], past_key_values=cache)
    with pytest.raises(ValueError, match="no tokens"):
        model.generate(ids[None, :0], past_key_values=cache, max_new_tokens=1)
    assert cache.clock == [20]


@torch.no_grad()
def test_one_row_of_positions_is_for_all_rows():
    """As in transformers. It used to be ignored, so that packed documents saw each other."""
    model, ids = small_model(), torch.randint(61, (2, 30))
    positions = torch.cat((torch.arange(13), torch.arange(17)))[None]
    packed = model(ids, position_ids=positions.expand(2, -1), labels=ids)
    shared = model(ids, position_ids=positions, labels=ids)
    assert torch.equal(shared.logits, packed.logits) and torch.equal(shared.loss, packed.loss)
    torch.testing.assert_close(shared.logits[:, 13:], model(ids[:, 13:]).logits)
    for wrong in (positions[:, :-1], positions[0], positions.expand(3, -1)):
        with pytest.raises(ValueError, match="position_ids of shape"):
            model(ids, position_ids=wrong)


@torch.no_grad()
@pytest.mark.parametrize(
    "wrong", [torch.rand(1, 20) * 60, torch.ones(1, 20, dtype=torch.bool), torch.arange(20), [1, 2]]
)
def test_a_cache_reads_rows_of_integers_only(wrong):
    """Fractions used to be cut off, so that a tensor of probabilities was read as zeros."""
    model = small_model()
    cache = em.MemoryCache(model)
    for call in (cache.read, cache.holds):
        with pytest.raises(ValueError, match="give integer ids as a tensor"):
            call(wrong)
    if isinstance(wrong, torch.Tensor) and wrong.ndim == 2:
        with pytest.raises(ValueError, match="give integer ids as a tensor"):
            model(wrong, past_key_values=cache)
    assert cache.clock == []


def test_a_rollback_is_a_whole_number_of_tokens():
    cache = em.MemoryCache(small_model())
    cache.read(torch.arange(20)[None])
    with pytest.raises(ValueError, match=r"rollback\(1.5\)"):
        cache.rollback(1.5)
    assert cache.clock == [20]
