"""Things that clients do to models: hidden states while generating, prediction, pickling, gradients by row, rewards."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, vmap
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from elastic_memory.model import modeling
from tests.conftest import small_model

GREEDY = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)


def attached():
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, initializer_range=0.2, head_dim=8, pad_token_id=0,
    )  # fmt: skip
    return em.attach_memory(Qwen3ForCausalLM(config).eval(), order=11, points=5, block_size=8)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_hidden_states_while_generating(memory, cache, ids):
    model, mask = small_model(memory), torch.ones_like(ids)
    mask[1, :13] = 0
    options = GREEDY | dict(cache_implementation=cache, return_dict_in_generate=True, attention_mask=mask)
    plain = model.generate(ids, **options).sequences
    output = model.generate(ids, output_hidden_states=True, **options)
    assert torch.equal(output.sequences, plain)
    states = [torch.cat(parts, dim=1) for parts in zip(*output.hidden_states, strict=True)]
    for row, start in enumerate((0, 13)):
        expected = model(plain[row : row + 1, start:-1], output_hidden_states=True).hidden_states
        for mine, theirs in zip(states, expected, strict=True):
            torch.testing.assert_close(mine[row, start:], theirs[0], atol=5e-4, rtol=0)


@torch.no_grad()
def test_hidden_states_of_many_blocks_at_once(model):
    ids = torch.randint(1, 61, (1, 100))
    expected = model(ids, output_hidden_states=True, use_cache=False)
    found = model(ids, output_hidden_states=True, use_cache=True, logits_to_keep=1)
    assert found.logits.shape == (1, 1, 61)
    for mine, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("cached", [False, True])
@torch.no_grad()
def test_hidden_states_of_some_layers(cached, model, ids):
    """As in transformers: what the listed layers return, without the embeddings, and None for the others."""
    every = model(ids, output_hidden_states=True, use_cache=cached).hidden_states
    chosen = model(ids, output_hidden_states=[0, 2], use_cache=cached).hidden_states
    assert len(chosen) == 3 and chosen[1] is None
    assert torch.equal(chosen[0], every[1]) and torch.equal(chosen[2], every[3])
    assert model(ids, output_hidden_states=[], use_cache=cached).hidden_states is None


@pytest.mark.parametrize("memory", MEMORIES)
def test_gradients_reach_the_hidden_states_of_padded_rows(memory, ids):
    """Those that a row alone gives; padding has none."""
    model, mask = small_model(memory), torch.ones_like(ids)
    mask[1, :13] = 0
    padded = model(ids, attention_mask=mask, output_hidden_states=True)
    alone = model(ids[1:, 13:], output_hidden_states=True)
    for output in (padded, alone):
        for state in output.hidden_states:
            state.retain_grad()
        output.logits[-1, -1].square().sum().backward()
    for mine, theirs in zip(padded.hidden_states, alone.hidden_states, strict=True):
        assert not mine.grad[0].any() and not mine.grad[1, :13].any() and theirs.grad.any()
        torch.testing.assert_close(mine.grad[1, 13:], theirs.grad[0], atol=1e-3, rtol=1e-3)


def test_weights_of_other_sizes_raise_what_transformers_raises(model, tmp_path):
    model.save_pretrained(tmp_path)
    for error in (RuntimeError, ValueError):
        with pytest.raises(error, match="in the file"):
            em.MemoryLlamaForCausalLM.from_pretrained(tmp_path, vocab_size=62)


def test_predictions_of_long_samples(model, ids, tmp_path, monkeypatch):
    monkeypatch.setattr(modeling, "LOGITS_AT_MOST", 50)
    trainer = Trainer(model, TrainingArguments(tmp_path, report_to=[], use_cpu=True, per_device_eval_batch_size=2))
    found = trainer.predict([{"input_ids": row, "labels": row} for row in ids]).predictions
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(ids).logits)


@pytest.mark.parametrize("make", [attached, small_model])
def test_whole_models_are_pickled(make, ids, tmp_path):
    model = make()
    torch.save(model, tmp_path / "model.pt")
    function, arguments, state, *_ = model.__reduce_ex__(2)  # what loading does with the file
    loaded = function(*arguments)
    loaded.__setstate__(state)
    for again in (loaded, copy.deepcopy(model)):
        assert type(again) is type(model) and torch.equal(again(ids).logits, model(ids).logits)
        assert torch.equal(again.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
    if make is attached:
        assert type(em.detach_memory(loaded)) is Qwen3ForCausalLM


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("memory", MEMORIES)
def test_gradients_of_each_row_at_once(memory, ids):
    """As for differential privacy and influence functions."""
    model = small_model(memory, tie_word_embeddings=False)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, row):
        return functional_call(model, parameters, (row[None],), {"labels": row[None]}).loss

    together = vmap(grad(loss), in_dims=(None, 0))(parameters, ids)
    for index, row in enumerate(ids):
        model.zero_grad()
        model(row[None], labels=row[None]).loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(together[name][index], parameter.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("memory", MEMORIES)
def test_rewards(memory, ids, tmp_path):
    """A score for each row, read at its last real token; from a trained model, and saved and loaded."""
    trained = small_model(memory)
    trained.save_pretrained(tmp_path / "lm")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=1, pad_token_id=0).eval()
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    with torch.no_grad():
        scores = model(ids * mask, attention_mask=mask).logits
        hidden = [trained.model(ids[:1])[0][:, -1], trained.model(ids[1:, :30])[0][:, -1]]
        torch.testing.assert_close(scores, model.score(torch.cat(hidden)), atol=1e-4, rtol=0)
    model.train()(ids, labels=torch.tensor([[1.0], [0.0]])).loss.backward()
    assert model.model.embed_tokens.weight.grad.any()
    model.eval().save_pretrained(tmp_path / "rm")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    with torch.no_grad():
        assert torch.equal(again(ids * mask, attention_mask=mask).logits, scores)


@pytest.mark.parametrize("memory", MEMORIES)
@torch.no_grad()
def test_torchao(memory, ids, tmp_path):
    """Weights in 8 bits compute what these numbers compute in float32; loss, text and memory too, saved and loaded."""
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    from transformers import TorchAoConfig

    reference = small_model(memory)
    reference.save_pretrained(tmp_path / "plain")
    how = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=how).eval()
    narrow = {name: weight for name, weight in model.named_parameters() if hasattr(weight, "qdata")}
    assert any("up_proj" in name for name in narrow) and not any(".memory." in name for name in narrow)
    for name, weight in narrow.items():
        reference.get_parameter(name).copy_(weight.dequantize())
    torch.testing.assert_close(model(ids).logits, reference(ids).logits, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(model(ids, labels=ids).loss, reference(ids, labels=ids).loss, atol=1e-3, rtol=0)
    cache = em.MemoryCache(model)
    parts = [model(piece, past_key_values=cache).logits for piece in ids.split([20, 1, 24], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids).logits, atol=1e-3, rtol=1e-3)
    model.save_pretrained(tmp_path / "narrow")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow").eval()
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert torch.equal(loaded.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
    cache.save(tmp_path / "read.safetensors")
    em.MemoryCache.load(tmp_path / "read.safetensors", loaded)
