"""Memories that start silent: without effect until they are trained, then blended in by each head."""

import json
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import elastic_memory as em
from elastic_memory.memory import MEMORIES, Geometry, Memory
from elastic_memory.memory.counts import gates
from elastic_memory.model.attach import FAMILIES
from elastic_memory.model.decoder_layer import MemoryAttention
from elastic_memory.report.attention_view import views
from elastic_memory.streaming.fingerprint import fingerprint
from elastic_memory.training.trainer import parameter_groups
from tests.memory.cases import BLOCK, CASES, REMEMBERING, fresh, logits, memory_of, small, tokens, with_blends
from tests.model.test_families import tiny

PLAIN = [case for case in REMEMBERING if "silent" not in CASES[case][1]]
# A family differs in its projections, before any memory: one memory in the softmax, one outside, one of summary tokens.
KINDS = ("elastic", "infini", "melodi")
CLOSE = dict(atol=2e-4, rtol=0)


def attached(case, family="llama", **settings):
    """A model of a family with the memory of `case`."""
    memory, options = CASES[case]
    return em.attach_memory(pretrained(family), memory=memory, block_size=BLOCK, **(options | settings))


def pretrained(family):
    """A random model; Gemma's norms multiply by 1 + weight."""
    model = tiny(family)
    for parameter in model.parameters() if family == "gemma" else ():
        if parameter.ndim == 1:
            parameter.data -= 1
    return model


@cache
def audible(case):
    """A model with blends that tests share and must not change."""
    return fresh(case, memory_options={"silent": True})


