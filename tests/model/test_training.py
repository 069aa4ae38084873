"""Training: causality, gradients, compilation, checkpointing, loss."""

import copy
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig, LlamaForCausalLM

import elastic_memory as em
from elastic_memory.fast import compiled as compilation
from elastic_memory.memory import MEMORIES, ParallelMemory
from elastic_memory.model import loss, modeling
from tests.conftest import small_model


def one_layer(memory):
    """With memory in its first layer, so that compilers have little to read; a second where layers run together."""
    layers = 1 if issubclass(MEMORIES[memory], ParallelMemory) else 2
    return small_model(memory, num_hidden_layers=layers, memory_layers=[0])


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_gradients(first, second, atol=1e-5):
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("place", [0, 7, 8, 20, 44])
@pytest.mark.parametrize("local", ["block", "sliding"])
def test_the_past_does_not_know_the_future(place, local, ids):
    model = small_model(local_attention=local)
    changed = ids.clone()
    changed[:, place:] = (changed[:, place:] + 1) % 61
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    assert torch.equal(before[:, :place], after[:, :place])
    assert not torch.equal(before[:, place:], after[:, place:])


def test_block_0_reaches_the_last_block(model, ids):
    changed = ids.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 61
    with torch.no_grad():
        assert not torch.equal(model(ids).logits[:, 40:], model(changed).logits[:, 40:])
        none = small_model("none")
        assert torch.equal(none(ids).logits[:, 40:], none(changed).logits[:, 40:])


def plain(model, names):
    return {name: parameter for name, parameter in model.named_parameters() if name in names}


@pytest.mark.parametrize("memory", [*MEMORIES, "full"])
def test_models_of_one_seed_start_alike_and_are_one_function_in_block_0(memory, ids):
    """What later differs in block 0 comes from training with another mechanism, not from another start."""
    none = small_model("none", initializer_range=0.15)
    options = dict(local_attention="full") if memory == "full" else {}
    model = small_model("none" if memory == "full" else memory, initializer_range=0.15, **options)
    shared = dict(none.named_parameters())
    assert all(torch.equal(shared[name], weight) for name, weight in plain(model, shared).items())
    assert len(plain(model, shared)) == len(shared)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[:, :8], none(ids).logits[:, :8], atol=1e-5, rtol=0)
    for one in (none, model):
        one(ids[:, :8], labels=ids[:, :8]).loss.backward()
    assert_same_gradients(
        {name: weight.grad for name, weight in shared.items()},
        {name: weight.grad for name, weight in plain(model, shared).items()},
    )


def test_full_attention_is_llama(ids):
    model = small_model("none", local_attention="full", initializer_range=0.15)
    llama = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "model_type": "llama"}))
    llama.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(ids).logits, llama(ids).logits, atol=1e-5, rtol=0)
    assert_same_gradients(gradients(model, ids), gradients(llama, ids))


@pytest.mark.parametrize("order", [4, 11, 30])
@pytest.mark.parametrize("length", [16, 17, 45])
def test_direct_and_recurrent_algorithms_agree(order, length, ids):
    ids = ids[:, :length]
    direct, recurrent = (
        small_model(memory_order=order, memory_options={"algorithm": r}) for r in ("direct", "recurrent")
    )
    torch.testing.assert_close(direct(ids).logits, recurrent(ids).logits, atol=1e-4, rtol=0)
    assert_same_gradients(gradients(direct, ids), gradients(recurrent, ids))


def test_gradients_flow_through_memory_to_all_earlier_blocks(model, ids):
    """d(loss in the last block) / d(embedding of every earlier token), against finite differences at some."""
    model = model.double()
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    target = lambda e: model(inputs_embeds=e).logits[:, 40:].square().mean()  # noqa: E731
    (gradient,) = torch.autograd.grad(target(embeds), embeds)
    assert (gradient[:, :40].abs().amax(-1) > 0).all()
    for place in (0, 13, 39):
        nudge = torch.zeros_like(embeds)
        nudge[0, place] = torch.randn(embeds.shape[-1], dtype=torch.float64) * 1e-3
        with torch.no_grad():
            difference = (target(embeds + nudge) - target(embeds - nudge)) / 2
        torch.testing.assert_close((gradient * nudge).sum(), difference, rtol=2e-2, atol=1e-9)


