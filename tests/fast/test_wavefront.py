"""A wavefront of layers computes what one layer after the other does."""

import copy
from functools import partial
from itertools import chain
from types import MethodType

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from elastic_memory.fast import wavefront
from elastic_memory.fast.wavefront import Wavefront, supports
from elastic_memory.memory import MEMORIES
from tests.conftest import small_model
from tests.model.test_training import assert_same_gradients, gradients

BY_ROW = [name for name, kind in MEMORIES.items() if getattr(kind, "per_row_parameters", False)]


def wave_model(memory, monkeypatch, tokens=32768, **overrides):
    """A model whose layers go together, nothing compiled, and the sizes of the groups that went."""
    model = small_model(memory, **({"memory_layers": None} | overrides)).train()
    for layer in model.model.layers:  # ones at first, which no product would show
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    assert supports(model.model.layers)
    monkeypatch.setattr(wavefront, "TOKENS", tokens)
    groups, wave = [], Wavefront(model.model.layers[0])
    wave.run = lambda *args: (groups.append(len(args[2])), wavefront._run_group(*args))[1]
    wave.add, wave.join = wavefront._add, wavefront._join
    model.model.run_layers = MethodType(wave, model.model)
    return model, groups


def without_wave(model):
    del model.model.run_layers
    return model


@pytest.mark.parametrize("memory", BY_ROW)
@pytest.mark.parametrize(
    ("layers", "blocks", "rows", "tokens", "options"),
    [
        (5, 5, 2, 32768, {}),
        (5, 5, 2, 32, {}),  # pairs only
        (3, 6, 1, 32768, {"first_block": "zeros"}),
        (4, 6, 2, 32768, {"detach_every": 2}),
        (2, 3, 3, 32768, {}),
        (3, 4, 2, 32768, {"silent": True}),
    ],
)
def test_a_wave_is_layer_after_layer(memory, layers, blocks, rows, tokens, options, monkeypatch):
    settings = {"num_hidden_layers": layers, "memory_options": options}
    model, groups = wave_model(memory, monkeypatch, tokens, **settings)
    model.double()
    plain = without_wave(copy.deepcopy(model))
    ids = torch.randint(1, 61, (rows, 8 * blocks), generator=torch.Generator().manual_seed(1))
    assert_same_gradients(gradients(plain, ids), gradients(model, ids), atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=1e-10, rtol=0)
    first = 0 if options.get("first_block") == "zeros" else 1
    assert sum(groups) == 2 * layers * (blocks - first)  # each block of each layer once, trained and evaluated
    assert max(groups) == min(2 if tokens == 32 else layers, blocks - first)


def test_heads_padded_and_under_autocast(monkeypatch):
    """Under autocast as near to float32 as layer after layer."""
    model, groups = wave_model("melodi", monkeypatch, pad_heads=True, num_hidden_layers=4, initializer_range=0.1)
    ids = torch.randint(1, 61, (2, 40), generator=torch.Generator().manual_seed(1))
    found = {}
    for wave, one in ((True, model), (False, without_wave(copy.deepcopy(model)))):
        for narrow in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                found[wave, narrow] = gradients(one, ids)
    assert max(groups) == 4
    for name, exact in found[False, False].items():
        size = exact.norm()
        assert (found[True, False][name] - exact).norm() <= 1e-5 * size, name
        ours, theirs = ((found[wave, True][name] - exact).norm() for wave in (True, False))
        assert theirs <= 0.1 * size, name
        assert ours <= 1.5 * theirs + 0.01 * size, name