def in_pieces(model, ids, sizes):
    cache = em.MemoryCache(model)
    return torch.cat([logits(model, piece, past_key_values=cache) for piece in ids.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize("local", ["block", "sliding"])
@pytest.mark.parametrize("case, family", [*((case, "llama") for case in PLAIN), *product(KINDS, FAMILIES)])
def test_attached_memories_are_silent_until_they_are_trained(case, family, local):
    if local == "sliding" and memory_of(small(case)).no_sliding:
        pytest.skip("undefined")
    model, ids = attached(case, family, local_attention=local), tokens()
    if CASES[case][1].get("memory_norm") == "qk" or memory_of(model).widens:
        pytest.skip("it changes what the block does without memory")
    without = em.attach_memory(pretrained(family), memory="none", block_size=BLOCK, local_attention=local)
    torch.testing.assert_close(logits(model, ids), logits(without, ids), atol=1e-5, rtol=0)
    torch.testing.assert_close(in_pieces(model, ids, [13, 3, 29]), logits(without, ids), atol=1e-5, rtol=0)
    assert sum(line["extra_parameters"] for line in model.memory_report()) >= 4 * len(model.memories)


@pytest.mark.parametrize("case", PLAIN)
def test_silence_does_not_depend_on_scores(case):
    """Pretrained models may give memory's columns scores far above the block's, whatever small weight they had."""
    model = attached(case)
    without = em.attach_memory(pretrained("llama"), memory="none", block_size=BLOCK)
    if CASES[case][1].get("memory_norm") == "qk":
        pytest.skip("it changes what the block does without memory")
    for one in (model, without):
        for layer in one.model.layers:
            layer.self_attn.q_proj.weight.data *= 50
            layer.self_attn.k_proj.weight.data *= 50
    ids = tokens()
    torch.testing.assert_close(logits(model, ids), logits(without, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", PLAIN)
def test_the_first_step_makes_it_heard(case):
    model, ids = attached(case).train(), tokens()
    before = logits(model, ids)
    model(ids, labels=ids).loss.backward()
    blends = {index: memory.blend for index, memory in model.memories.items()}
    for blend in blends.values():
        assert 1e-6 < blend.grad.abs().max() < 1e3
    torch.optim.Adam(blends.values(), lr=1e-2).step()
    assert all(blend.detach().abs() == pytest.approx(1e-2, rel=1e-3) for blend in blends.values())
    assert (logits(model, ids) - before).abs().max() > 1e-4


@pytest.mark.parametrize("case", ["elastic", "infini"])
def test_the_gradient_at_zero_is_that_of_differences(case):
    """A step to either side of zero: a blend may become negative."""
    model, ids, step = attached(case).double(), tokens(), 1e-2

    def loss():
        return torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    loss().backward()
    blend = memory_of(model).blend
    found = []
    with torch.no_grad():
        for head in range(len(blend)):
            losses = []
            for value in (step, -step):
                blend[head] = value
                losses.append(loss())
            blend[head] = 0
            found.append((losses[0] - losses[1]) / (2 * step))
    torch.testing.assert_close(torch.stack(found).to(blend), blend.grad, atol=2e-5, rtol=1e-2)  # norms are in float32


@pytest.mark.parametrize("case", PLAIN)
def test_a_blend_of_one_is_a_memory_without_blend(case):
    model, ids = fresh(case, memory_options={"silent": True}), tokens()
    for memory in model.memories.values():
        torch.nn.init.ones_(memory.blend)
    torch.testing.assert_close(logits(model, ids), logits(small(case), ids), atol=2e-5, rtol=0)


@pytest.mark.parametrize("case", PLAIN)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), lengths=st.lists(st.integers(1, 40), min_size=2))
@settings(max_examples=5)
def test_streams_hear_it_as_whole_samples_do(case, sizes, lengths):
    model, ids = audible(case), tokens(2, sum(sizes))
    torch.testing.assert_close(in_pieces(model, ids, sizes), logits(model, ids), **CLOSE)
    rows = tokens(len(lengths := lengths[:3]), max(lengths))
    mask = torch.tensor([[column < length for column in range(max(lengths))] for length in lengths]).long()
    padded = logits(model, rows, attention_mask=mask, past_key_values=em.MemoryCache(model))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(padded[row, :length], logits(model, rows[row : row + 1, :length])[0], **CLOSE)


@pytest.mark.parametrize("case", PLAIN)
def test_a_static_cache_hears_it_too(case):
    model, ids = audible(case), tokens(2, 3 * BLOCK + 3)
    stream = em.MemoryCache(model, static=True)
    pieces = ids.split([BLOCK + 3] + [1] * 2 * BLOCK, dim=1)
    decoded = [logits(model, piece, past_key_values=stream) for piece in pieces]
    torch.testing.assert_close(torch.cat(decoded, dim=1), logits(model, ids), **CLOSE)


class Columns(Memory):
    """Only says how its columns are scored."""

    shares_softmax = True


@given(
    dim=st.integers(1, 20), queries=st.integers(1, 9), columns=st.integers(1, 9), kind=st.sampled_from("brs"),
    rows=st.booleans(), causal=st.booleans(),
)  # fmt: skip
@settings(max_examples=40)
def test_scores_are_as_if_they_were_written_out(dim, queries, columns, kind, rows, causal):
    """Against explicit scores in float64, gradients too: with a blend, raw queries, added scores."""
    generator = torch.Generator().manual_seed(dim)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()  # noqa: E731
    rotated, raw, key, value = draw(2, 4, queries, dim), draw(2, 4, queries, dim), *draw(2, 2, 2, 18, dim)
    key, value = (x[:, :, : queries + columns] for x in (key, value))
    blend, score = draw(2, 4) if rows else draw(4), draw(2, 1, columns, 1)
    memory = Columns(Geometry(8, 4, 2, dim, 1, 8))
    memory.blend = torch.nn.Parameter(blend) if kind != "s" else None
    memory.raw_queries, memory.adds_score = kind == "r", kind in "rs"
    host = torch.nn.Module()
    host.head_dim, host.scaling = dim, 0.3
    attention = MemoryAttention(host, memory)
    visible = torch.ones(queries, queries + columns, dtype=torch.bool).tril(columns)
    reading = (key[:, :, :columns], value[:, :, :columns], score)
    found = attention.attend(rotated, key, value, None if causal else visible, reading, raw)

    known, own = key.repeat_interleave(2, dim=1).split((columns, queries), dim=2)
    remembered = (raw if kind == "r" else rotated) @ known.mT * 0.3
    if memory.adds_score:
        remembered = remembered + score.mT
    scores = torch.cat((remembered, rotated @ own.mT * 0.3), dim=3).masked_fill(~visible, -torch.inf)
    values = value.repeat_interleave(2, dim=1)
    exact = scores.softmax(-1) @ values
    if memory.blend is not None:
        local = scores[..., columns:].softmax(-1) @ values[:, :, columns:]
        exact = local + memory.blend[..., None, None] * (exact - local)
    torch.testing.assert_close(found, exact)
    weight = torch.randn(exact.shape, generator=generator, dtype=torch.float64)
    inputs = [rotated, key, value, *([memory.blend] if memory.blend is not None else [])]
    ours, theirs = (torch.autograd.grad((x * weight).sum(), inputs, retain_graph=True) for x in (found, exact))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


# -- saved and loaded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PLAIN)
def test_trained_blends_are_saved_and_restored(case, tmp_path):
    model, ids = with_blends(attached(case)), tokens()
    model.save_pretrained(tmp_path / "model")
    loaded = em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    cache = em.MemoryCache(model)
    logits(model, ids, past_key_values=cache)
    cache.save(tmp_path / "memory")
    assert fingerprint(loaded) == fingerprint(model)
    again = em.MemoryCache.load(tmp_path / "memory", loaded)
    more = tokens(2, 20, 5)
    torch.testing.assert_close(
        logits(loaded, more, past_key_values=again), logits(model, more, past_key_values=cache), **CLOSE
    )
    with pytest.raises(ValueError, match="saved with blends"):
        em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), silent=False)


