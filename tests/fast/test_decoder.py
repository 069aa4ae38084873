"""Static caches: the same logits, on buffers that never move."""

import pytest
import torch

import elastic_memory as em
from elastic_memory.fast import decoder
from elastic_memory.memory import MEMORIES
from tests.conftest import small_model

TOLERANCE = dict(atol=1e-4, rtol=0)


def decode(model, cache, ids):
    with torch.no_grad():
        return torch.cat([model(x, past_key_values=cache).logits for x in ids.split(1, dim=1)], dim=1)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("prompt", "stretch"), [(0, 256), (5, 3), (8, 1), (19, 3)])
def test_decoding_is_one_call(memory, prompt, stretch, ids, monkeypatch):
    monkeypatch.setattr(decoder, "STRETCH", stretch)
    model = small_model(memory)
    cache = em.MemoryCache(model, static=True)
    with torch.no_grad():
        expected = model(ids).logits
        if prompt:
            model(ids[:, :prompt], past_key_values=cache)
    torch.testing.assert_close(decode(model, cache, ids[:, prompt:]), expected[:, prompt:], atol=1e-4, rtol=0)
    assert cache.clock == [45, 45]


def test_compiled_steps_are_the_same(model, ids):
    with torch.no_grad():
        expected = model(ids).logits
    model.compile_blocks(backend="aot_eager")
    for rows in (2, 1):
        cache = em.MemoryCache(model, static=True)
        torch.testing.assert_close(decode(model, cache, ids[:rows]), expected[:rows], **TOLERANCE)


@pytest.mark.parametrize("local", ["block", "sliding"])
def test_rows_with_their_own_clocks(local, ids):
    model = small_model(local_attention=local)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    following = torch.randint(1, 61, (2, 20), generator=torch.Generator().manual_seed(3))
    cache = em.MemoryCache(model, static=True)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        logits = decode(model, cache, following)
        for row, start in enumerate((0, 13)):
            alone = model(torch.cat((ids[row, start:], following[row]))[None]).logits[0, 45 - start :]
            torch.testing.assert_close(logits[row], alone, atol=1e-4, rtol=0)


def test_everything_else_a_cache_can_do(model, ids, tmp_path):
    """Single tokens, then many; forks, rollbacks, files and beams in between."""
    cache = em.MemoryCache(model, static=True)
    with torch.no_grad():
        expected = model(ids).logits
        decode(model, cache, ids[:, :11])
        fork = cache.fork()
        many = model(ids[:, 11:20], past_key_values=cache).logits
        torch.testing.assert_close(many, expected[:, 11:20], atol=1e-4, rtol=0)
        torch.testing.assert_close(decode(model, fork, ids[:, 11:20]), expected[:, 11:20], atol=1e-4, rtol=0)
        fork.rollback(2)
        torch.testing.assert_close(decode(model, fork, ids[:, 18:30]), expected[:, 18:30], atol=1e-4, rtol=0)
        fork.save(tmp_path / "memory")
        loaded = em.MemoryCache.load(tmp_path / "memory", model, static=True)
        torch.testing.assert_close(decode(model, loaded, ids[:, 30:]), expected[:, 30:], atol=1e-4, rtol=0)
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
    for beams in (1, 3):
        static = model.generate(ids, past_key_values=em.MemoryCache(model, static=True), num_beams=beams, **options)
        assert torch.equal(static, model.generate(ids, num_beams=beams, **options))


@pytest.mark.parametrize("memory", ["elastic", "infini", "melodi"])
@pytest.mark.parametrize("local", ["block", "sliding"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_captured_step_stays(memory, local, device, ids):
    """What leaves the shapes as they are, copies into the decoder's buffers: nothing is captured anew."""
    try:
        model = small_model(memory, local_attention=local)
    except ValueError:
        pytest.skip("undefined with sliding attention")
    model, ids = model.to(device), ids.to(device)
    cache, swap = em.MemoryCache(model, static=True), torch.tensor([1, 0], device=device)
    cache.activate_past_recording()
    with torch.no_grad():
        expected = model(ids).logits
        model(ids[:, :17], past_key_values=cache)
        decode(model, cache, ids[:, 17:19])
        captured, graphs, size = cache.decoder, dict(cache.decoder.graphs), cache.nbytes()
        uses = [
            (lambda: cache.rollback(2), 17, 22),
            (lambda: model(ids[:, 22:30], past_key_values=cache), 30, 35),
            (lambda: cache.rollback(4), 31, 35),
            (lambda: cache.rollback(6), 29, 41),  # across the end of a block
        ]
        for use, start, end in uses:
            use()
            torch.testing.assert_close(decode(model, cache, ids[:, start:end]), expected[:, start:end], **TOLERANCE)
        for start in (41, 42, 43):
            cache.select(swap)
            ids, expected = ids[swap], expected[swap]
            logits = decode(model, cache, ids[:, start : start + 1])
            torch.testing.assert_close(logits, expected[:, start : start + 1], **TOLERANCE)
    assert cache.decoder is captured
    assert captured.graphs == graphs
    assert cache.nbytes() <= size


def test_a_probe_is_honoured(model, ids):
    """Corrupted keys and values of the open block, token by token."""
    static, plain = em.MemoryCache(model, static=True), em.MemoryCache(model)
    for each in (static, plain):
        decode(model, each, ids[:, :11])
    model.model.layers[1].self_attn.corrupt = lambda key, value: (key * 0.7, value.flip(-1))
    probed = decode(model, plain, ids[:, 11:20])
    torch.testing.assert_close(decode(model, static, ids[:, 11:20]), probed, **TOLERANCE)
    model.model.layers[1].self_attn.corrupt = None
    torch.testing.assert_close(decode(model, static, ids[:, 20:]), decode(model, plain, ids[:, 20:]), **TOLERANCE)


def test_it_follows_the_retrieval_settings(model, ids):
    cache, plain = em.MemoryCache(model, static=True), em.MemoryCache(model)
    for each in (cache, plain):
        decode(model, each, ids[:, :18])
    model.set_retrieval(sampling="uniform", points=7)
    torch.testing.assert_close(
        decode(model, cache, ids[:, 18:30]), decode(model, plain, ids[:, 18:30]), atol=1e-4, rtol=0
    )


def test_full_attention_has_no_static_cache(ids):
    model = small_model("none", local_attention="full")
    with pytest.raises(ValueError, match="needs blocks"):
        model(ids[:, :1], past_key_values=em.MemoryCache(model, static=True))
