"""Memories that are linear in their tokens: precision in bf16, and operators that are built once."""

import pytest
import torch

from elastic_memory.memory import MEMORIES, Block, Geometry, linear

BLOCKS, SIZE = 16, 64
ELASTIC = [
    dict(sampling=sampling, algorithm=algorithm)
    for sampling in ("uniform", "exponential", "geometric_cells")
    for algorithm in ("direct", "recurrent")
]
LINEAR = [name for name, kind in MEMORIES.items() if issubclass(kind, linear.LinearMemory)]


def build(name, **options):
    geometry = Geometry(width=32, heads=2, kv_heads=2, head_dim=16, layers=12, block_size=SIZE)
    return MEMORIES[name](geometry, order=48, points=16, **options)


@pytest.mark.parametrize("name, options", [*((name, {}) for name in LINEAR), *(("elastic", one) for one in ELASTIC)])
def test_readings_in_bf16_do_not_lose_precision_from_block_to_block(name, options):
    """By both algorithms of elastic memory: a table may use either."""
    memory = build(name, **options)
    torch.manual_seed(0)
    tokens = torch.randn(1, 2, BLOCKS * SIZE, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = memory.read_all(tokens, tokens, host=None)
    exact = memory.read_all(tokens.double(), tokens.double(), host=None)
    errors = [float((a[0].double() - b[0]).norm() / b[0].norm()) for a, b in zip(rounded, exact, strict=True)]
    assert len(errors) == BLOCKS - 1
    assert max(errors) < 0.004, errors
    assert errors[-1] < 1.5 * errors[0], errors


@pytest.mark.parametrize("name", LINEAR)
def test_a_training_step_builds_no_operators_again(name, monkeypatch):
    memory = build(name)
    tokens = torch.randn(1, 2, BLOCKS * SIZE, 16)
    first = memory.read_all(tokens, tokens, host=None)
    monkeypatch.setattr(linear, "step_of", None)
    for one, other in zip(memory.read_all(tokens, tokens, host=None), first, strict=True):
        assert torch.equal(one[0], other[0])


def test_a_stream_with_full_windows_builds_no_operators_again(monkeypatch):
    memory, block = build("clock"), Block(*torch.randn(2, 1, 2, SIZE, 16).unbind())
    state = memory.write(memory.start(1), block, 10_000)
    monkeypatch.setattr(type(memory.rule), "step", None)
    for seen in range(10_000 + SIZE, 20_000, SIZE):
        state = memory.write(state, block, seen)
    assert state[0].isfinite().all()
