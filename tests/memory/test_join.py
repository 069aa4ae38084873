"""States of parts, read apart, against the state of the whole."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_memory.memory import MEMORIES, Block
from elastic_memory.report import catalogue
from tests.memory.cases import BLOCK, CASES, small

parts_of_blocks = st.lists(st.lists(st.integers(1, 3 * BLOCK), max_size=4), min_size=2, max_size=5)


def memory_of(case):
    """The memory of a layer that has one, or the one that remembers nothing."""
    model = small(case)
    return next(iter(model.memories.values()), model.model.layers[0].memory)


JOINING = [case for case in CASES if not memory_of(case).no_join]
REFUSING = [case for case in CASES if case not in JOINING]


def read(memory, blocks):
    """The state after these blocks of keys and values, and their tokens."""
    state, seen = memory.start(2), 0
    for key, value in blocks:
        state = memory.write(state, Block(key, value), seen)
        seen += key.shape[2]
    return state, seen


def drawn(memory, lengths, seed=0):
    """Random keys and values in blocks of these lengths."""
    shape, generator = memory.geometry, torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(2, shape.kv_heads, n, shape.head_dim, generator=generator) for _ in range(2)) for n in lengths
    ]


def error(state, expected):
    pairs = [(a.double(), b.double()) for a, b in zip(state, expected, strict=True)]
    return max((float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs), default=0.0)


def test_which_memories_join():
    joining = {CASES[case][0] for case in JOINING}
    assert joining == {"none", "elastic", "memorizing", "infini", "recent"}
    assert {CASES[case][0] for case in REFUSING} == {
        "infini",
        "melodi",
        "sampled",
        "means",
        "merged",
        "recent_merged",
        "clock",
        "dyadic",
        "outliers",
    }


@pytest.mark.parametrize("case", JOINING)
@given(lengths=parts_of_blocks, dice=st.randoms(use_true_random=False))
@settings(max_examples=12)
def test_joined_parts_are_the_whole_in_any_association(case, lengths, dice):
    memory = memory_of(case)
    parts = [drawn(memory, blocks, seed) for seed, blocks in enumerate(lengths)]
    known = [read(memory, blocks) for blocks in parts]
    while len(known) > 1:
        place = dice.randrange(len(known) - 1)
        (state, seen), (other, other_seen) = known[place : place + 2]
        before = [part.clone() for part in (*state, *other)]
        known[place : place + 2] = [(memory.join(state, seen, other, other_seen), seen + other_seen)]
        assert all(map(torch.equal, before, (*state, *other))), "states are values"
    whole, seen = read(memory, [block for blocks in parts for block in blocks])
    assert known[0][1] == seen
    assert error(known[0][0], whole) < 1e-5
    assert [part.dtype for part in known[0][0]] == [part.dtype for part in whole]


@pytest.mark.parametrize("case", JOINING)
def test_a_join_is_as_precise_as_its_states(case):
    memory = memory_of(case)
    first, second = (tuple(part.double() for part in read(memory, drawn(memory, [5, 3], seed))[0]) for seed in range(2))
    joined = memory.join(first, 8, second, 8)
    assert {part.dtype for part in joined} <= {torch.float64}


@pytest.mark.parametrize("case", REFUSING)
def test_others_say_why_not(case):
    memory = memory_of(case)
    with pytest.raises(ValueError, match=re.escape(memory.no_join)):
        memory.join(memory.start(1), 3, memory.start(1), 4)
    assert "\n" not in memory.no_join


@pytest.mark.parametrize("name", MEMORIES)
def test_the_catalogue_says_so(name):
    line = next(line for line in catalogue.overview().splitlines() if line.startswith(f"| `{name}` |"))
    expected = {"none", "elastic", "memorizing", "recent"}
    assert line.endswith("| exactly |" if name in expected else "| no |")
