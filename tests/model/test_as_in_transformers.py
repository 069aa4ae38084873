"""What users of transformers take for granted: calls without a cache, heads, losses and switches are honoured."""

import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from elastic_memory.model import loss, modeling
from tests.conftest import small_model

SHAPE = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=61, initializer_range=0.2, max_position_embeddings=256, head_dim=8, pad_token_id=0,
)  # fmt: skip

# -- decoding by hand --------------------------------------------------------------------------------------------------


def decoded_by_hand(model, ids, tokens, **options):
    """The usual loop: nobody asks for a cache, everybody passes on the one that came."""
    written, output = ids, model(ids, **options)
    for _ in range(tokens):
        chosen = output.logits[:, -1:].argmax(-1)
        written = torch.cat((written, chosen), dim=1)
        output = model(chosen, past_key_values=output.past_key_values)
    return written


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("gradients", [False, True])
def test_decoding_by_hand_is_generating(memory, gradients, ids):
    model = small_model(memory)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    with torch.set_grad_enabled(gradients):
        assert torch.equal(decoded_by_hand(model, ids, 12), expected)


def test_a_cache_that_nobody_asked_for_costs_nothing_until_it_is_used(model, ids, monkeypatch):
    reads, read = [], em.MemoryCache.begin
    monkeypatch.setattr(em.MemoryCache, "begin", lambda self, *args: reads.append(args) or read(self, *args))
    given = ids.clone()
    output = model(given)
    assert isinstance(output.past_key_values, em.MemoryCache) and not hasattr(output.past_key_values, "dtype")
    assert output.logits.requires_grad and not reads
    given.zero_()  # the cache has read what the call was given
    assert output.past_key_values.holds(ids) and reads
    assert output.past_key_values.model is model and output.past_key_values.clock == [45, 45]


def test_a_cache_that_nobody_asked_for_is_like_any_other(model, ids, tmp_path):
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    with torch.no_grad():
        asked = model(ids, attention_mask=mask, use_cache=True).past_key_values
        uses = [
            lambda cache: cache.fork(),
            lambda cache: cache,
            lambda cache: cache.save(tmp_path / "memory") or em.MemoryCache.load(tmp_path / "memory", model),
            lambda cache: setattr(cache, "recording", True) or cache,
        ]
        for use in uses:
            cache = use(model(ids, attention_mask=mask).past_key_values)
            assert cache.clock == asked.clock == [45, 32]
            following = [model(ids[:, :9], past_key_values=one.fork()).logits for one in (cache, asked)]
            torch.testing.assert_close(*following, atol=1e-4, rtol=0)  # a file's open block is read again
        cache = model(inputs_embeds=model.get_input_embeddings()(ids)).past_key_values
        cache.reset()
        assert cache.batch == 0


def test_calls_that_get_no_cache(model, ids):
    assert model(ids, use_cache=False).past_key_values is None
    assert model(ids, labels=ids).past_key_values is None
    assert model.train()(ids).past_key_values is None
    model.eval().config.use_cache = False
    assert model(ids).past_key_values is None


def test_packed_documents_cannot_be_continued(model, ids):
    positions = torch.cat((torch.arange(20), torch.arange(25))).expand(2, -1)
    cache = model(ids, position_ids=positions).past_key_values
    with pytest.raises(ValueError, match="several documents"):
        model(ids[:, :1], past_key_values=cache)


def test_the_model_without_its_head_is_decoded_by_hand_too(model, ids):
    with torch.no_grad():
        base = model.model
        output = base(ids[:, :30])
        following = base(ids[:, 30:], past_key_values=output.past_key_values).last_hidden_state
        torch.testing.assert_close(following, base(ids).last_hidden_state[:, 30:], atol=1e-4, rtol=0)


def test_a_compiled_model_is_decoded_by_hand_too(model, ids):
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        output = compiled(ids[:, :30])
        following = model(ids[:, 30:], past_key_values=output.past_key_values).logits
        torch.testing.assert_close(following, model(ids).logits[:, 30:], atol=1e-4, rtol=0)
    torch._dynamo.reset()


