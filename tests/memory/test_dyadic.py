from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_memory.memory.counts import state_floats
from elastic_memory.memory.dyadic import Segments
from tests.memory.cases import fresh, logits, memory_of, tokens
from tests.oracles import dyadic as oracle


def rule(count, unit=3, order=4, points=17):
    return Segments(order, count, unit, points, "uniform_cells", ())


@given(count=st.integers(1, 12), unit=st.integers(1, 5))
@settings(max_examples=30)
def test_segments_tile_the_history_and_only_ever_join(count, unit):
    some, borders = rule(count, unit), {0}
    for now in range(1, 300):
        found = some.intervals(now)
        assert found == oracle.intervals(some, now)
        assert len(found) <= count
        assert [first for first, _ in found] == [end for _, end in found[1:]] + [0] and found[0][1] == now
        starts = {first for first, _ in found}
        assert starts <= borders | {now - 1}, "a border cannot come back"
        borders = starts
        lengths = [end - first for first, end in found[1:-1]]
        assert lengths == sorted(lengths) and all(2 * a >= b for a, b in pairwise(lengths))


@given(sizes=st.lists(st.integers(1, 17), min_size=1, max_size=6), count=st.integers(1, 7), unit=st.integers(1, 4))
@settings(max_examples=20)
def test_the_state_of_any_split_is_the_oracle(sizes, count, unit):
    some, seen = rule(count, unit), 0
    signal = torch.randn(sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state = torch.zeros(some.segments * some.order, 3, dtype=torch.float64)
    for block in signal.split(sizes):
        step = some.step(seen, seen + len(block))
        state, seen = step.transition @ state + step.projection @ block, seen + len(block)
    torch.testing.assert_close(state, torch.tensor(oracle.state(some, signal.numpy())), atol=1e-11, rtol=0)
    weights = oracle.reading(some, seen)
    assert len(weights) == min(some.points, seen)
    torch.testing.assert_close(some.reader(seen) @ state, weights @ signal, atol=1e-10, rtol=0)


def test_one_segment_is_elastic_memory():
    one = fresh("dyadic", memory_options={"segments": 1}, sampling="uniform_cells", memory_points=5)
    elastic = fresh("elastic", sampling="uniform_cells", memory_points=5)
    torch.testing.assert_close(logits(one, tokens()), logits(elastic, tokens()), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("order", "segments", "kept"), [(12, 4, 12), (14, 4, 12), (3, 18, 3), (12, 1, 12)])
def test_order_is_shared_by_the_segments(order, segments, kept):
    memory = memory_of(fresh("dyadic", memory_order=order, memory_options={"segments": segments}))
    assert state_floats(memory).carried == 2 * 2 * 8 * kept
    assert memory.rule.order * memory.rule.segments == kept


def test_its_order_is_settled():
    model = fresh("dyadic", memory_options={"segments": 3})
    with pytest.raises(ValueError, match="order 24"):
        model.set_retrieval(order=24)
    before = logits(model, tokens())
    model.set_retrieval(sampling="midpoints", points=6)
    assert (logits(model, tokens()) - before).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{"segments": 0}, {"unit": 0}, {"segments": -3}])
def test_segments_that_are_none_are_refused(options):
    with pytest.raises(ValueError, match="at least 1"):
        fresh("dyadic", memory_options=options)
