"""Corruption: nothing at 0, everything at 1, the same noise however a text is read."""

import pytest
import torch

from elastic_memory.evaluation import corrupted, perplexity
from elastic_memory.evaluation.corruption import Noise
from elastic_memory.memory import MEMORIES
from tests.evaluation.conftest import llama, model_with, rows_of

WITH_MEMORY = [name for name in MEMORIES if name != "none"]


@pytest.mark.parametrize("layers", ["memory", "all"])
@pytest.mark.parametrize("memory", WITH_MEMORY)
def test_a_share_of_0_changes_no_bit(memory, layers):
    model, rows = model_with(memory), rows_of(45, 45)
    clean = perplexity(model, rows)
    with corrupted(model, 0.0, layers):
        assert perplexity(model, rows) == clean
    with corrupted(model, 0.5, layers):
        assert perplexity(model, rows) != clean
    assert perplexity(model, rows) == clean


def heads(seed, tokens=8):
    return torch.randn(2, 3, tokens, 4, generator=torch.Generator().manual_seed(seed)) * 2 + 1


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_a_share_of_the_tokens_loses_key_and_value(share):
    key, value = heads(0), heads(1)
    noisy_key, noisy_value = Noise(share, 8, (0, 0))(key, value)
    kept_key, kept_value = ((a == b).all(dim=(0, 1, 3)) for a, b in [(key, noisy_key), (value, noisy_value)])
    assert torch.equal(kept_key, kept_value)
    assert kept_key.sum() == 8 - share * 8
    assert ((key == noisy_key).any(dim=(0, 1, 3)) == kept_key).all()


def test_noise_has_the_mean_and_variance_of_each_head():
    key = (
        torch.randn(2, 3, 512, 16) * torch.tensor([0.1, 1.0, 10.0])[:, None, None]
        + torch.tensor([5.0, 0.0, -3.0])[:, None, None]
    )
    noisy, _ = Noise(1.0, 512, (0, 0))(key, key)
    torch.testing.assert_close(noisy.mean((2, 3)), key.mean((2, 3)), rtol=0.03, atol=0.3)
    torch.testing.assert_close(noisy.std((2, 3)), key.std((2, 3)), rtol=0.05, atol=0)


def test_the_padding_of_heads_stays_zero_and_does_not_count():
    key = torch.nn.functional.pad(torch.randn(2, 3, 64, 6) + 4, (0, 2))
    noisy, _ = Noise(1.0, 64, (0, 0))(key, key)
    assert (noisy[..., 6:] == 0).all()
    torch.testing.assert_close(noisy[..., :6].mean((2, 3)), key[..., :6].mean((2, 3)), rtol=0, atol=0.3)
    torch.testing.assert_close(noisy[..., :6].std((2, 3)), key[..., :6].std((2, 3)), rtol=0.2, atol=0)


def test_a_share_of_1_leaves_nothing_of_the_local_keys_but_two_moments():
    key = heads(0)
    # Other keys with the same moments: the tokens in another order, and the dimensions too.
    other = key[:, :, torch.randperm(8)][..., torch.randperm(4)]
    noise = Noise(1.0, 8, (0, 0))
    for a, b in zip(noise(key, key), noise(other, other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_share_of_1_in_the_memory_layer_leaves_memory_as_the_only_context():
    """With all local keys gone, attention of the memory layer no longer depends on which local token is which."""
    model, seen = model_with(), []
    attention = model.model.layers[2].self_attn
    with corrupted(model, 1.0):
        noise = attention.corrupt
        attention.corrupt = lambda key, value: seen.append((key, noise(key, value))) or seen[-1][1]
        perplexity(model, rows_of(45))
    for clean, (key, value) in seen:
        # Whitened, what attention sees is the same noise in every block.
        white = [(x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True) for x in (key, value)]
        first = [(x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True) for x in seen[0][1]]
        for x, y in zip(white, first, strict=True):
            assert x.shape[2] != y.shape[2] or torch.allclose(x, y, atol=1e-4)
        assert not torch.isclose(key, clean).all(dim=-1).any()


def test_the_noise_depends_on_seed_layer_and_place_only():
    model, rows = model_with(), rows_of(45, 45, 45)
    results = []
    for batch, seed in [(1, 3), (3, 3), (1, 4)]:
        with corrupted(model, 0.5, "all", seed):
            results.append(perplexity(model, rows, batch_size=batch).nll)
    assert results[0] == pytest.approx(results[1], rel=1e-6)
    assert results[0] != pytest.approx(results[2], rel=1e-4)


def test_memory_is_written_from_clean_keys():
    model, rows = model_with(), rows_of(45)
    states = []
    for share in (0.0, 1.0):
        with corrupted(model, share), torch.no_grad():
            cache = model(rows[0][None], use_cache=True).past_key_values
        states.append(cache.streams[2].state)
    # The memory layer is layer 2; what lies below it is not corrupted.
    for a, b in zip(*states, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (lambda: model_with(), (1.5,), "between 0 and 1"),
        (lambda: model_with(), (0.5, "some"), "known: memory, all"),
        (lambda: model_with("none"), (0.5,), "without memory"),
        (lambda: llama(), (0.5,), "attach_memory"),
        (lambda: model_with("none", local_attention="full"), (0.5, "all"), "full attention"),
    ],
)
def test_bad_input_is_named(model, arguments, message):
    with pytest.raises(ValueError, match=message), corrupted(model(), *arguments):
        pass