@torch.no_grad()
def test_exported_models_return_tensors_only(model, ids):
    expected = model(ids).logits
    assert torch.equal(torch.export.export(model, (ids,)).module()(ids).logits, expected)


# -- heads and losses --------------------------------------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A head with a low-rank adapter, and dropout before it, as adapters have."""

    def __init__(self, head, rate=0.0):
        super().__init__()
        self.base, self.weight = head, head.weight
        self.low = torch.nn.Parameter(torch.randn(4, head.in_features))
        self.high = torch.nn.Parameter(torch.randn(head.out_features, 4))
        self.dropout = torch.nn.Dropout(rate)

    def forward(self, hidden):
        return self.base(hidden) + self.dropout(hidden) @ self.low.T @ self.high.T


def adapt(model):
    model.lm_head = Adapted(model.lm_head)


def add_bias(model):
    model.lm_head.bias = torch.nn.Parameter(torch.randn(61))


def add_hook(model):
    model.lm_head.register_forward_hook(lambda head, args, logits: 2 * logits)


def add_pre_hook(model):
    model.lm_head.register_forward_pre_hook(lambda head, args: 2 * args[0])


def patch(model):
    """As accelerate does, for weights that are elsewhere."""
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: forward(2 * hidden)


def normalise(model):
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)


def loss_of_logits(model, ids):
    return torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("most", [10_000, 50])  # tokens whose logits are returned
@pytest.mark.parametrize("change", [adapt, add_bias, add_hook, add_pre_hook, patch, normalise])
def test_the_loss_is_that_of_the_logits_whatever_the_head(change, most, ids, monkeypatch):
    monkeypatch.setattr(modeling, "LOGITS_AT_MOST", most)
    monkeypatch.setattr(loss, "PIECE", 7)
    model = small_model(tie_word_embeddings=False)
    change(model)
    expected = loss_of_logits(model, ids)
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for training in (False, True):
        found = model.train(training)(ids, labels=ids).loss
        torch.testing.assert_close(found, expected)
        found.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4)
        model.zero_grad()


def test_a_head_with_dropout_is_differentiated_as_it_was_computed(monkeypatch):
    """Pieces are computed again in the backward pass, with the same dropout: which tokens count, the gradient shows."""
    head = Adapted(torch.nn.Linear(8, 61, bias=False), rate=0.5)
    hidden, labels = torch.eye(8).repeat(4, 1), torch.arange(32)
    dropped = []
    head.dropout.register_forward_hook(lambda module, args, output: dropped.append(output.detach().clone()))
    monkeypatch.setattr(loss, "PIECE", 16)
    loss.summed_loss(hidden, head, labels).backward()
    first, again = dropped[:2], dropped[2:]
    assert len(again) == 2 and all(any(torch.equal(one, other) for other in again) for one in first)


def test_a_plain_head_takes_the_short_way(model, ids, monkeypatch):
    monkeypatch.setattr(modeling, "LOGITS_AT_MOST", 50)
    monkeypatch.setattr(model.lm_head, "_call_impl", None, raising=False)  # nobody calls it
    assert torch.isfinite(model.train()(ids, labels=ids).loss)


def test_labels_that_are_shifted_already(model, ids):
    shifted = torch.cat((ids[:, 1:], ids[:, :1]), 1)
    expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), shifted.flatten())
    torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted).loss, expected)
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, expected)
    adapt(model)
    expected = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), shifted.flatten())
    torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted).loss, expected)


def test_a_loss_function_of_ones_own(model, ids, monkeypatch):
    monkeypatch.setattr(modeling, "LOGITS_AT_MOST", 50)
    given = {}

    def own(logits, labels, vocab_size, **kwargs):
        given.update(kwargs, logits=logits, labels=labels, vocab_size=vocab_size)
        return logits.square().mean()

    model.loss_function = own
    output = model.train()(ids, labels=ids, num_items_in_batch=7)
    assert torch.equal(output.loss, given["logits"].square().mean()) and given["logits"].shape == (2, 45, 61)
    assert torch.equal(given["labels"], ids) and given["vocab_size"] == 61 and given["num_items_in_batch"] == 7


