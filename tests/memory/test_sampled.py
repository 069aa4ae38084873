import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_memory.memory import Block
from elastic_memory.memory.sampled import Choice, survivors
from elastic_memory.sampling import SAMPLINGS
from tests.memory.cases import BLOCK, fresh, logits, memory_of, tokens, with_weights_of
from tests.oracles import sampled as oracle


@pytest.mark.parametrize("sampling", SAMPLINGS)
@given(order=st.integers(1, 40), size=st.integers(1, 50), blocks=st.integers(2, 12))
@settings(max_examples=20)
def test_the_tokens_that_stay(sampling, order, size, blocks):
    rule, kept = Choice(order, sampling, ()), []
    for seen, left in zip(range(size, blocks * size, size), survivors(rule, size, blocks), strict=True):
        kept = oracle.keep(kept + list(range(seen - size, seen)), rule, seen)
        assert left.tolist() == kept
        assert len(set(kept)) == min(order, seen) and kept == sorted(kept)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_long_stream_stays_near_the_sample_points(sampling):
    """Against a choice from the whole history, in units of the distance between neighbours there."""
    rule, size, blocks = Choice(32, sampling, ()), 64, 300
    off = []
    for seen, kept in zip(range(size, blocks * size, size), survivors(rule, size, blocks), strict=True):
        if seen % (20 * size) == 0:
            every = torch.arange(seen)
            ideal = every[rule.choose((every - seen + 0.5)[None], seen)[0]]
            gap = torch.cat((ideal, torch.tensor([seen]))).diff()
            gap = torch.maximum(gap, gap.roll(1))
            off.append((kept - ideal).abs() / gap)
    assert torch.cat(off).mean() < 0.75
    assert torch.cat(off).max() < 3


def test_options_reach_the_sampling():
    near, far = (fresh("sampled", sampling_options={"decay": decay}) for decay in (0.5, 0.99))
    assert not torch.equal(logits(near, tokens()), logits(far, tokens()))
    with pytest.raises(ValueError, match="decay"):
        fresh("sampled", sampling="uniform", sampling_options={"decay": 0.5})


def test_with_room_for_everything_it_is_a_queue_without_positions():
    model = fresh("sampled", memory_order=64)
    queue = fresh("memorizing", seed=3, memory_order=64, memory_options={"combine": "joint", "positions": "query"})
    with_weights_of(queue, model)
    torch.testing.assert_close(logits(model, tokens()), logits(queue, tokens()), atol=2e-5, rtol=0)


def test_its_retrieval_is_settled_when_it_writes():
    with pytest.raises(ValueError, match="SampledMemory"):
        fresh("sampled").set_retrieval(sampling="uniform")


def test_times_stay_exact_where_they_matter():
    """Eight million tokens on, the newest tokens are still told apart."""
    memory = memory_of(fresh("sampled", memory_order=16))
    seen, block = 10**6 * BLOCK, torch.zeros(1, 2, BLOCK, 8)
    state = memory.start(1)._replace(time=torch.linspace(-seen, -1, 16)[None].round() + 0.5)
    time = memory.write(state, Block(block, block), seen).time[0]
    assert time[-1] == -0.5 and time[-2] in (-1.5, -2.5)
    assert bool((time.diff() > 0).all())