@pytest.mark.parametrize("algorithm", ["direct", "recurrent"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_detach_every_cuts(algorithm, every, ids):
    """The gradient of block i's loss reaches back to the last cut and no further, and outputs do not change."""
    model = small_model(memory_options={"algorithm": algorithm, "detach_every": every})
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, small_model()(ids).logits, atol=1e-4, rtol=0)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    for block in range(6):
        last = model(inputs_embeds=embeds).logits[:, 8 * block : 8 * block + 8].square().mean()
        (gradient,) = torch.autograd.grad(last, embeds)
        cut = 8 * (block // every * every)
        assert (gradient[:, :cut] == 0).all()
        assert (gradient[:, cut : 8 * block].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("local", ["block", "sliding"])
def test_compiled_is_eager_without_graph_breaks(local, ids):
    model = small_model(local_attention=local, num_hidden_layers=2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = ids[:, :29]
    plain = gradients(model, ids)
    for length in (29, 12, 8):  # each a graph of its own, also where dynamo would rather have a dynamic one
        torch.testing.assert_close(compiled(ids[:, :length]).logits, model(ids[:, :length]).logits, atol=1e-5, rtol=0)
    model.zero_grad()
    compiled(ids, labels=ids).loss.backward()
    assert_same_gradients(plain, {name: parameter.grad for name, parameter in model.named_parameters()})
    torch._dynamo.reset()


@pytest.mark.parametrize("memory", MEMORIES)
@torch.no_grad()
def test_compiled_for_dynamic_shapes(memory, ids):
    """One graph for each length, on whose number of blocks it depends, and no breaks; any number of rows."""
    model, counter = one_layer(memory), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    for rows, length in ((2, 29), (2, 12), (1, 29)):
        given = ids[:rows, :length]
        torch.testing.assert_close(compiled(given).logits, model(given).logits, atol=1e-5, rtol=0)
    assert counter.frame_count <= 3
    torch._dynamo.reset()


def test_a_compiled_model_streams(model, ids, tmp_path):
    compiled = torch.compile(model, backend="eager")
    cache = em.MemoryCache(compiled)
    with torch.no_grad():
        logits = [compiled(piece, past_key_values=cache).logits for piece in ids.split([5, 20, 1, 19], dim=1)]
        torch.testing.assert_close(torch.cat(logits, dim=1), model(ids).logits, atol=1e-4, rtol=0)
    cache.save(tmp_path / "memory")
    assert em.MemoryCache.load(tmp_path / "memory", model).clock == [45, 45]
    torch._dynamo.reset()


@pytest.mark.parametrize("memory", ["elastic", "melodi"])  # all blocks at once, and one after the other
def test_compiled_blocks_are_eager(memory, ids):
    """With gradient checkpointing, and in a copy of the model, which has weights of its own."""
    model = small_model(memory).train()
    plain = gradients(model, ids)
    model.compile_blocks(backend="aot_eager")
    assert_same_gradients(plain, gradients(model, ids))
    model.gradient_checkpointing_enable()
    assert_same_gradients(plain, gradients(model, ids))

    twin, fresh = copy.deepcopy(model), small_model(memory).train()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.1)
    fresh.load_state_dict(twin.state_dict())
    assert_same_gradients(gradients(fresh, ids), gradients(twin, ids))
    torch._dynamo.reset()


@pytest.mark.parametrize("memory", MEMORIES)
@torch.no_grad()
def test_compiled_evaluation_of_any_number_of_blocks(memory, ids):
    """Block 0 alone, with one that reads it, and with several."""
    model, counts = one_layer(memory), (1, 2, 5)
    expected = [model(ids[:, : 8 * blocks]).logits for blocks in counts]
    model.compile_blocks(backend="eager")
    for blocks, logits in zip(counts, expected, strict=True):
        torch.testing.assert_close(model(ids[:, : 8 * blocks]).logits, logits, atol=1e-5, rtol=0)
        torch._dynamo.reset()


@torch.no_grad()
@torch._dynamo.config.patch(recompile_limit=8)  # torch's own, which transformers raises here and there
def test_compiled_for_any_number_of_lengths(ids, monkeypatch):
    """Each is compiled, also where torch would stop; beyond our own limit they run as they are."""
    monkeypatch.setattr(compilation, "GRAPHS", 12)
    model = small_model()
    expected = [model(ids[:, :length]).logits for length in range(1, 17)]
    model.compile_blocks(backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length, logits in enumerate(expected, 1):
            torch.testing.assert_close(model(ids[:, :length]).logits, logits, atol=1e-5, rtol=0)
    said = [str(one.message) for one in caught if "uncompiled" in str(one.message)]
    assert said and all("fewer different batch sizes and lengths" in words for words in said)
    torch._dynamo.reset()


def test_checkpointed_is_plain(model, ids):
    plain = gradients(model.train(), ids)
    model.gradient_checkpointing_enable()
    assert_same_gradients(plain, gradients(model, ids))


def test_loss_in_pieces_is_the_loss(model, ids, monkeypatch):
    """Pieces, the whole, and transformers' own definition."""
    labels = ids.clone()
    labels[:, 5:9] = -100
    expected = torch.nn.functional.cross_entropy(
        model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    whole = gradients(model, ids)
    torch.testing.assert_close(model(ids, labels=labels).loss, expected)
    monkeypatch.setattr(loss, "PIECE", 7)
    torch.testing.assert_close(model(ids, labels=labels).loss, expected)
    assert_same_gradients(whole, gradients(model, ids))
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=10).loss, expected * (2 * 40) / 10)


def test_long_training_calls_make_no_logits(model, ids, monkeypatch):
    monkeypatch.setattr(modeling, "LOGITS_AT_MOST", 50)
    assert torch.equal(model(ids, labels=ids).logits, model(ids).logits)  # in evaluation they are what is predicted
    model.train()
    assert model(ids, labels=ids).logits is None
    assert model(ids, labels=ids, logits_to_keep=3).logits.shape == (2, 3, 61)
    assert model(ids[:, :20], labels=ids[:, :20]).logits.shape == (2, 20, 61)


@pytest.mark.parametrize("left", [True, False])
def test_padding_does_not_change_the_loss(left, model, ids):
    """What only padding could predict is not counted."""
    mask, labels = torch.ones_like(ids), ids.clone()
    padding = slice(0, 9) if left else slice(36, 45)
    mask[1, padding], labels[1, padding] = 0, -100
    real = ids[1:, 9:] if left else ids[1:, :36]
    rows = [(ids[:1], 44), (real, 35)]
    expected = sum(model(row, labels=row).loss * count for row, count in rows) / 79
    torch.testing.assert_close(model(ids, attention_mask=mask, labels=labels).loss, expected)


def test_low_precision_is_close(ids):
    """bf16 operands by both algorithms, float32 state: the error is that of bf16 activations."""
    for algorithm in ("direct", "recurrent"):
        model = small_model(memory_options={"algorithm": algorithm}, initializer_range=0.1)
        exact = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            low = model(ids).logits
        assert (low.float() - exact).norm() / exact.norm() < 2e-2, algorithm


def test_tuples_for_those_who_want_them(model, ids):
    loss, logits = model(ids, labels=ids, return_dict=False)
    torch.testing.assert_close(loss, model(ids, labels=ids).loss)
    torch.testing.assert_close(logits, model(ids).logits)
    hidden, cache = model.model(ids, return_dict=False)
    assert isinstance(cache, em.MemoryCache)
    torch.testing.assert_close(model.lm_head(hidden), logits)


def test_hidden_states(model, ids):
    outputs = model(ids, output_hidden_states=True)
    assert len(outputs.hidden_states) == 4
    torch.testing.assert_close(model.lm_head(outputs.hidden_states[-1]), outputs.logits)


def test_jaxtyping_free_import():
    """The package imports with torch, transformers, numpy and safetensors alone."""
    import subprocess
    import sys

    blocked = [
        "jaxtyping",
        "beartype",
        "typer",
        "rich",
        "yaml",
        "pyarrow",
        "matplotlib",
        "accelerate",
        "datasets",
        "scipy",
    ]
    code = (
        "import sys\n"
        f"blocked = {blocked!r}\n"
        "class Block:\n"
        "    def find_spec(self, name, *_):\n"
        "        frame = sys._getframe(1)\n"
        "        while frame and 'importlib' in frame.f_code.co_filename: frame = frame.f_back\n"
        "        ours = frame and 'elastic_memory' in frame.f_code.co_filename\n"
        "        if ours and name.split('.')[0] in blocked: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import elastic_memory as em\n"
        "em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset('tiny'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_residual_stream_follows_autocast(ids):
    """bf16 under bf16; float32 if asked for, and under float16, whose range is too small."""
    for wide, dtype, expected in (
        (False, torch.bfloat16, torch.bfloat16),
        (True, torch.bfloat16, torch.float32),
        (False, torch.float16, torch.float32),
    ):
        model = small_model(residual_in_fp32=wide)
        with torch.no_grad(), torch.autocast("cpu", dtype):
            states = model.model(ids, output_hidden_states=True).hidden_states
        assert {state.dtype for state in states[:-1]} == {expected}


def test_shapes_without_numbers():
    """On the meta device, as planners and counters of operations use it."""
    with torch.device("meta"):
        model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny", memory="none"))
        assert model(torch.zeros(1, 100, dtype=torch.long)).logits.shape == (1, 100, model.config.vocab_size)
