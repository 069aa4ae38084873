"""Reconstruction: errors against the model's own memory, a spectrum against scipy."""

import pytest
import scipy.fft
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import elastic_memory as em
from elastic_memory import hippo
from elastic_memory.evaluation import reconstruction, spectrum
from elastic_memory.evaluation.reconstruction import energies, keys_and_values, squared_errors
from tests.evaluation.conftest import llama, model_with, rows_of


def test_what_is_measured_is_what_the_model_remembers():
    model, (row,) = model_with(memory_order=6), rows_of(41)
    signals = keys_and_values(model, row[:40])
    assert set(signals) == {(2, "key"), (2, "value")} and signals[2, "key"].shape == (40, 4, 8)
    with torch.no_grad():
        cache = model(row[None], use_cache=True).past_key_values  # token 40 closes the fifth block
    for part, state in zip(("key", "value"), cache.streams[2].state, strict=True):
        ours = hippo.compress(signals[2, part], 6)
        torch.testing.assert_close(ours.transpose(0, 1).float(), state[0], rtol=1e-4, atol=1e-5)


def test_errors_by_layer_head_and_age_average_to_the_whole():
    model, rows = model_with(), rows_of(48, 48)
    results = reconstruction(model, rows, orders=[4, 16, 48], layers=[0, 2])
    assert [(r.layer, r.part, r.order) for r in results[:4]] == [
        (0, "key", 4),
        (0, "key", 16),
        (0, "key", 48),
        (0, "value", 4),
    ]
    for result in results:
        assert len(result.by_head) == 4 and len(result.by_age) == 6
        assert sum(result.by_head) / 4 == pytest.approx(result.mse) == pytest.approx(sum(result.by_age) / 6)

    signals = [keys_and_values(model, row)[2, "value"] for row in rows]
    errors = torch.stack([squared_errors(signal, 4) for signal in signals])
    (one,) = (r for r in results if (r.layer, r.part, r.order) == (2, "value", 4))
    assert one.by_head == pytest.approx(errors.mean((0, 1)).tolist())
    assert one.by_age[0] == pytest.approx(float(errors[:, -8:].mean()))
    assert one.by_age[-1] == pytest.approx(float(errors[:, :8].mean()))


def test_more_coefficients_reconstruct_better():
    model, rows = model_with(), rows_of(64)
    for part in ("key", "value"):
        errors = [r.relative for r in reconstruction(model, rows, [2, 8, 32, 128]) if r.part == part]
        assert errors == sorted(errors, reverse=True) and errors[0] > 0.5 and errors[-1] < 0.1


def test_squared_errors_equal_the_plain_formula():
    signal = torch.randn(30, 2, 3, dtype=torch.float64)
    state = hippo.compress(signal, 7)
    again = torch.einsum("tn,nhd->thd", hippo.basis(7, (torch.arange(30, dtype=torch.float64) + 0.5) / 30), state)
    torch.testing.assert_close(squared_errors(signal, 7), (signal - again).square().mean(-1))


def test_an_attached_model_has_the_keys_it_had_before():
    plain, (row,) = llama(61), rows_of(16)
    before = keys_and_values(plain, row, layers=[0])
    attached = em.attach_memory(plain, layers=[0], order=5, points=4, block_size=16)
    after = keys_and_values(attached, row)
    torch.testing.assert_close(before[0, "key"], after[0, "key"], rtol=1e-5, atol=1e-5)
    assert {r.layer for r in reconstruction(attached, [row], [4])} == {0}
    assert {s.layer for s in spectrum(llama(61), [row])} == {0, 1}


def test_the_padding_of_heads_does_not_count():
    rows, sizes = rows_of(32), {"hidden_size": 24, "num_attention_heads": 4}  # heads of 6 numbers, stored as 8
    padded = model_with(**sizes, pad_heads=True)
    assert keys_and_values(padded, rows[0])[2, "key"].shape == (32, 4, 6)
    (key, value) = reconstruction(padded, rows, [1])
    assert key.relative == pytest.approx(1) and value.relative == pytest.approx(1)  # one number remembers the mean


def test_normalised_keys_are_taken_after_their_norm():
    config = Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    signal = keys_and_values(Qwen3ForCausalLM(config), rows_of(16)[0])[0, "key"]
    assert signal.shape == (16, 2, 8)
    torch.testing.assert_close(signal.square().mean(-1), torch.ones(16, 2).double(), rtol=1e-2, atol=0)


def test_the_spectrum_is_a_cosine_transform():
    signal = torch.randn(64, 2, 3, dtype=torch.float64).cumsum(0)
    power = torch.tensor(scipy.fft.dct(signal.flatten(1).numpy(), norm="ortho", axis=0)).square().sum(1)
    expected = power.reshape(32, 2).sum(1)
    torch.testing.assert_close(energies(signal), expected / expected.sum())
    (key, _) = spectrum(model_with(), rows_of(64, 64))
    assert sum(key.energy) == pytest.approx(1)


def test_bad_input_is_named():
    model = model_with()
    with pytest.raises(ValueError, match="layer 7 of a model with 3"):
        reconstruction(model, rows_of(16), [4], layers=[7])
    with pytest.raises(ValueError, match="rows of \\[16, 20\\] tokens"):
        reconstruction(model, rows_of(16, 20), [4])
