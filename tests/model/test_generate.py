import subprocess
import sys

import pytest
import torch

import elastic_memory as em
from elastic_memory.streaming.reader import AT_ONCE
from tests.conftest import small_model

GREEDY = dict(max_new_tokens=25, do_sample=False, pad_token_id=0, eos_token_id=None)


@pytest.fixture(params=["elastic", "none"])
def model(request):
    return small_model(request.param)


def test_with_a_cache_as_without(model, ids):
    expected = model.generate(ids, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert torch.equal(model.generate(ids, prefill_chunk_size=7, **GREEDY), expected)


def test_caches_by_name(model, ids, monkeypatch):
    expected, seen, begin = model.generate(ids, **GREEDY), [], em.MemoryCache.begin
    monkeypatch.setattr(em.MemoryCache, "begin", lambda self, *args: seen.append(self.static) or begin(self, *args))
    for name in ("dynamic", "static"):
        assert torch.equal(model.generate(ids, cache_implementation=name, **GREEDY), expected)
        assert set(seen) == {name == "static"}
        seen.clear()
    with pytest.raises(ValueError, match="cache_implementation='quantized': a memory cache is 'dynamic' or 'static'"):
        model.generate(ids, cache_implementation="quantized", **GREEDY)


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


@pytest.mark.parametrize("through_a_file", [False, True])
@pytest.mark.parametrize("read", [1, 7, 8, 9, 10, 17])
def test_a_new_prompt_that_looks_like_the_open_block(model, ids, read, through_a_file, tmp_path):
    """It is a whole sequence only if it begins with all that was read, not merely with what is still at hand."""
    cache = em.MemoryCache(model)
    model(ids[:, :read], past_key_values=cache)
    if through_a_file:
        cache.save(tmp_path / "memory")
        cache = em.MemoryCache.load(tmp_path / "memory", model)
    prompt = ids.flip(1)
    prompt[:, : cache.seen[0]] = prompt[:, : cache.seen[0]] % 60 + 1
    prompt[:, cache.seen[0] : read] = ids[:, cache.seen[0] : read]
    if not cache.seen[0]:
        prompt[:, 0] = ids[:, 0] % 60 + 1
    expected = model.generate(torch.cat((ids[:, :read], prompt), dim=1), **GREEDY)[:, read:]
    assert torch.equal(model.generate(prompt, past_key_values=cache.fork(), **GREEDY), expected)
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), model.generate(ids, **GREEDY))


@pytest.mark.parametrize("left", [True, False])
def test_a_whole_padded_sequence(model, ids, left):
    """The mask says where the tokens are; where all padding is on the left, they are found without it."""
    mask = torch.ones_like(ids)
    mask[1, slice(0, 13) if left else slice(17, 30)] = 0
    cache = em.MemoryCache(model)
    model(ids[:, :30], attention_mask=mask[:, :30], past_key_values=cache)
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=cache.fork(), **GREEDY), expected)
    assert cache.holds(ids) == left


def test_one_book_and_whole_questions(model, ids):
    book, questions = ids[:1, :21], torch.cat((ids[:1, :21].expand(3, -1), ids[:1, 21:].view(3, 8)), dim=1)
    cache = em.MemoryCache(model)
    model(book, past_key_values=cache)
    expected = model.generate(questions, **GREEDY)
    assert torch.equal(model.generate(questions, past_key_values=cache.fork(), **GREEDY), expected)
    questions[2, 3] = questions[2, 3] % 60 + 1  # not what was read: then all are new
    new = model.generate(torch.cat((book.expand(3, -1), questions), dim=1), **GREEDY)[:, 21:]
    assert torch.equal(model.generate(questions, past_key_values=cache, **GREEDY), new)


@pytest.mark.parametrize("static", [False, True])
def test_after_embeddings_all_tokens_are_new(model, ids, static, tmp_path):
    cache = em.MemoryCache(model, static=static)
    model(inputs_embeds=model.get_input_embeddings()(ids[:, :19]), past_key_values=cache)
    model(ids[:, 19:20], past_key_values=cache)
    with pytest.raises(ValueError, match="embeddings"):
        cache.save(tmp_path / "memory")
    expected = model.generate(torch.cat((ids[:, :20], ids), dim=1), **GREEDY)[:, 20:]
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)


def test_new_tokens_that_look_like_old_ones(model):
    """A mask says that they are new. Where the newest token cannot be read again, doubt is an error."""
    ids = torch.arange(1, 17).repeat(1, 2)
    expected = model.generate(ids, **GREEDY)[:, 16:]
    for read in (16, 20):
        cache = em.MemoryCache(model)
        model(ids[:, :read], past_key_values=cache)
        cache.rollback(read - 16)
        new = model.generate(ids[:, 16:], past_key_values=cache.fork(), attention_mask=torch.ones_like(ids), **GREEDY)
        assert torch.equal(new, expected)
    with pytest.raises(ValueError, match="attention_mask"):
        model.generate(ids[:, 16:], past_key_values=cache, **GREEDY)


@pytest.mark.filterwarnings("ignore")  # transformers deprecates what its own assistants do
@pytest.mark.parametrize("memory, local", [("elastic", "block"), ("elastic", "sliding"), ("melodi", "block")])
@pytest.mark.parametrize("static", [False, True])
def test_speculative_decoding(memory, local, static, ids):
    """Candidates that turn out wrong are taken back across the ends of blocks: the same tokens as without."""
    model = small_model(memory, local_attention=local)
    options = GREEDY | dict(max_new_tokens=60, pad_token_id=61)  # no token that an assistant may come upon
    expected = model.generate(ids[:1], **options)
    for help in ({"prompt_lookup_num_tokens": 7}, {"assistant_model": small_model(seed=1)}, {"assistant_model": model}):
        if "assistant_model" in help:
            help["assistant_model"].generation_config.num_assistant_tokens = 7
        cache = em.MemoryCache(model, static=static)
        assert torch.equal(model.generate(ids[:1], past_key_values=cache, **help, **options), expected)
        assert cache.holds(expected)


def test_pipeline_conventions(model):
    assert model.can_generate()
    assert model.generation_config is not None


PEAK = """
import resource, sys, torch
import elastic_memory as em
torch.set_num_threads(1)
model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny")).eval()
options = dict(max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=None)
for tokens in (20_000, 80_000):
    prompt = torch.randint(1, 512, (1, tokens))
    assert model.generate(prompt, **options).shape == (1, tokens + 10)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_a_prompt_of_100_000_tokens(tmp_path):
    """Constant memory: the cache is as small as after what is read at once."""
    model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny")).eval()
    prompt = torch.randint(1, 512, (1, 100_000))
    options = dict(max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=None)
    short, long = em.MemoryCache(model), em.MemoryCache(model)
    model.generate(prompt[:, : AT_ONCE + 1056], past_key_values=short, **options)
    model.generate(prompt, past_key_values=long, **options)
    assert long.nbytes() == short.nbytes()
    long.save(tmp_path / "a")
    em.MemoryCache.load(tmp_path / "a", model).save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_long_prompt_needs_no_more_memory_than_a_shorter_one():
    """The peak of the process: an array of one float per layer and token would be seen."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=300, check=True)
    short, long = (int(line) << 10 for line in done.stdout.split())
    assert long - short < 20 * 2**20