def test_models_saved_without_blends_stay_without(tmp_path):
    model = attached("elastic", silent=False)
    model.save_pretrained(tmp_path)
    assert "silent" not in json.loads((tmp_path / "config.json").read_text())["elastic_memory"]["memory_options"]
    loaded = em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert memory_of(loaded).blend is None and torch.equal(logits(loaded, tokens()), logits(model, tokens()))
    with pytest.raises(ValueError, match="saved without blends"):
        em.attach_memory(AutoModelForCausalLM.from_pretrained(tmp_path), silent=True)


def test_a_model_of_ours_keeps_its_blends(tmp_path):
    model = fresh("elastic", memory_options={"silent": True})
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(em.MemoryLlamaForCausalLM.from_pretrained(tmp_path), tokens()), logits(model, tokens()))
    small("elastic").save_pretrained(tmp_path / "plain")
    silenced = em.MemoryLlamaForCausalLM.from_pretrained(tmp_path / "plain", memory_options={"silent": True})
    assert memory_of(silenced).blend.tolist() == [0.0] * 4, "a blend that no file has starts at zero"


# -- what is said of blends --------------------------------------------------------------------------------------------


def test_blends_are_counted_shown_and_trained_as_gates_are():
    from elastic_memory.training.recipe import Recipe

    model = fresh("elastic", memory_options={"silent": True})
    assert model.memory_report()[0]["extra_parameters"] == 4
    assert gates(memory_of(model))["blend"].tolist() == pytest.approx([-0.5, 1 / 6, 5 / 6, 1.5])
    recipe = Recipe.model_construct(training=type("", (), dict(learning_rate=1.0, weight_decay=0.1, gate_lr_scale=7)))
    (group,) = [group for group in parameter_groups(model, recipe) if memory_of(model).blend in set(group["params"])]
    assert group["weight_decay"] == 0 and group["lr"] == 7


def test_the_explorer_shows_what_is_heard():
    model = fresh("elastic", memory_options={"silent": True})
    torch.nn.init.constant_(memory_of(model).blend, 1e-6)
    (layer,) = views(model, tokens(1)[0], BLOCK)
    assert 0 < max(layer.shares) < 1e-3


def test_bad_input():
    for call, message in [
        (lambda: fresh("none", memory_options={"silent": True}), "silent=True has no effect"),
        (lambda: fresh("elastic", memory_options={"silent": "yes"}), "give True or False"),
        (lambda: fresh("elastic", memory_options={"silen": True}), "did you mean 'silent'"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("name", MEMORIES)
def test_memories_of_our_own_models_have_no_blend_unless_asked(name):
    assert not any(name.endswith("memory.blend") for name, _ in small(name).named_parameters())


@pytest.mark.parametrize("case", ["elastic", "melodi", "memorizing"])
def test_compiled_it_computes_the_same(case):
    torch._dynamo.reset()
    model = fresh(case, num_hidden_layers=1, memory_options={"silent": True}).train()
    ids = tokens(2, 3 * BLOCK - 2)
    loss = model(ids, labels=ids).loss
    (exact,) = torch.autograd.grad(loss, [memory_of(model).blend])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, labels=ids).loss
    (found,) = torch.autograd.grad(compiled, [memory_of(model).blend])
    torch.testing.assert_close(compiled, loss)
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # whose norms leave queries in float32
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_silent_and_learns(dtype, family):
    model, ids = attached("elastic", family).train(), tokens()
    model(ids, labels=ids).loss.backward()
    exact, blend = memory_of(model).blend.grad.clone(), memory_of(model).blend
    blend.grad = None
    with torch.autocast("cpu", dtype):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert (blend.grad - exact).norm() < 0.25 * exact.norm()
