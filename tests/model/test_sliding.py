"""Sliding attention: windows of one or several blocks, memory of what is older, queues as wider windows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForCausalLM

import elastic_memory as em
from tests.memory.cases import CASES, DEFAULTS, fresh, logits, memory_of, small, tokens, with_weights_of
from tests.model.test_any_use import Rows, actions
from tests.oracles import parts, sliding

JOINT = dict(combine="joint", positions="full")
# Memories and options that the oracle knows.
KNOWN = [
    ("none", {}),
    ("elastic", {}),
    ("memorizing", JOINT),
    ("memorizing", {}),
    ("memorizing", dict(positions="query")),
    ("memorizing", dict(positions="full")),
    ("recent", {}),
    ("merged", dict(distance=3, slow=0.5)),
    ("recent_merged", dict(rounds=2)),
]
SLIDING = [case for case in CASES if case == "none" or not memory_of(small(case)).no_sliding]
KINDS = [case for case in SLIDING if case in (*DEFAULTS, "memorizing joint full", "infini zero")]
CLOSE = dict(atol=2e-5, rtol=0)
splits = st.lists(st.integers(1, 20), min_size=1, max_size=5)


def sliding_model(case, blocks=1, **overrides):
    size = overrides.setdefault("block_size", 8)
    return fresh(case, local_attention="sliding", window=blocks * size, **overrides)


def in_pieces(model, ids, sizes, cache=None):
    cache = em.MemoryCache(model) if cache is None else cache
    return torch.cat([logits(model, piece, past_key_values=cache) for piece in ids.split(sizes, dim=1)], dim=1)


def compare(model, ours, theirs):
    """Outputs, and the gradients of all weights."""
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    weights = dict(model.named_parameters())
    direction = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(0))
    gradients = [
        torch.autograd.grad((x * direction).sum(), list(weights.values()), materialize_grads=True, allow_unused=True)
        for x in (ours, theirs)
    ]
    for name, mine, other in zip(weights, *gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4 * max(1.0, other.abs().max().item()), rtol=0, msg=name)


@pytest.mark.parametrize("memory, options", KNOWN)
@pytest.mark.parametrize("size, blocks, length", [(8, 1, 29), (4, 3, 29), (3, 2, 5), (5, 4, 40), (1, 3, 9)])
def test_a_model_is_its_equations(memory, options, size, blocks, length):
    """In float64, where what each token sees is listed token by token."""
    order = {} if memory == "none" else {"memory_order": 6}
    model = sliding_model(memory, blocks, block_size=size, num_hidden_layers=2, memory_options=options, **order)
    model = model.double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gate"):
                weight.copy_(torch.linspace(-1, 1, len(weight)))
    ids = tokens(1, length)
    theirs = parts.rms(sliding.hidden(model, model.model.embed_tokens(ids[0]))) * model.model.norm.weight
    compare(model, model.model(ids).last_hidden_state[0], theirs)


@pytest.mark.parametrize("case", SLIDING)
@given(sizes=splits, blocks=st.integers(1, 4), size=st.sampled_from([3, 8]))
@settings(max_examples=4)
def test_streaming_in_any_split_equals_one_call(case, sizes, blocks, size):
    model, ids = sliding_model(case, blocks, block_size=size), tokens(2, sum(sizes))
    torch.testing.assert_close(in_pieces(model, ids, sizes), logits(model, ids), **CLOSE)


@pytest.mark.parametrize("case", KINDS)
@given(actions=actions, static=st.booleans(), seed=st.integers(0, 9), blocks=st.integers(2, 3))
@settings(max_examples=8)
def test_each_row_goes_on_as_if_alone(case, actions, static, seed, blocks):
    """Clocks of their own, files, forks, rollbacks, static caches: all that `test_any_use` does with one block."""
    rows = Rows(sliding_model(case, blocks, block_size=4), static, seed)
    with torch.no_grad():
        for name, number, flag in [*actions, ("read", 3, False)]:
            getattr(rows, name)(number, flag)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("order", [8, 16])
def test_a_queue_is_a_wider_window_in_its_layer(blocks, order):
    """Queues of whole blocks in all layers are what a model without memory computes with a wider window."""
    queue = sliding_model("memorizing", blocks, memory_options=JOINT, memory_order=order, memory_layers=[0, 1, 2])
    none = with_weights_of(sliding_model("none", blocks + order // 8), queue)
    ids = tokens(2, 61)
    torch.testing.assert_close(logits(queue, ids), logits(none, ids), atol=1e-6, rtol=0)
    torch.testing.assert_close(in_pieces(queue, ids, [13, 30, 18]), logits(none, ids), **CLOSE)
    assert not torch.allclose(logits(queue, ids), logits(sliding_model("none", blocks), ids), atol=1e-2)


def test_a_queue_counts_its_tokens_though_they_are_in_the_window():
    """Reports and tables compare memories by their floats."""
    for case in ("memorizing joint full", "recent"):
        block, slides = fresh(case, memory_order=12), sliding_model(case, memory_order=12)
        assert block.memory_report() == slides.memory_report()


@pytest.mark.parametrize("case", KINDS)
def test_generate_goes_on_over_the_ends_of_blocks(case):
    model, ids = sliding_model(case, 2, block_size=4), tokens(2, 10)
    options = dict(max_new_tokens=11, do_sample=False, pad_token_id=0)
    written = model.generate(ids, **options)
    for length in range(10, 21):
        assert torch.equal(logits(model, written[:, :length])[:, -1].argmax(-1), written[:, length])
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), written)


@pytest.mark.parametrize("case", KINDS)
def test_no_token_is_lost_between_window_and_memory(case):
    """One layer: the first token is seen in the window, and by all of the block in which it leaves it."""
    model = sliding_model(case, 3, block_size=4, num_hidden_layers=1)
    layer, ids = model.model.layers[0], tokens(1, 40)
    reach = {"none": 12}.get(case, layer.window if layer.memory.reach == 0 else None)
    altered = ids.clone()
    altered[:, 0] = (altered[:, 0] + 7) % 61
    changed = (logits(model, altered) != logits(model, ids)).any(-1)[0]
    assert changed[:12].all()
    if reach is not None:
        assert not changed[reach:].any() and changed[reach - 1]
    else:
        assert changed[12:16].all()


@pytest.mark.parametrize(
    "case, options, message",
    [
        ("none", dict(window=16), "window=16 with local_attention='block': only 'sliding' has a window"),
        ("none", dict(window=12, local_attention="sliding"), "window=12: give a multiple of block_size=8"),
        ("none", dict(window=4, local_attention="sliding"), "window=4: give a multiple of block_size=8"),
        ("memorizing joint query", dict(local_attention="sliding"), "positions='full' keeps them"),
        (
            "memorizing joint full",
            dict(local_attention="sliding", memory_options=dict(detach_every=2)),
            "gradients detach_memory and detach_every cannot cut",
        ),
        ("recent", dict(local_attention="sliding", memory_options=dict(detach_every=2)), "gradients detach_memory"),
    ],
)
def test_what_has_no_meaning_is_refused(case, options, message):
    with pytest.raises(ValueError, match=message):
        fresh(case, **options)


@pytest.mark.parametrize("blocks", [1, 2])
def test_streaming_and_one_call_are_probed_alike(blocks):
    """`corrupt` disturbs the block itself, not the window before it."""
    model, ids = sliding_model("elastic", blocks), tokens()
    clean = logits(model, ids)
    for layer in model.model.layers:
        layer.self_attn.corrupt = lambda key, value: (key * 0.7, value.flip(-1))
    probed = logits(model, ids)
    torch.testing.assert_close(in_pieces(model, ids, [13, 20, 12]), probed, **CLOSE)
    assert (probed - clean).abs().max() > 0.1


@torch.no_grad()
def test_a_model_with_a_window_of_its_own_keeps_it(tmp_path):
    """Mistral's window in two blocks is what it was; a longer one is refused; it is saved, and forgotten by blocks."""
    shape = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, sliding_window=8, initializer_range=0.15,
    )  # fmt: skip
    model, ids = MistralForCausalLM(MistralConfig(**shape)).eval(), tokens()
    before = model(ids).logits
    settings = dict(memory="none", block_size=4, local_attention="sliding")
    with pytest.raises(ValueError, match=r"window=12 with .* give a window up to 8"):
        em.attach_memory(model, window=12, **settings)
    em.attach_memory(model, window=8, **settings).save_pretrained(tmp_path)
    torch.testing.assert_close(model(ids).logits, before, atol=1e-5, rtol=1e-5)
    load = lambda: MistralForCausalLM.from_pretrained(tmp_path).eval()  # noqa: E731
    assert em.attach_memory(load()).model.layers[0].window == 8
    assert em.attach_memory(load(), local_attention="block").model.layers[0].window is None


def test_joins_over_several_blocks_are_refused():
    model = sliding_model("elastic", 2)
    caches = [em.MemoryCache(model) for _ in range(2)]
    for cache in caches:
        in_pieces(model, tokens(1, 20), 20, cache)
    with pytest.raises(ValueError, match="a window of several blocks"):
        em.MemoryCache.join(caches, approximate=True)


def test_a_file_of_another_window_is_refused(tmp_path):
    model, other = sliding_model("elastic", 2), sliding_model("elastic", 3)
    cache = em.MemoryCache(model)
    in_pieces(model, tokens(1, 30), 30, cache)
    cache.save(tmp_path / "memory")
    with pytest.raises(ValueError, match="window: 16 there, 24 here"):
        em.MemoryCache.load(tmp_path / "memory", other, force=True)