@pytest.mark.parametrize("last", [1, 4])
def test_a_pass_that_failed_leaves_nothing_behind(last, monkeypatch):
    model, _ = wave_model("melodi", monkeypatch, num_hidden_layers=3)
    model.double()
    loss = model(ids := torch.ones(1, 40, dtype=torch.long), labels=ids).loss
    weight = model.model.layers[1].mlp.up_proj.weight
    once = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    calls = []

    def fails(add, sums, gradients):
        add(sums, gradients)
        calls.append(len(sums))
        if len(calls) == last:
            raise MemoryError

    for function in _functions(loss.grad_fn):
        if isinstance(shared := getattr(function, "shared", None), wavefront._Shared):
            shared.accumulate = partial(fails, wavefront._add)
    with pytest.raises(MemoryError):
        torch.autograd.grad(loss, weight, retain_graph=True)
    last = 0
    torch.testing.assert_close(torch.autograd.grad(loss, weight)[0], once, atol=1e-12, rtol=1e-10)


def _functions(function):
    """All that a gradient goes through."""
    found, rest = set(), [function]
    while rest:
        one = rest.pop()
        if one is not None and one not in found:
            found.add(one)
            rest += [before for before, _ in one.next_functions]
    return found


def test_one_graph_may_be_gone_through_again(monkeypatch):
    """Gradients of shared weights are held back until all groups have given theirs; then it begins anew."""
    model, _ = wave_model("melodi", monkeypatch, num_hidden_layers=3)
    model.double()
    loss = model(ids := torch.ones(1, 40, dtype=torch.long), labels=ids).loss
    weight = model.model.layers[1].mlp.up_proj.weight
    once = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    loss.backward(retain_graph=True)
    loss.backward()
    assert once.norm() > 0
    torch.testing.assert_close(weight.grad, 2 * once, atol=1e-12, rtol=1e-10)


class Louder(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _hook(model):
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)


def _backward_hook(model):
    model.model.layers[1].mlp.register_full_backward_hook(lambda *_: None)


class PlusRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return x + super().forward(x)


def _another_norm(model):
    model.model.layers[1].input_layernorm.__class__ = PlusRMSNorm


def _probe(model):
    model.model.layers[2].self_attn.corrupt = lambda key, value: (key, value)


def _wrapped(model):
    attention = model.model.layers[0].self_attn
    attention.q_proj = torch.nn.Sequential(attention.q_proj)


def _of_another_class(model):
    model.model.layers[1].mlp.up_proj.__class__ = Louder


def _another_forward(model):
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: type(mlp).forward(mlp, x)


CHANGES = [_hook, _backward_hook, _another_norm, _probe, _wrapped, _of_another_class, _another_forward]


@pytest.mark.parametrize("change", [*CHANGES, lambda model: model.gradient_checkpointing_enable()])
def test_layers_that_somebody_needs_for_himself_go_one_by_one(change, monkeypatch):
    model, groups = wave_model("melodi", monkeypatch)
    ids = torch.ones(1, 40, dtype=torch.long)
    model(ids)
    assert groups
    groups.clear()
    change(model)
    model(ids, labels=ids).loss.backward()
    assert not groups


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_compiled_while_somebody_needs_its_layers(change):
    model = small_model("melodi", memory_layers=None)
    change(model)
    model.compile_blocks(backend="eager")
    assert "run_layers" not in vars(model.model)


def test_layers_are_those_that_the_model_has_now(monkeypatch):
    model, groups = wave_model("melodi", monkeypatch, num_hidden_layers=4)
    model.double()
    ids = torch.ones(1, 40, dtype=torch.long)
    model.model.layers = model.model.layers[:2]
    with torch.no_grad():
        logits = model(ids).logits
        torch.testing.assert_close(without_wave(model)(ids).logits, logits, atol=1e-10, rtol=0)
    assert max(groups) == 2


