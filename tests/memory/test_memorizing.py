import pytest
import torch

from tests.memory.cases import BLOCK, fresh, logits, memory_of, tokens, with_weights_of

CLOSE = dict(atol=2e-5, rtol=0)


@pytest.mark.parametrize("length", [7, 3 * BLOCK, 45])
def test_a_queue_as_long_as_the_sample_is_full_attention(length):
    """One softmax over everything, every key at its true distance; in every layer, since full attention is."""
    options = dict(combine="joint", positions="full")
    everywhere = dict(memory_order=64, memory_layers=[0, 1, 2], memory_options=options)
    model = fresh("memorizing", **everywhere)
    full = with_weights_of(fresh("none", seed=3, local_attention="full"), model)
    ids = tokens(2, length)
    torch.testing.assert_close(logits(model, ids), logits(full, ids), **CLOSE)


@pytest.mark.parametrize("positions", ["none", "query", "full"])
def test_closed_gates_are_no_memory(positions):
    model = fresh("memorizing", memory_options={"positions": positions})
    bare = with_weights_of(fresh("none", seed=3), model)
    ids = tokens()
    assert not torch.equal(logits(model, ids), logits(bare, ids))
    torch.nn.init.constant_(memory_of(model).gate, -torch.inf)
    assert torch.equal(logits(model, ids), logits(bare, ids))


@pytest.mark.parametrize("queue", [1, 5, BLOCK, 13])
def test_the_queue_ends_where_it_says(queue):
    """Token by token: each of the newest `queue` before a block changes it, no older one does."""
    model, ids, start = fresh("memorizing", num_hidden_layers=1, memory_order=queue), tokens(1, 25), 3 * BLOCK
    before = logits(model, ids)[:, start:]
    for place in range(start):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 7) % 61
        assert torch.equal(before, logits(model, changed)[:, start:]) == (place < start - queue), place


def test_a_detached_queue_gives_no_gradient_and_the_same_outputs():
    ids = tokens(1, 2 * BLOCK)
    first, second = fresh("memorizing"), fresh("memorizing", memory_options={"detach_memory": True})
    assert torch.equal(logits(first, ids), logits(second, ids))
    reached = []
    for model in (first, second):
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        hidden = model.model(inputs_embeds=embeds).last_hidden_state
        (gradient,) = torch.autograd.grad(hidden[:, BLOCK:].sum(), embeds)
        reached.append(bool(gradient[:, :BLOCK].abs().sum() > 0))
    assert reached == [True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"combine": "sum"}, "combine='sum': give one of gate, joint"),
        ({"positions": "true"}, "positions='true': give one of none, query, full"),
        ({"combine": "joint"}, "needs positions: its softmax has rotated queries; give 'query' or 'full'"),
        ({"order": 0}, "a queue of 0 tokens"),
    ],
)
def test_bad_options_are_refused(options, message):
    overrides = {"memory_order": None} if "order" in options else {}
    with pytest.raises(ValueError, match=message):
        fresh("memorizing", memory_options=options, **overrides)
