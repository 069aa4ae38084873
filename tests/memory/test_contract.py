"""What every memory promises, tested on all that are registered; a new one is tested by being listed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import elastic_memory as em
from elastic_memory.memory import MEMORIES, Memory
from tests.memory.cases import BLOCK, CASES, DEFAULTS, REMEMBERING, SMALL, fresh, logits, memory_of, small, tokens

CLOSE = dict(atol=2e-5, rtol=0)  # logits are of the size of 1, and so is what memory does to them
splits = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def in_pieces(model, ids, sizes, cache=None):
    cache = em.MemoryCache(model) if cache is None else cache
    return torch.cat([logits(model, piece, past_key_values=cache) for piece in ids.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize("case", CASES)
@given(sizes=splits, seed=st.integers(0, 3))
@settings(max_examples=6)
def test_streaming_in_any_split_equals_one_call(case, sizes, seed):
    model, ids = small(case), tokens(2, sum(sizes), seed)
    torch.testing.assert_close(in_pieces(model, ids, sizes), logits(model, ids), **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_a_static_cache_decodes_the_same(case):
    """Token by token on buffers that never move, across the ends of blocks."""
    model, ids = small(case), tokens(2, 3 * BLOCK + 3)
    sizes = [BLOCK + 3] + [1] * (2 * BLOCK)
    decoded = in_pieces(model, ids, sizes, em.MemoryCache(model, static=True))
    torch.testing.assert_close(decoded, logits(model, ids), **CLOSE)


@pytest.mark.parametrize("case", DEFAULTS)
def test_streaming_and_one_call_are_probed_alike(case):
    """`corrupt` disturbs attention inside the block, and never what is written."""
    model, ids = fresh(case), tokens()
    for layer in model.model.layers:
        layer.self_attn.corrupt = lambda key, value: (key * 0.7, value.flip(-1))
    probed = logits(model, ids)
    torch.testing.assert_close(in_pieces(model, ids, [13, 20, 12]), probed, **CLOSE)
    assert (probed - logits(small(case), ids)).abs().max() > 0.1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("first", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 3, 5 * BLOCK])
def test_no_token_sees_the_future(case, first):
    model, ids = small(case), tokens()
    changed = ids.clone()
    changed[:, first:] = (changed[:, first:] + 7) % 61
    before, after = logits(model, ids), logits(model, changed)
    assert torch.equal(before[:, :first], after[:, :first])
    assert not torch.equal(before[:, first], after[:, first])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", [None, 3, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_a_memory_reaches_as_far_as_it_says(case, order):
    """One layer, so that nothing travels by other ways: does block 0 change block 2, and what lies beyond reach?"""
    if order is not None and not MEMORIES[CASES[case][0]].has_option("order"):
        pytest.skip("its size is not a setting")
    model = fresh(case, num_hidden_layers=1, **({} if order is None else {"memory_order": order}))
    reach = memory_of(model).reach if model.memories else 0
    ids, start = tokens(), 2 * BLOCK

    def changes(until):
        altered = ids.clone()
        altered[:, :until] = (altered[:, :until] + 7) % 61
        return not torch.equal(
            logits(model, altered)[:, start : start + BLOCK], logits(model, ids)[:, start:][:, :BLOCK]
        )

    beyond = start if reach is None else max(start - reach, 0)
    assert changes(BLOCK) == (reach is None or reach > BLOCK)
    if reach is not None:
        assert not changes(beyond)
        assert reach == 0 or changes(beyond + 1)


@pytest.mark.parametrize("case", CASES)
def test_rows_do_not_meet_and_samples_leave_nothing_behind(case):
    model, ids = small(case), tokens(3)
    together = logits(model, ids)
    for row in range(3):
        torch.testing.assert_close(logits(model, ids[row : row + 1]), together[row : row + 1], **CLOSE)
    assert torch.equal(logits(model, ids), together)
    cache = em.MemoryCache(model)
    first = in_pieces(model, ids, 11, cache)
    cache.reset()
    assert torch.equal(in_pieces(model, ids, 11, cache), first)


@pytest.mark.parametrize("case", CASES)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=3), left=st.booleans(), more=splits)
@settings(max_examples=6)
def test_padded_rows_are_single_rows(case, lengths, left, more):
    """Each row keeps a clock of its own: padded without a cache, with one, and in what follows."""
    model, longest, more = small(case), max(lengths), more[:3]
    ids, following = tokens(len(lengths), longest), tokens(len(lengths), sum(more), 7)
    mask = torch.zeros_like(ids)
    where = [slice(longest - n, longest) if left else slice(0, n) for n in lengths]
    for row, columns in enumerate(where):
        mask[row, columns] = 1
    cache = em.MemoryCache(model)
    plain, streamed = (
        logits(model, ids, attention_mask=mask),
        logits(model, ids, attention_mask=mask, past_key_values=cache),
    )
    later = in_pieces(model, following, more, cache)
    for row, columns in enumerate(where):
        alone = logits(model, torch.cat((ids[row, columns], following[row]))[None])[0]
        torch.testing.assert_close(plain[row, columns], alone[: lengths[row]], **CLOSE)
        torch.testing.assert_close(streamed[row, columns], alone[: lengths[row]], **CLOSE)
        torch.testing.assert_close(later[row], alone[lengths[row] :], **CLOSE)


@pytest.mark.parametrize("case", DEFAULTS)
def test_generation_with_a_cache_is_generation_without(case):
    model, ids = small(case), tokens(2, 13)
    slow = ids
    for _ in range(2 * BLOCK):
        slow = torch.cat((slow, logits(model, slow)[:, -1:].argmax(-1)), dim=1)
    settings = dict(max_new_tokens=2 * BLOCK, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(model.generate(ids, **settings), slow)


@pytest.mark.parametrize("case", CASES)
def test_a_saved_model_and_a_saved_cache_go_on_as_before(case, tmp_path):
    model, ids, more = small(case), tokens(2, 29), tokens(2, 20, 5)
    model.save_pretrained(tmp_path)
    again = em.MemoryLlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.memory_options == model.config.memory_options
    assert torch.equal(logits(again, ids), logits(model, ids))

    cache = em.MemoryCache(model)
    logits(model, ids, past_key_values=cache)
    for exact in (False, True):
        cache.save(tmp_path / "book.safetensors", exact=exact)
        loaded = em.MemoryCache.load(tmp_path / "book.safetensors", again)
        expected = in_pieces(model, more, 7, cache.fork())
        continued = in_pieces(again, more, 7, loaded)
        torch.testing.assert_close(continued, expected, **CLOSE)
        assert not exact or torch.equal(continued, expected)


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_gradient_checkpointing_changes_no_gradient(case):
    model, ids = fresh(case).train(), tokens()
    plain = gradients(model, model(ids, labels=ids).loss)
    model.gradient_checkpointing_enable()
    recomputed = gradients(model, model(ids, labels=ids).loss)
    assert plain.keys() == recomputed.keys() == dict(model.named_parameters()).keys()
    for name, gradient in plain.items():
        assert torch.equal(recomputed[name], gradient), name


@pytest.mark.parametrize("case", DEFAULTS)
def test_compiled_it_computes_the_same(case):
    torch._dynamo.reset()
    model, ids = fresh(case, num_hidden_layers=1).train(), tokens(2, 3 * BLOCK - 2)
    loss = model(ids, labels=ids).loss
    eager = gradients(model, loss)
    compiled = torch.compile(model, backend="aot_eager")(ids, labels=ids).loss
    torch.testing.assert_close(compiled, loss)
    for name, gradient in gradients(model, compiled).items():
        torch.testing.assert_close(gradient, eager[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_report_counts_what_is_there(case):
    model = small(case)
    bare = fresh("none")
    report = model.memory_report()
    added = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in bare.parameters())
    assert sum(line["extra_parameters"] for line in report) == added
    assert [line["layer"] for line in report] == MEMORIES[CASES[case][0]].info.layers(3)
    cache = em.MemoryCache(model)
    logits(model, tokens(1, 3 * BLOCK), past_key_values=cache)
    carried = sum(part.numel() for stream in cache.streams for part in stream.state)
    assert sum(line["carried_floats"] for line in report) == carried
    assert all(part.dtype == torch.float32 for stream in cache.streams for part in stream.state)


@pytest.mark.parametrize("case", REMEMBERING)
@pytest.mark.parametrize("every", [None, 1, 2])
def test_detach_every_cuts_the_graph_there_and_nowhere_else(case, every):
    """Which blocks a loss in block b reaches by its gradient: those since the last cut at or before b."""
    model = fresh(case, memory_options={"detach_every": every})
    embeds = model.get_input_embeddings()(tokens(1, 4 * BLOCK)).detach().requires_grad_()
    for block in range(4):
        hidden = model.model(inputs_embeds=embeds).last_hidden_state[:, block * BLOCK : (block + 1) * BLOCK]
        (gradient,) = torch.autograd.grad(hidden.square().sum(), embeds)
        reached = [bool(part.abs().sum() > 0) for part in gradient.split(BLOCK, dim=1)]
        last_cut = 0 if every is None else block // every * every
        reach = memory_of(model).reach
        nearest = block - 1 if reach is None else (block * BLOCK - reach) // BLOCK
        assert reached[block]
        if block:
            assert reached[block - 1] == (last_cut < block)
        assert not any(reached[:last_cut])
        assert not any(reached[block + 1 :])
        assert all(reached[max(last_cut, min(nearest, block)) : block])


def train(model, ids, steps, rate, bf16=False):
    """Losses of plain AdamW steps on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), eps=1e-7)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("case", DEFAULTS)
