"""What users of transformers take for granted: calls without a cache, heads, losses and switches are honoured."""

import pytest
import torch

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from tests.conftest import small_model

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