def test_what_the_loss_cannot_do_is_refused(model, ids):
    with pytest.raises(ValueError, match="ignore_index=0"):
        model(ids, labels=ids, ignore_index=0)
    with pytest.raises(ValueError, match="is_causal"):
        model(ids, is_causal=False)


@pytest.mark.parametrize("kind", ["own", "attached"])
def test_label_smoothing_of_the_trainer_predicts_the_next_token(kind, ids, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = small_model()
    if kind == "attached":
        model = em.attach_memory(Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval(), order=11, points=5, block_size=8)
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    trainer = Trainer(model, arguments)
    found = trainer.compute_loss(model, {"input_ids": ids, "labels": ids})
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found, expected)


# -- switches ----------------------------------------------------------------------------------------------------------


def test_attention_dropout_is_refused():
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        small_model(attention_dropout=0.1)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, attention_dropout=0.1))
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        em.attach_memory(model)
    assert type(model) is Qwen3ForCausalLM


def test_the_configuration_asks_for_hidden_states(model, ids):
    expected = model(ids, output_hidden_states=True).hidden_states
    model.config.output_hidden_states = True
    for mine, theirs in zip(model(ids).hidden_states, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert model(ids, output_hidden_states=False).hidden_states is None


def test_the_configuration_asks_for_attentions(model, ids):
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids)


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)  # fmt: skip
def test_hooks_that_would_never_run_are_refused(register, model, ids):
    """The layer calls the parts of its attention, never the whole; hooks on layers and parts run."""
    layer = model.model.layers[1]
    with pytest.raises(ValueError, match="hook the layer, or q_proj, k_proj, v_proj or o_proj"):
        getattr(layer.self_attn, register)(lambda *args: None)
    called = []
    getattr(layer, register)(lambda *args: called.append(1))
    getattr(layer.self_attn.o_proj, register)(lambda *args: called.append(1))
    model(ids).logits.sum().backward()
    assert len(called) == 2


@pytest.mark.parametrize("part", ["layers.1", "layers.1.self_attn"])
def test_hooks_that_attaching_would_drop_are_refused(part):
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    hook = model.model.get_submodule(part).register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=f"{part} has hooks"):
        em.attach_memory(model)
    assert type(model) is Qwen3ForCausalLM
    hook.remove()
    em.attach_memory(model)


# -- loading -----------------------------------------------------------------------------------------------------------

LOAD = "import sys\nfrom transformers import AutoModelForCausalLM as A\nprint(type(A.from_pretrained(sys.argv[1]{})))"


def loaded_by_a_stranger(folder, code, home):
    """What a program says that loads a model, and never imports elastic_memory itself."""
    env = os.environ | {"HF_MODULES_CACHE": str(home)}
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL)


def test_models_tell_transformers_where_their_code_is(model, tmp_path):
    """Trusted, they load without our import; not trusted, transformers says that there is code, not to upgrade."""
    model.save_pretrained(tmp_path / "model")
    trusted = loaded_by_a_stranger(tmp_path / "model", LOAD.format(", trust_remote_code=True"), tmp_path)
    assert "elastic_memory.model.modeling.MemoryLlamaForCausalLM" in trusted.stdout, trusted.stderr
    refused = loaded_by_a_stranger(tmp_path / "model", LOAD.format(""), tmp_path)
    assert "contains custom code" in refused.stderr and "out of date" not in refused.stderr
    imported = loaded_by_a_stranger(tmp_path / "model", "import elastic_memory\n" + LOAD.format(""), tmp_path)
    assert "elastic_memory.model.modeling.MemoryLlamaForCausalLM" in imported.stdout, imported.stderr

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded.register_for_auto_class("AutoModelForCausalLM")  # as transformers does when it is told to trust
    loaded.save_pretrained(tmp_path / "again")
    for name in ("config.json", "elastic_memory_classes.py"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "model" / name).read_text()
    assert len(list((tmp_path / "again").glob("*.py"))) == 1
