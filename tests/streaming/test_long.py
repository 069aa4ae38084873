"""A million tokens."""

import time
from statistics import median

import psutil
import pytest
import torch

import elastic_memory as em
from elastic_memory.operators import Bank


def state_error(order, size, blocks, points):
    """Relative error of what a float32 stream remembers, against the direct operator."""
    bank, device = Bank(order, points, "exponential"), torch.device("cpu")
    signal = torch.randn(size * blocks, 2, generator=torch.Generator().manual_seed(0))
    state = torch.zeros(order, 2)
    for block in range(blocks):
        step = bank.step(block * size, (block + 1) * size, device)
        state = step.transition @ state + step.projection @ signal[block * size : (block + 1) * size]
    streamed = bank.reconstruction(size * blocks, device) @ state
    direct = bank.direct(size * blocks, device, torch.float64) @ signal.double()
    return float((streamed - direct).norm() / direct.norm())


def test_state_after_16_blocks():
    assert state_error(135, 512, 16, 32) < 1e-4


@pytest.mark.slow
def test_state_after_a_million_tokens():
    assert state_error(540, 2048, 512, 8) < 1e-3


@pytest.mark.slow
@torch.no_grad()
def test_a_stream_of_a_million_tokens():
    """Memory stays flat, numbers finite, and the last tokens take no more time than the first."""
    model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny", block_size=1024)).eval()
    cache = em.MemoryCache(model)
    ids = torch.randint(1, 512, (1, 8192), generator=torch.Generator().manual_seed(0))
    held, sizes, times = [], [], []
    for call in range(128):
        start = time.process_time()
        logits = model(ids.roll(call, dims=1), past_key_values=cache, logits_to_keep=1).logits
        times.append(time.process_time() - start)
        if call in (4, 127):
            held.append(psutil.Process().memory_info().rss)
            sizes.append(cache.nbytes())
    assert cache.clock == [2**20]
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(part).all() for part in cache.streams[2].state)
    assert sizes[0] == sizes[1]
    assert held[1] - held[0] < 20 * 2**20
    # Of this process alone, and with room for what others on the machine do to its caches.
    assert median(times[-32:]) < 1.25 * median(times[4:36])
