import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_memory.memory import Block, Host
from elastic_memory.memory.counts import state_floats
from tests.memory.cases import fresh, memory_of
from tests.oracles import merged as oracle

AS_THEY_ARE = Host(rope=lambda x, positions: x, project=None)


def read_in_blocks(memory, key, value, sizes):
    state, seen = memory.start(len(key)), 0
    for block in zip(key.split(sizes, 2), value.split(sizes, 2), strict=True):
        state = memory.write(state, Block(*block), seen)
        seen += block[0].shape[2]
    return state, seen


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    order=st.integers(1, 9),
    rounds=st.integers(1, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_slots_are_those_of_the_oracle(sizes, order, rounds, seed):
    memory = memory_of(fresh("merged", memory_order=order, memory_options={"rounds": rounds}))
    key, value = torch.randn(2, 2, 2, sum(sizes), 8, generator=torch.Generator().manual_seed(seed)).unbind()
    state, _ = read_in_blocks(memory, key, value, sizes)
    for row in range(2):
        for head in range(2):
            held = oracle.slots(key[row, head].double(), sizes, order, rounds)
            for mine, signal in zip(state, (key, value, torch.ones_like(key[..., :1])), strict=True):
                expected = torch.stack([signal[row, head, tokens].sum(0) for tokens in held])
                torch.testing.assert_close(mine[row, head, : len(held)], expected)
                assert not mine[row, head, len(held) :].any()


@given(words=st.integers(1, 7), blocks=st.integers(1, 6), rounds=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_a_text_of_few_different_keys_is_remembered_without_loss(words, blocks, rounds, seed):
    """However long it is, and although no two values are equal: as attention to every token of it."""
    memory = memory_of(fresh("merged", memory_order=7, memory_options={"rounds": rounds}))
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(words, (8 * blocks,), generator=generator)
    key = torch.randn(1, 2, words, 8, generator=generator)[:, :, text]
    value, query = torch.randn(2, 1, 2, 8 * blocks, 8, generator=generator).unbind()
    state, seen = read_in_blocks(memory, key, value, [8] * blocks)
    slots, means, score = memory.read(state, seen, AS_THEY_ARE)
    ours = (query @ slots.mT + score.mT).softmax(-1) @ means
    torch.testing.assert_close(ours, (query @ key.mT).softmax(-1) @ value, atol=1e-5, rtol=1e-5)


def test_a_token_unlike_all_others_keeps_a_slot_of_its_own():
    """However long ago it was."""
    memory = memory_of(fresh("merged", memory_order=12))
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(1, 2, 480, 8, generator=generator) * 0.1
    key[:, :, 5] += 3
    state, _ = read_in_blocks(memory, key, key, [8] * 60)
    slot = (state.key == key[:, :, 5:6]).all(-1)
    assert (slot.sum(-1) == 1).all() and (state.tokens[slot] == 1).all()
    assert (state.tokens.sum(2) == 480).all()


@pytest.mark.parametrize("words", [3, 5, 9])
def test_rounding_does_not_choose_among_equal_tokens(words):
    """Equal tokens have equal keys in the first layer, but for the last bit."""
    memory = memory_of(fresh("merged", memory_order=7))
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, words, (41,), generator=generator)
    key, value = torch.randn(2, 1, 2, words, 8, generator=generator)[:, :, :, text].unbind()
    for noisy in (key * (1 + 2**-22), key * (1 + 1e-7 * torch.randn(key.shape, generator=generator))):
        (exact, _), (other, _) = (read_in_blocks(memory, x, value, [8] * 5 + [1]) for x in (key, noisy))
        for mine, theirs in zip(other, exact, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


def test_products_of_low_precision_lose_no_token(monkeypatch):
    """Training on GPUs rounds operands of float32 products to 11 bits (TF32)."""
    multiply = torch.Tensor.__matmul__

    def rounded(x):
        return (
            ((x.contiguous().view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)
            if x.dtype == torch.float32
            else x
        )

    memory = memory_of(fresh("merged", memory_order=7))
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 5, (24_000,), generator=generator)
    words = torch.randn(1, 2, 5, 8, generator=generator)
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: multiply(rounded(a), rounded(b)))
    state, _ = read_in_blocks(memory, words[:, :, text], words[:, :, text], [80] * 300)
    assert (state.tokens.sum(2) == 24_000).all()
    mean = state.key / state.tokens
    assert torch.cdist(mean, words).amin(-1).max() < 1e-4


def test_keys_stand_at_the_distance_given():
    memory = memory_of(fresh("merged", memory_order=7, memory_options={"distance": 30}))
    key, value = torch.randn(2, 1, 2, 16, 8).unbind()
    state, seen = read_in_blocks(memory, key, value, [8, 8])
    asked = []
    memory.read(state, seen, AS_THEY_ARE._replace(rope=lambda x, positions: asked.append(positions) or x))
    assert [positions.tolist() for positions in asked] == [[-30] * 7]


@pytest.mark.parametrize(("slow", "slots", "first"), [(1.0, 12, 0), (0.5, 16, 2), (0.25, 19, 3)])
def test_with_fewer_features_of_keys_the_same_floats_hold_more_slots(slow, slots, first):
    """Heads of 8 features have 4 rotary pairs, the slowest last."""
    memory = memory_of(fresh("merged", memory_order=12, memory_options={"slow": slow}))
    key, value = torch.randn(2, 1, 2, 24, 8).unbind()
    state, seen = read_in_blocks(memory, key, value, [24])
    assert state.value.shape[2] == slots
    assert state_floats(memory).paper <= state_floats(memory_of(fresh("elastic", memory_order=12))).paper
    read, _, _ = memory.read(state, seen, AS_THEY_ARE)
    kept = read.unflatten(-1, (2, 4))
    assert not kept[..., :first].any() and kept[..., first:].all()


@pytest.mark.parametrize("slow", [0.0, 0.1, 1.2, -1.0])
def test_a_share_of_features_that_keeps_none_or_too_many_is_refused(slow):
    with pytest.raises(ValueError, match=f"slow={slow}: give a share of the 4 rotary pairs"):
        fresh("merged", memory_options={"slow": slow})


@pytest.mark.parametrize("options", [dict(order=0), dict(rounds=0), dict(distance=-1)])
def test_sizes_that_mean_nothing_are_refused(options):
    order = {"memory_order": options.pop("order")} if "order" in options else {}
    with pytest.raises(ValueError, match="at least one slot and one round"):
        fresh("merged", **order, memory_options=options)
