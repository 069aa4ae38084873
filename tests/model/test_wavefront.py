"""Layers on a diagonal go together: the same numbers as one layer after the other."""

import copy
from itertools import chain

import pytest
import torch

from elastic_memory.memory import MEMORIES
from elastic_memory.model import wavefront
from elastic_memory.model.wavefront import Wavefront
from tests.conftest import small_model
from tests.model.test_training import assert_same_gradients, gradients

BY_ROW = [name for name, kind in MEMORIES.items() if kind.by_row]


def wave_model(memory, monkeypatch, tokens=32768, **overrides):
    """A model whose layers go together, nothing compiled, and the sizes of the groups that went."""
    model = small_model(memory, **({"memory_layers": None} | overrides)).train()
    assert Wavefront.applies(model.model.layers)
    monkeypatch.setattr(wavefront, "TOKENS", tokens)
    groups, wave = [], Wavefront(model.model.layers)
    wave.run = lambda *args: (groups.append(len(args[2])), wavefront._together(*args))[1]
    model.model.wavefront = wave
    return model, groups


@pytest.mark.parametrize("memory", BY_ROW)
@pytest.mark.parametrize(
    ("layers", "blocks", "rows", "tokens", "options"),
    [
        (5, 5, 2, 32768, {}),
        (5, 5, 2, 32, {}),  # pairs only
        (3, 6, 1, 32768, {"first_block": "zeros"}),
        (4, 6, 2, 32768, {"detach_every": 2}),
        (2, 3, 3, 32768, {}),
    ],
)
def test_a_wave_is_layer_after_layer(memory, layers, blocks, rows, tokens, options, monkeypatch):
    settings = {"num_hidden_layers": layers, "memory_options": options}
    model, groups = wave_model(memory, monkeypatch, tokens, **settings)
    model.double()
    plain = copy.deepcopy(model)
    plain.model.wavefront = None
    ids = torch.randint(1, 61, (rows, 8 * blocks), generator=torch.Generator().manual_seed(1))
    assert_same_gradients(gradients(plain, ids), gradients(model, ids), atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=1e-10, rtol=0)
    first = 0 if options.get("first_block") == "zeros" else 1
    assert sum(groups) == 2 * layers * (blocks - first)  # each block of each layer once, trained and evaluated
    assert max(groups) == min(2 if tokens == 32 else 4, 1 << (layers.bit_length() - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_padded_and_under_autocast(dtype, monkeypatch):
    model, groups = wave_model("melodi", monkeypatch, pad_heads=True, num_hidden_layers=4)
    ids = torch.randint(1, 61, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        ours = gradients(model, ids)
        model.model.wavefront = None
        theirs = gradients(model, ids)
    assert max(groups) == 4
    for name, gradient in theirs.items():
        limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
        assert (ours[name] - gradient).norm() <= limit * gradient.norm(), name


def _hook(model):
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)


def _probe(model):
    model.model.layers[2].self_attn.corrupt = lambda key, value: (key, value)


def _changed(model):
    attention = model.model.layers[0].self_attn
    attention.q_proj = torch.nn.Sequential(attention.q_proj)


@pytest.mark.parametrize("change", [_hook, _probe, _changed, lambda model: model.gradient_checkpointing_enable()])
def test_layers_that_somebody_needs_for_himself_go_one_by_one(change, monkeypatch):
    model, groups = wave_model("melodi", monkeypatch)
    ids = torch.ones(1, 40, dtype=torch.long)
    model(ids)
    assert groups
    groups.clear()
    change(model)
    model(ids, labels=ids).loss.backward()
    assert not groups


@pytest.mark.parametrize(("rows", "length", "tokens"), [(1, 37, 32768), (1, 16, 32768), (3, 40, 32)])
def test_nothing_to_gain(rows, length, tokens, monkeypatch):
    """A last block that is short, too few of them, or so many rows that a single layer keeps a GPU busy."""
    model, groups = wave_model("melodi", monkeypatch, tokens)
    model(torch.ones(rows, length, dtype=torch.long))
    assert not groups


def test_hidden_states_of_all_layers_can_be_had(monkeypatch):
    model, _ = wave_model("melodi", monkeypatch)
    hidden = model(torch.ones(1, 40, dtype=torch.long), output_hidden_states=True).hidden_states
    assert len(hidden) == len(model.model.layers) + 1


@pytest.mark.parametrize(("memory", "settings"), [("elastic", {}), ("melodi", {"memory_layers": [1]})])
def test_layers_that_do_not_wait_or_are_not_alike(memory, settings):
    model = small_model(memory, **settings)
    model.compile_blocks(backend="eager")
    assert model.model.wavefront is None


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4, 8, 100])
def test_pieces_are_all_of_them_in_order(most):
    for count in range(14):
        pieces = list(wavefront._pieces(list(range(count)), most))
        assert [*chain(*pieces)] == list(range(count))
        assert all(len(piece) in (1, 2, 4, 8) and len(piece) <= max(most, 1) for piece in pieces)
