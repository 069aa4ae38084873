import pytest
import torch

from elastic_memory.memory import Block
from tests.memory.cases import fresh, memory_of, tokens
from tests.oracles import means as oracle


def read_in_blocks(memory, key, value, sizes):
    state, seen = memory.start(len(key)), 0
    for block in zip(key.split(sizes, 2), value.split(sizes, 2), strict=True):
        state = memory.write(state, Block(*block), seen)
        seen += block[0].shape[2]
    return state, seen


@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("sizes", [[3, 8, 2, 8, 8], [29], [1] * 29])
def test_slots_are_those_of_the_oracle(sizes, sinks):
    torch.manual_seed(0)
    memory = memory_of(fresh("means", memory_order=7, memory_options={"sinks": sinks}))
    torch.nn.init.normal_(memory.weigh)
    key, value = torch.randn(2, 2, 2, 29, 8).unbind()
    state, seen = read_in_blocks(memory, key, value, sizes)
    for row in range(2):
        for head in range(2):
            slots, parts = [], (x[row, head].double().split(sizes) for x in (key, value))
            for keys, values in zip(*parts, strict=True):
                oracle.write(slots, keys, values, memory, memory.weigh[head].double())
            key_sums, value_sums, *lengths = (torch.stack(part).float() for part in zip(*slots, strict=True))
            expected = (key_sums, value_sums, torch.stack(lengths, dim=1))
            for mine, other in zip(state, expected, strict=True):
                torch.testing.assert_close(mine[row, head], other, atol=1e-5, rtol=1e-5)
    assert seen == 29


def test_with_room_for_everything_slots_are_the_raw_tokens():
    memory = memory_of(fresh("means", memory_order=32))
    key, value = torch.randn(2, 1, 2, 29, 8).unbind()
    state, seen = read_in_blocks(memory, key, value, [8, 8, 13])
    for mine, raw in zip(memory.read(state, seen, None), (key, value), strict=True):
        torch.testing.assert_close(mine, raw)


def test_a_slot_keeps_its_length_however_many_tokens_are_added():
    memory = memory_of(fresh("means", memory_order=5))
    key, value = torch.randn(2, 1, 2, 400, 8).unbind()
    state, seen = read_in_blocks(memory, key, value, [40] * 10)
    read_key, read_value = memory.read(state, seen, None)
    torch.testing.assert_close(torch.stack((read_key, read_value), dim=-1).norm(dim=-2), state.length)
    assert state.key.norm(dim=-1)[:, :, 1:].min() > 2 * state.length[..., 0].max()


def test_the_gate_and_the_temperature_learn():
    model, ids = fresh("means").train(), tokens()
    model(ids, labels=ids).loss.backward()
    memory = memory_of(model)
    assert memory.weigh.grad.abs().max() > 0 and memory.temperature.grad.abs().max() > 0


@pytest.mark.parametrize(("order", "sinks"), [(3, 3), (1, 1), (4, -1)])
def test_slots_that_nothing_can_be_added_to_are_refused(order, sinks):
    with pytest.raises(ValueError, match=f"order {order}.*sinks={sinks}"):
        fresh("means", memory_order=order, memory_options={"sinks": sinks})


@pytest.mark.parametrize("sinks", [0, 1])
def test_a_token_that_comes_again_goes_to_the_oldest_slot_whatever_rounding_says(sinks):
    """Equal tokens have equal keys in the first layer: their cosines are equal but for the last bit."""
    memory = memory_of(fresh("means", memory_order=7, memory_options={"sinks": sinks}))
    torch.manual_seed(0)
    words, ids = torch.randn(2, 1, 2, 6, 8), torch.randint(0, 6, (41,))
    key, value = words[:, :, :, ids].unbind()
    (exact, _), (other, _) = (read_in_blocks(memory, x, value, [8] * 5 + [1]) for x in (key, key * (1 + 2**-22)))
    torch.testing.assert_close(other.key, exact.key, atol=1e-4, rtol=0)
    torch.testing.assert_close(other.value, exact.value, atol=1e-4, rtol=0)