@pytest.mark.parametrize("trained", ["all", "memory", "mlp.up_proj", "layers.3.", "none"])
def test_compiled_waves_train_what_is_to_be_trained(trained, monkeypatch):
    """Evaluated too, at several lengths, and by a copy with weights of its own; two layers hand on to two others."""
    monkeypatch.setattr(wavefront, "TOKENS", 32)
    model = small_model("melodi", memory_layers=None, num_hidden_layers=4).double().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained == "all" or trained in name)
    twin = copy.deepcopy(model)
    model.compile_blocks(backend="aot_eager")
    assert "run_layers" in vars(model.model)
    ids = torch.randint(1, 61, (2, 40), generator=torch.Generator().manual_seed(1))
    losses = [one(ids, labels=ids).loss for one in (model, twin)]
    torch.testing.assert_close(*losses, atol=1e-10, rtol=0)
    if trained != "none":
        for loss in losses:
            loss.backward()
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-10, rtol=1e-6)
    if trained == "all":
        again = copy.deepcopy(model)
        with torch.no_grad():
            for one in (again, twin):
                one.model.layers[2].mlp.up_proj.weight.mul_(1.5)
            for length in (24, 40):
                torch.testing.assert_close(again(ids[:, :length]).logits, twin(ids[:, :length]).logits)
    torch._dynamo.reset()


def test_other_lengths_need_no_other_graphs(monkeypatch):
    """And so few that torch does not complain."""
    counters = {}

    def counted(function, **options):
        counters[function.__name__] = counter = CompileCounterWithBackend("aot_eager")
        return torch.compile(function, backend=counter, dynamic=False, fullgraph=True)

    monkeypatch.setattr(wavefront, "TOKENS", 32)
    monkeypatch.setattr(wavefront, "compiled", counted)
    model = small_model("melodi", memory_layers=None, num_hidden_layers=8).train()
    model.model.run_layers = MethodType(Wavefront(model.model.layers[0]), model.model)
    found = []
    for blocks in (8, 5, 11):
        ids = torch.ones(1, 8 * blocks, dtype=torch.long)
        model(ids, labels=ids).loss.backward()
        found.append({name: counter.frame_count for name, counter in counters.items()})
    assert found[0] == found[1] == found[2] == {"_run_group": 3, "_add": 3, "_join": 4}
    torch._dynamo.reset()


@pytest.mark.parametrize(("rows", "length", "tokens"), [(1, 37, 32768), (1, 16, 32768), (3, 40, 32), (0, 40, 32768)])
def test_nothing_to_gain(rows, length, tokens, monkeypatch):
    """A last block that is short, too few of them, so many rows that a layer keeps a GPU busy by itself; no rows."""
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
    assert "run_layers" not in vars(model.model)


@pytest.mark.parametrize("many", [1, 2, 3, 4, 6, 12])
def test_pieces_are_all_of_them_in_order(many):
    for count in range(14):
        pieces = list(wavefront._pieces(list(range(count)), many))
        assert [*chain(*pieces)] == list(range(count))
        assert all(len(piece) in (1, 2, 4, 8, many) and len(piece) <= many for piece in pieces)


@pytest.mark.parametrize("layers", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("blocks", [range(1, 3), range(5), range(1, 16)])
@pytest.mark.parametrize("many", [1, 2, 4, 6, 12])
def test_a_schedule_takes_every_block_through_every_layer_when_it_may(layers, blocks, many):
    done, sizes = set(), []
    for turns in wavefront._schedule(layers, blocks, many):
        sizes.append(len(turns))
        assert list(turns) == [*range(min(turns), max(turns) + 1)]  # neighbours, as they take slices of the weights
        for layer, block in turns.items():
            assert layer == 0 or (layer - 1, block) in done
            assert block == blocks[0] or (layer, block - 1) in done
        assert not done & set(turns.items())
        done |= set(turns.items())
    assert len(done) == layers * len(blocks) and max(sizes) <= many
    if layers % many == 0 and len(blocks) >= many:  # full but for its beginning and end
        assert sizes == [*range(1, many), *[many] * (layers // many * len(blocks) + 1 - many), *range(many - 1, 0, -1)]


def test_groups_are_about_as_large(monkeypatch):
    monkeypatch.setattr(wavefront, "TOKENS", 48)
    assert [wavefront.group_size(layers, 8) for layers in (2, 6, 7, 12, 16, 18)] == [2, 6, 4, 6, 6, 6]
    assert wavefront.group_size(12, 1000) == 1