def test_it_overfits_a_small_batch(case):
    model = fresh(case, initializer_range=0.02).train()
    losses = train(model, tokens(2, 3 * BLOCK), 60, 1e-2)
    assert losses[0] > 3.5 and min(losses[-10:]) < 0.1


def assert_trains_in_bf16(model, ids, steps):
    """At the paper's rate."""
    losses = train(model.train(), ids, steps, 2e-3, bf16=True)
    assert torch.tensor(losses).isfinite().all() and losses[-1] < losses[0] - 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("case", DEFAULTS)
def test_it_trains_in_bf16(case):
    assert_trains_in_bf16(fresh(case, initializer_range=0.02, num_hidden_layers=1), tokens(2, 4 * BLOCK), steps=80)


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
def test_the_tiny_preset_trains_in_bf16(memory):
    torch.manual_seed(0)
    config = em.MemoryLlamaConfig.preset("tiny", memory=memory)
    ids = torch.randint(0, config.vocab_size, (1, 6 * config.block_size))
    assert_trains_in_bf16(em.MemoryLlamaForCausalLM(config), ids, steps=200)


@pytest.mark.parametrize("name", MEMORIES)
def test_it_can_be_attached_to_a_model_that_exists(name):
    torch.manual_seed(0)
    shape = {key: value for key, value in SMALL.items() if key != "block_size"}
    model = em.attach_memory(LlamaForCausalLM(LlamaConfig(**shape)).eval(), memory=name, block_size=BLOCK)
    assert list(model.memories) == MEMORIES[name].info.layers(3)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    torch.testing.assert_close(in_pieces(model, tokens(), [20, 25]), logits(model, tokens()), **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_sliding_attention_works_or_says_why_not(case):
    reason = memory_of(small(case)).no_sliding if small(case).memories else None
    if reason:
        with pytest.raises(ValueError, match="sliding.*undefined.*" + reason[:20]):
            fresh(case, local_attention="sliding")
        return
    model, ids = fresh(case, local_attention="sliding"), tokens()
    torch.testing.assert_close(in_pieces(model, ids, [3, 17, 25]), logits(model, ids), **CLOSE)
    assert (logits(model, ids) - logits(small(case), ids)).abs().max() > 0.1


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("option", ["combine", "update", "summary_std", "share", "road", "no_such_thing"])
def test_options_of_another_mechanism_are_refused(name, option):
    if MEMORIES[name].has_option(option):
        pytest.skip("its own")
    with pytest.raises(ValueError, match=f"no option '{option}'"):
        fresh(name, memory_options={option: 1})


@pytest.mark.parametrize("name", [name for name, kind in MEMORIES.items() if kind.has_option("order")])
def test_a_memory_of_no_size_is_refused(name):
    for order in (0, -3):
        with pytest.raises(ValueError, match=str(order)):
            fresh(name, memory_order=order)


@pytest.mark.parametrize("name", MEMORIES)
def test_detach_every_must_be_a_number_of_blocks(name):
    with pytest.raises(ValueError, match="detach_every=0"):
        fresh(name, memory_options={"detach_every": 0})


class Prefix(Memory):
    """Somebody's own: learned columns before every block, whatever came before."""

    shares_softmax = True
    reads_start = True
    reach = 0

    def __init__(self, geometry):
        super().__init__(geometry)
        shape = (1, geometry.kv_heads, 3, geometry.head_dim)
        self.key, self.value = (torch.nn.Parameter(torch.randn(shape)) for _ in range(2))

    def start(self, batch, device=None):
        return (torch.zeros(batch, device=device),)

    def read(self, state, seen, host):
        return tuple(part.expand(len(state[0]), -1, -1, -1) for part in (self.key, self.value))

    def write(self, state, block, seen):
        return state


def test_a_memory_of_ones_own_without_a_past():
    model = fresh("none")
    attention = model.model.layers[1].self_attn
    torch.manual_seed(0)
    attention.memory = Prefix(attention.memory.geometry)
    ids = tokens()
    torch.testing.assert_close(in_pieces(model, ids, [13, 20, 12]), logits(model, ids), **CLOSE)
    model(ids, labels=ids).loss.backward()
    assert attention.memory.value.grad.abs().max() > 0


@pytest.mark.parametrize("case", ["infini", "memorizing"])
def test_gradients_of_functions(case):
    """As torch.func has them, of a model without buffers to fill."""
    model, ids = fresh(case).double(), tokens()
    parameters = dict(model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (ids,), {"labels": ids}).loss

    ours = torch.func.grad(loss)({name: p.detach() for name, p in parameters.items()})
    loss(parameters).backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-10, rtol=1e-7)
