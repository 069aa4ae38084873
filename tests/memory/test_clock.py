import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import elastic_memory as em
from elastic_memory import hippo
from elastic_memory.memory import Block, Geometry
from elastic_memory.memory.clock import Clock, ClockMemory, spaced
from tests.memory.cases import BLOCK, fresh, logits, memory_of, tokens
from tests.oracles import clock as oracle

RULE = Clock(9, 5, "geometric_cells", (), (3, 7, 40))


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(max_examples=15)
def test_the_state_of_any_split_is_the_oracle(sizes):
    """One token of value 1 at a time: the state is the kernel itself."""
    seen, total = 0, sum(sizes)
    state, tokens = torch.zeros(3, RULE.order, total, dtype=torch.float64), torch.eye(total, dtype=torch.float64)
    for size in sizes:
        step = RULE.step(seen, seen + size)
        state = step.transition @ state + step.projection @ tokens[seen : seen + size]
        seen += size
    for head, window in enumerate(RULE.windows):
        expected = torch.tensor(oracle.kernel(RULE.order, window, total))
        torch.testing.assert_close(state[head], expected, atol=1e-12, rtol=0)


def test_operators_stop_changing_when_windows_are_full():
    for start, size in ((42, 8), (1_000, 8), (10**7, 5)):
        same = RULE.earliest(start, start + size)
        assert same == (41, 41 + size)
        for mine, other in zip(RULE.step(start, start + size), RULE.step(*same), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-9, rtol=0)
        torch.testing.assert_close(RULE.reader(start), RULE.reader(41))
    assert RULE.earliest(30, 50) == (30, 50)


def test_before_its_window_is_full_it_is_elastic_memory():
    rule = RULE._replace(windows=(100,))
    step = rule.step(20, 31)
    torch.testing.assert_close(step.transition[0], hippo.transition(9, 20, 31))
    torch.testing.assert_close(step.projection[0], hippo.projection(9, 20, 31))
    long = {"memory_options": {"shortest": 1000}, "sampling": "exponential"}
    elastic = logits(fresh("elastic", sampling="exponential"), tokens())
    torch.testing.assert_close(logits(fresh("clock", **long), tokens()), elastic, atol=2e-5, rtol=0)


def test_a_constant_stays_one_however_long_ago_it_began():
    """Nothing of the domain is ever empty: reading a constant history gives it back."""
    memory = memory_of(fresh("clock", memory_options={"shortest": 3, "longest": 9}))
    state, ones = memory.start(1), torch.ones(1, 2, BLOCK, 8)
    for block in range(12):
        state = memory.write(state, Block(ones, ones), block * BLOCK)
        for part in memory.read(state, (block + 1) * BLOCK, None):
            torch.testing.assert_close(part, torch.ones_like(part), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("heads", "windows"), [(1, (512,)), (2, (64, 4096)), (3, (64, 512, 4096))])
def test_windows_are_spaced_geometrically(heads, windows):
    geometry = Geometry(width=8, heads=heads, kv_heads=heads, head_dim=8, layers=3, block_size=8)
    assert ClockMemory(geometry).windows == windows == spaced(64, 4096, heads)


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (9, 3), (-2, -1)])
def test_windows_that_are_none_are_refused(shortest, longest):
    with pytest.raises(ValueError, match=f"shortest={shortest} to longest={longest}"):
        fresh("clock", memory_options={"shortest": shortest, "longest": longest})


@pytest.mark.parametrize("local", [{}, {"local_attention": "sliding", "window": 2 * BLOCK}])
@pytest.mark.parametrize("rate", ["learned", "content"])
def test_a_learned_clock_starts_as_the_constant_one(rate, local):
    windows = {"shortest": 3, "longest": 14}
    plain = fresh("clock", memory_options=windows, **local)
    model = em.MemoryLlamaForCausalLM(
        type(plain.config).from_dict(plain.config.to_dict() | {"memory_options": windows | {"rate": rate}})
    ).eval()
    assert {name.rpartition(".")[2] for name in model.load_state_dict(plain.state_dict(), strict=False)[0]} == (
        {"rate_gain"} if rate == "learned" else {"rate_gain", "weigh"}
    )
    for start in ([45], [20, 3, 22]):
        cache = em.MemoryCache(model)
        pieces = [logits(model, piece, past_key_values=cache) for piece in tokens().split(start, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), logits(plain, tokens()), atol=2e-5, rtol=0)


@pytest.mark.parametrize("rate", ["learned", "content"])
def test_a_stream_of_a_learned_clock_in_double_precision(rate):
    """Its state is float32, as everywhere."""
    model = fresh(f"clock 3 14 {rate}").double()
    cache = em.MemoryCache(model)
    pieces = [logits(model, piece, past_key_values=cache) for piece in tokens().split([20, 3, 22], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), logits(model, tokens()), atol=2e-5, rtol=0)


@given(faster=st.floats(-2000, 2000), seed=st.integers(0, 30), size=st.sampled_from([BLOCK, 256]))
@settings(max_examples=25)
@example(faster=5, seed=0, size=256)  # the first tokens of a block take next to nothing of the domain
def test_clocks_that_race_or_stop_stay_finite(faster, seed, size):
    """Whatever was learned, places grow from 0 to 1, and values and gradients are numbers."""
    memory = memory_of(fresh("clock 3 14 content", block_size=size))
    key, value = (x.requires_grad_() for x in torch.randn(2, 1, 2, 3 * size, 8, generator=torch.manual_seed(seed)))
    with torch.no_grad():
        memory.rate_gain.fill_(faster)
    readings = memory.read_all(key, value, None)
    sum(part.square().sum() for reading in readings for part in reading).backward()
    for found in (key.grad, value.grad, memory.rate_gain.grad, memory.weigh.grad):
        assert found.isfinite().all()
    places = memory._places(key.detach().unflatten(2, (-1, size)), 0)
    assert (places.diff(dim=3) >= 0).all() and (places[..., -1] == 1).all() and places[:, :, 0, 0].eq(0).all()


def test_a_rate_that_is_none_is_refused():
    with pytest.raises(ValueError, match="rate='fast': give one of constant, learned, content"):
        fresh("clock", memory_options={"rate": "fast"})
