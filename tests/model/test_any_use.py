"""A cache under any sequence of uses: each row goes on as if it had been read alone, in one call."""

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from tests.conftest import small_model

CASES = [(memory, local) for memory in MEMORIES for local in ("block", "sliding")]
actions = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(1, 20), st.booleans()),
        st.tuples(st.just("read"), st.just(1), st.booleans()),
        st.tuples(st.just("rollback"), st.integers(1, 7), st.booleans()),
        st.tuples(st.just("select"), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("save"), st.just(0), st.booleans()),
        st.tuples(st.just("fork"), st.just(0), st.booleans()),
    ),
    min_size=2,
    max_size=12,
)


@cache
def shared_model(memory, local):
    """One for all examples; None where sliding attention is undefined."""
    try:
        return small_model(memory, local_attention=local)
    except ValueError:
        return None


class Rows:
    """A cache, and beside it what each of its rows has read."""

    def __init__(self, model, static, seed):
        self.model, self.random = model, torch.Generator().manual_seed(seed)
        self.cache, self.read_by = em.MemoryCache(model, static), [[], []]
        if seed % 2:
            self.cache.activate_past_recording()

    def read(self, columns, padded):
        ids = torch.randint(1, 61, (len(self.read_by), columns), generator=self.random)
        mask = torch.ones_like(ids)
        if padded:
            mask = (torch.rand(ids.shape, generator=self.random) > 0.3).long()
        logits = self.model(ids, attention_mask=mask, past_key_values=self.cache).logits
        for row, (tokens, real) in enumerate(zip(self.read_by, mask.bool(), strict=True)):
            tokens += ids[row, real].tolist()
            if real.any():
                alone = self.model(torch.tensor([tokens]), logits_to_keep=int(real.sum())).logits[0]
                torch.testing.assert_close(logits[row, real], alone, atol=2e-4, rtol=0)

    def rollback(self, tokens, _):
        try:
            self.cache.rollback(tokens)
            self.read_by = [read[:-tokens] for read in self.read_by]
        except ValueError:
            assert not self.cache.opened or tokens > min(self.cache.opened)

    def select(self, count, _):
        if self.cache.streams:
            rows = torch.randint(len(self.read_by), (count,), generator=self.random)
            self.cache.select(rows)
            self.read_by = [list(self.read_by[row]) for row in rows]

    def save(self, _, exact):
        if any(self.cache.clock):
            with tempfile.TemporaryDirectory() as folder:
                self.cache.save(Path(folder) / "memory", exact=exact)
                self.cache = em.MemoryCache.load(Path(folder) / "memory", self.model, static=self.cache.static)

    def fork(self, _, swap):
        if self.cache.streams:
            fork, ids = self.cache.fork(), torch.ones(len(self.read_by), 9, dtype=torch.long)
            self.model(ids, past_key_values=self.cache if swap else fork)
            self.cache = fork if swap else self.cache


@pytest.mark.parametrize("memory, local", CASES)
@given(actions=actions, static=st.booleans(), seed=st.integers(0, 9))
@settings(max_examples=30)
def test_each_row_goes_on_as_if_alone(memory, local, actions, static, seed):
    if (model := shared_model(memory, local)) is None:
        pytest.skip("undefined with sliding attention")
    rows = Rows(model, static, seed)
    with torch.no_grad():
        for name, number, flag in [*actions, ("read", 3, False)]:
            getattr(rows, name)(number, flag)
