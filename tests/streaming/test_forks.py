"""What a fork and its original must not share."""

import pytest
import torch

import elastic_memory as em


def draw(tokens, seed):
    return torch.randint(1, 61, (1, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("read", [3, 11])
@torch.no_grad()
def test_each_saves_the_open_block_that_it_has_read(read, model, tmp_path):
    """The ids of an open block are what a memory file holds of it."""
    cache = em.MemoryCache(model)
    model(draw(read, 0), past_key_values=cache)
    both = {"original": cache, "fork": cache.fork()}
    for seed, one in enumerate(both.values(), 1):
        model(draw(2, seed), past_key_values=one)
    for seed, (name, one) in enumerate(both.items(), 1):
        one.save(tmp_path / name)
        loaded = em.MemoryCache.load(tmp_path / name, model)
        found = model(draw(9, 3), past_key_values=loaded).logits
        whole = torch.cat((draw(read, 0), draw(2, seed), draw(9, 3)), dim=1)
        torch.testing.assert_close(found, model(whole).logits[:, -9:], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_fork_takes_back_what_its_original_could(model):
    """Across the end of a block, where that is recorded; the original can still do so, too."""
    cache = em.MemoryCache(model)
    cache.activate_past_recording()
    for piece in draw(18, 0).split(1, dim=1):
        model(piece, past_key_values=cache)
    for one in (cache.fork(), cache):
        one.rollback(4)
        found = model(draw(9, 1), past_key_values=one).logits
        whole = torch.cat((draw(18, 0)[:, :14], draw(9, 1)), dim=1)
        torch.testing.assert_close(found, model(whole).logits[:, -9:], atol=1e-4, rtol=1e-4)
