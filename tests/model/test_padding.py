"""Padded heads: another way to store the same model."""

import pytest
import torch

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from elastic_memory.memory.tools import real_features
from tests.conftest import small_model

SHAPE = dict(head_dim=6, hidden_size=32)


def twins(memory, **overrides):
    """A model and the same with padded heads."""
    plain, padded = (small_model(memory, pad_heads=pad, **SHAPE, **overrides) for pad in (False, True))
    weights = dict(plain.state_dict())
    for name, target in padded.state_dict().items():
        if target.shape != weights[name].shape:
            axis = 1 if "o_proj" in name else 0
            real = real_features(6, 8).repeat(target.shape[axis] // 8).nonzero().squeeze(1)
            weights[name] = torch.zeros_like(target).index_copy(axis, real, weights[name])
    padded.load_state_dict(weights)
    return plain, padded


CASES = [(memory, {}) for memory in MEMORIES] + [
    ("infini", {"memory_options": {"memory_norm": "qk"}}),
    ("merged", {"memory_options": {"slow": 0.7}}),
    ("recent_merged", {"memory_options": {"slow": 0.7}}),
]


@pytest.mark.parametrize(("memory", "options"), CASES)
def test_it_is_the_same_function(memory, options, ids):
    plain, padded = twins(memory, **options)
    torch.testing.assert_close(padded(ids).logits, plain(ids).logits, atol=1e-4, rtol=0)
    assert padded.memory_report() == plain.memory_report()
    assert padded.model.layers[0].self_attn.q_proj.weight.shape == (32, 32)


@pytest.mark.parametrize("memory", ["elastic", "infini"])
def test_padding_stays_zero_in_training(memory, ids):
    plain, padded = twins(memory)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1) for model in (plain, padded)]
    for _ in range(5):
        losses = []
        for model, optimizer in zip((plain, padded), optimizers, strict=True):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-4
    real = real_features(6, 8).repeat(4)
    for layer in padded.model.layers:
        assert (layer.self_attn.q_proj.weight[~real] == 0).all()
        assert (layer.self_attn.o_proj.weight[:, ~real] == 0).all()


def test_fresh_and_loaded_models_are_padded_with_zeros(tmp_path, ids):
    model = small_model("elastic", pad_heads=True, **SHAPE)
    assert (model.model.layers[1].self_attn.k_proj.weight[~real_features(6, 8).repeat(2)] == 0).all()
    model.save_pretrained(tmp_path)
    assert torch.equal(em.MemoryLlamaForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_the_report_follows_the_retrieval_settings():
    """Padding does not count, at whatever order."""
    padded, plain = small_model(pad_heads=True, head_dim=6), small_model(head_dim=6)
    for model in (padded, plain):
        model.set_retrieval(order=20)
    assert padded.memory_report() == plain.memory_report()
    assert padded.memory_report()[0]["state_floats"] == 20 * 2 * 6 * 2
