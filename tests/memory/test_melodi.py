import pytest
import torch

import elastic_memory as em
from elastic_memory.memory import Block
from tests.conftest import small_model
from tests.memory.cases import BLOCK, fresh, logits, memory_of, tokens
from tests.oracles import melodi as oracle
from tests.oracles.parts import Layer


def one_layer(**overrides):
    return fresh("melodi", num_hidden_layers=1, **overrides)


def state_after(model, ids):
    """z of the only layer after one whole block."""
    cache = em.MemoryCache(model)
    logits(model, torch.cat((ids, ids[:, :1]), dim=1), past_key_values=cache)
    return cache.streams[0].state[0]


def test_the_next_memory_depends_on_every_token_of_the_block():
    model, ids = one_layer(), tokens(1, BLOCK)
    before = state_after(model, ids)
    for place in range(BLOCK):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 7) % 61
        assert (state_after(model, changed) - before).abs().max() > 1e-3, place


def test_a_block_does_not_depend_on_the_memory_it_makes():
    model, other, ids = one_layer(), one_layer(), tokens(1, 2 * BLOCK)
    torch.nn.init.constant_(memory_of(other).mixer.weight, 0.3)
    assert (state_after(model, ids[:, :BLOCK]) - state_after(other, ids[:, :BLOCK])).abs().max() > 0.1
    before, after = logits(model, ids), logits(other, ids)
    assert torch.equal(before[:, :BLOCK], after[:, :BLOCK])
    assert (before[:, BLOCK:] - after[:, BLOCK:]).abs().max() > 1e-2


def test_summary_tokens_change_the_next_block_and_not_their_own():
    model, other, ids = fresh("melodi"), fresh("melodi"), tokens(1, 2 * BLOCK)
    for memory in other.memories.values():
        torch.nn.init.normal_(memory.summary)
    before, after = logits(model, ids), logits(other, ids)
    assert torch.equal(before[:, :BLOCK], after[:, :BLOCK])
    assert (before[:, BLOCK:] - after[:, BLOCK:]).abs().max() > 1e-2


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK])
def test_a_short_block_is_filled_up_in_the_mixer_only(length):
    model = one_layer().double()
    memory = memory_of(model)
    context, summary = torch.randn(1, length, 32).double(), torch.randn(1, memory.order, 32).double()
    block = Block(context, context, output=context, tail=summary)
    (state,) = memory.write(memory.start(1), block, 0)
    expected = oracle.mixed(Layer(model, 0), context[0], summary[0])
    torch.testing.assert_close(state[0], expected)


def test_initialisation():
    """Summaries as small as embeddings or as told, the mixer by its inputs, no bias."""
    memory = memory_of(fresh("melodi", initializer_range=0.02, hidden_size=512, memory_order=64, block_size=448))
    assert memory.summary.std().item() == pytest.approx(0.02, rel=0.05)
    assert memory.mixer.weight.std().item() == pytest.approx(512**-0.5, rel=0.05)
    assert not memory.mixer.bias.any()
    larger = memory_of(fresh("melodi", hidden_size=512, memory_order=64, memory_options={"summary_std": 0.25}))
    assert larger.summary.std().item() == pytest.approx(0.25, rel=0.05)


def test_weights_of_another_block_size_are_refused(tmp_path):
    """The mixer has an input for each place in the block."""
    one_layer().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"mixer.weight is \[4, 12\] .* \[4, 20\] here: .*block_size, 16 here.*trained with"
    ):
        em.MemoryLlamaForCausalLM.from_pretrained(tmp_path, block_size=16)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"first_block": "zero"}, "first_block='zero': give one of omit, zeros"), ({"points": 3}, "no option 'points'")],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fresh("melodi", memory_options=options)


def test_adapters_of_all_linear_layers_leave_the_mixer_alone(ids):
    peft = pytest.importorskip("peft")
    model = small_model("melodi")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained and not any(".memory." in name for name in trained)
    adapted(ids, labels=ids).loss.backward()
    assert all(parameter.grad.any() for parameter in adapted.parameters() if parameter.requires_grad)
