import pytest
import torch

import elastic_memory as em
from elastic_memory.memory.counts import state_floats
from tests.memory.cases import BLOCK, fresh, logits, memory_of, tokens


@pytest.mark.parametrize(("share", "parts"), [(0.5, (6, 6)), (0.25, (9, 3)), (0.9, (1, 11))])
def test_the_budget_is_shared(share, parts):
    memory = memory_of(fresh("recent", memory_options={"share": share}))
    assert (memory.rest.bank.order, memory.queue.order) == parts
    assert state_floats(memory) == state_floats(memory_of(fresh("elastic")))


@pytest.mark.parametrize("memory", ["recent", "outliers"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.99, 1.0, -1.0, 3.0])
def test_neither_part_may_be_idle(memory, share):
    with pytest.raises(ValueError, match=f"share={share}"):
        fresh(memory, memory_options={"share": share})


@pytest.mark.parametrize("memory, sampling", [("recent", "uniform"), ("outliers", "uniform"), ("clock", "midpoints")])
def test_the_polynomial_can_be_read_otherwise_on_a_warm_cache(memory, sampling):
    model, ids, more = fresh(memory), tokens(1, 3 * BLOCK), tokens(1, 5, 2)
    cache = em.MemoryCache(model)
    logits(model, ids, past_key_values=cache)
    model.set_retrieval(sampling=sampling, points=9)
    whole = logits(model, torch.cat((ids, more), dim=1))
    # The newest block is still open, so only its first columns were read with the former settings.
    torch.testing.assert_close(logits(model, more, past_key_values=cache), whole[:, 3 * BLOCK :], atol=2e-5, rtol=0)
