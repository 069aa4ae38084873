import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elastic_memory as em
from elastic_memory.memory import Block
from elastic_memory.memory.counts import state_floats
from tests.memory.cases import BLOCK, fresh, logits, memory_of, tokens
from tests.oracles import outliers as oracle


def read_in_blocks(memory, key, value, sizes):
    state, seen = memory.start(len(key)), 0
    for block in zip(key.split(sizes, 2), value.split(sizes, 2), strict=True):
        state = memory.write(state, Block(*block), seen)
        seen += block[0].shape[2]
    return state


@given(sizes=st.lists(st.integers(3, 12), min_size=1, max_size=5))
@settings(max_examples=10)
def test_it_keeps_the_tokens_of_the_oracle(sizes):
    """Of one or two tokens in a block, one is as novel as the other."""
    memory = memory_of(fresh("outliers", memory_order=11))
    torch.manual_seed(0)
    key, value = torch.randn(2, 2, 2, sum(sizes), 8).unbind()
    state = read_in_blocks(memory, key, value, sizes)
    for row in range(2):
        for head in range(2):
            keys = key[row, head].double().numpy()
            kept = oracle.most(memory.elastic.bank.order, memory.raw, keys, sizes)
            expected = oracle.novelty(memory.elastic.bank.order, keys, sizes)
            count = len(kept)
            assert torch.equal(state[2][row, head, :count], key[row, head, kept])
            assert torch.equal(state[3][row, head, :count], value[row, head, kept])
            torch.testing.assert_close(
                state[4][row, head, :count].double(),
                torch.tensor(expected, dtype=torch.float64)[kept],
                rtol=1e-3,
                atol=1e-5,
            )
            assert (state[4][row, head, count:] == -1).all()


def test_a_token_unlike_all_others_stays():
    """However long ago it was."""
    memory = memory_of(fresh("outliers"))
    torch.manual_seed(0)
    key = torch.randn(1, 2, 60 * BLOCK, 8) * 0.1
    key[:, :, 5] += 3
    state = read_in_blocks(memory, key, key, [BLOCK] * 60)
    assert (state[2] == key[:, :, 5:6]).all(-1).any(-1).all()


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_rounding_chooses_no_tokens_where_a_text_begins_with_one_many_times(share):
    """Their keys are what the polynomial gives: none is novel, in a stream as in a whole sample."""
    model, ids = fresh("outliers", memory_options={"share": share}), tokens(1, 61)
    ids[:, : 3 * BLOCK] = 7
    cache = em.MemoryCache(model)
    pieces = [logits(model, piece, past_key_values=cache) for piece in ids.split([5, 20, 1, 35], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), logits(model, ids), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("share", "parts"), [(0.5, (6, 6)), (0.25, (9, 3)), (0.9, (1, 11))])
def test_the_budget_is_shared(share, parts):
    memory = memory_of(fresh("outliers", memory_options={"share": share}))
    assert (memory.elastic.bank.order, memory.raw) == parts
    carried, counted = state_floats(memory)
    assert counted == state_floats(memory_of(fresh("elastic"))).carried and carried == counted + 2 * parts[1]
