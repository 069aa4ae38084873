"""What hours would show: a loop that trains or streams holds no more after a thousand steps than after a few."""

import gc

import psutil
import pytest
import torch

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from tests.conftest import small_model

# Operators of a block are 64 kB then, so that one kept for each is seen.
SIZES = dict(memory_order=128, memory_points=16, block_size=16)
OBJECTS, BYTES = 100, 4 * 2**20  # what counters and the allocator may add, however many steps there are


def training(memory):
    model = small_model(memory, **SIZES).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lengths = torch.Generator().manual_seed(0)

    def step():
        ids = torch.randint(1, 61, (2, int(torch.randint(2, 5, (), generator=lengths)) * 16))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def streaming(memory):
    model = small_model(memory, **SIZES)
    cache = em.MemoryCache(model)

    def step():
        with torch.no_grad():
            logits = model(torch.randint(1, 61, (2, 21)), past_key_values=cache, logits_to_keep=1).logits
            fork = cache.fork()
            model(torch.randint(1, 61, (2, 1)), past_key_values=fork)
        assert torch.isfinite(logits).all()

    return step


def held():
    gc.collect()
    return len(gc.get_objects()), psutil.Process().memory_info().rss


def grows(step, steps):
    """Objects and bytes that `steps` add, after the first ones."""
    for _ in range(steps // 3):
        step()
    before = held()
    for _ in range(steps):
        step()
    return [now - then for now, then in zip(held(), before, strict=True)]


def check(loop, memory, steps):
    objects, size = grows(loop(memory), steps)
    assert objects < OBJECTS and size < BYTES, f"{memory}: {objects} objects, {size / 2**20:.1f} MiB"


@pytest.mark.parametrize("loop", [training, streaming])
def test_nothing_grows(loop):
    check(loop, "elastic", 300)


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("loop", [training, streaming])
def test_nothing_grows_in_a_thousand_steps(loop, memory):
    check(loop, memory, 1000)
