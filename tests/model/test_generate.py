import pytest
import torch

import elastic_memory as em
from tests.conftest import small_model

GREEDY = dict(max_new_tokens=25, do_sample=False, pad_token_id=0, eos_token_id=None)


@pytest.fixture(params=["elastic", "none"])
def model(request):
    return small_model(request.param)


def test_with_a_cache_as_without(model, ids):
    expected = model.generate(ids, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert torch.equal(model.generate(ids, prefill_chunk_size=7, **GREEDY), expected)


def test_beams(model, ids):
    options = GREEDY | dict(num_beams=3)
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


def test_sampling(model, ids):
    options = dict(max_new_tokens=25, do_sample=True, temperature=0.8, top_k=20, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    cached = model.generate(ids, num_return_sequences=2, **options)
    torch.manual_seed(0)
    assert torch.equal(cached, model.generate(ids, num_return_sequences=2, use_cache=False, **options))


@pytest.mark.parametrize("left", [3, 8, 20])
def test_left_padding(model, ids, left):
    mask = torch.ones_like(ids)
    mask[1, :left] = 0
    together = model.generate(ids, attention_mask=mask, **GREEDY)
    for row, start in enumerate((0, left)):
        alone = model.generate(ids[row : row + 1, start:], **GREEDY)
        assert torch.equal(together[row, 45:], alone[0, 45 - start :])


def test_on_a_warm_cache(model, ids):
    """The tokens that come next, the whole sequence, or exactly what was read: each continues as one call would."""
    expected = model.generate(ids, **GREEDY)
    for read in (8, 30, 44):
        cache = em.MemoryCache(model)
        model(ids[:, :read], past_key_values=cache)
        assert torch.equal(model.generate(ids[:, read:], past_key_values=cache.fork(), **GREEDY), expected[:, read:])
        assert torch.equal(model.generate(ids, past_key_values=cache.fork(), **GREEDY), expected)
    cache = em.MemoryCache(model)
    model(ids, past_key_values=cache)
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)
    assert cache.clock == [45 + 24] * 2  # the last token generated has not been read


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}])
@pytest.mark.parametrize("static", [False, True])
def test_padding_on_a_warm_cache(model, ids, static, options):
    """Rows with clocks of their own go on as each would alone; pieces of a prompt may be padding from end to end."""
    options, mask = GREEDY | options, torch.ones_like(ids)
    mask[1, :13] = 0
    cache = em.MemoryCache(model, static=static)
    model(ids[:, :30], attention_mask=mask[:, :30], past_key_values=cache)
    warm = model.generate(ids[:, 30:], attention_mask=mask[:, 30:], past_key_values=cache, **options)
    for row, start in enumerate((0, 13)):
        alone = model.generate(ids[row : row + 1], attention_mask=mask[row : row + 1], **options)
        assert torch.equal(warm[row, 15:], alone[0, 45:])
        assert torch.equal(alone[:, 45:], model.generate(ids[row : row + 1, start:], **options)[:, 45 - start :])


def test_new_tokens_that_look_like_old_ones(model):
    """An empty open block cannot tell; nor can any, if a mask says that the tokens are new."""
    ids = torch.arange(1, 17).repeat(1, 2)
    expected = model.generate(ids, **GREEDY)[:, 16:]
    cache = em.MemoryCache(model)
    model(ids[:, :20], past_key_values=cache)
    cache.rollback(4)
    assert torch.equal(model.generate(ids[:, 16:], past_key_values=cache.fork(), **GREEDY), expected)
    cache = em.MemoryCache(model)
    model(ids[:, :16], past_key_values=cache)
    new = model.generate(ids[:, 16:], past_key_values=cache, attention_mask=torch.ones_like(ids), **GREEDY)
    assert torch.equal(new, expected)


def test_pipeline_conventions(model):
    assert model.can_generate()
    assert model.generation_config is not None


@pytest.mark.slow
def test_a_prompt_of_100_000_tokens(tmp_path):
    """Constant memory: the cache is as small as after a few blocks, and so is what the process allocates."""
    import psutil

    model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny")).eval()
    prompt = torch.randint(1, 512, (1, 100_000))
    options = dict(max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=None)
    short, long = em.MemoryCache(model), em.MemoryCache(model)
    model.generate(prompt[:, :1056], past_key_values=short, **options)
    before = psutil.Process().memory_info().rss
    output = model.generate(prompt, past_key_values=long, **options)
    assert output.shape == (1, 100_010)
    assert long.nbytes() == short.nbytes()
    assert psutil.Process().memory_info().rss - before < 50 * 2**20
    long.save(tmp_path / "a")
    em.MemoryCache.load(tmp_path / "a", model).save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
