import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_memory.training.order import Collate, ReadAhead, Schedule, sample_order


@given(st.integers(1, 50), st.integers(1, 200), st.integers(0, 5))
def test_epochs_are_whole_permutations_one_after_another(rows, samples, seed):
    order = sample_order(rows, samples, seed)
    assert len(order) == samples
    for epoch in range(0, samples, rows):
        part = order[epoch : epoch + rows]
        assert len(set(part)) == len(part)
    counts = Counter(order.tolist())
    assert max(counts.values()) - min([counts[row] for row in range(rows)]) <= 1


@given(st.integers(10, 50), st.integers(1, 100), st.integers(0, 99))
def test_a_longer_run_begins_with_the_same_samples(rows, samples, more):
    assert np.array_equal(sample_order(rows, samples + more, 42)[:samples], sample_order(rows, samples, 42))


def test_order_and_hash_depend_on_the_seed_and_the_rows_alone():
    rows = [{"input_ids": torch.tensor([i])} for i in range(30)]
    assert Schedule(rows, 90, 1).digest == Schedule(list(rows), 90, 1).digest
    assert Schedule(rows, 90, 1).digest != Schedule(rows, 90, 2).digest
    assert Schedule(rows, 90, 1)[5]["input_ids"].item() == Schedule(rows, 90, 1)[5]["row"]
    with pytest.raises(ValueError, match="no training rows"):
        Schedule([], 10, 1)


def test_a_token_outside_the_vocabulary_is_refused_by_row():
    items = [{"input_ids": torch.tensor([1, 2]), "row": 7}, {"input_ids": torch.tensor([3, 9]), "row": 8}]
    assert Collate(10)(items)["rows"] == [7, 8]
    with pytest.raises(ValueError, match="row 8 has a token outside the model's vocabulary of 9"):
        Collate(9)(items)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.integers(0, 5))
def test_reading_ahead_changes_no_batch(size, processes, process, ahead, begin):
    """Every process, begun at any batch (as after a resume), gets what it would read itself."""
    schedule, collate = Schedule([{"input_ids": torch.tensor([i, i])} for i in range(7)], 36, 1), Collate(7)
    batches = ReadAhead(schedule, collate, size * processes, ahead)
    for first in range((begin * processes + process % processes) * size, 36 - size + 1, size * processes):
        positions = list(range(first, first + size))
        made, plain = batches.__getitems__(positions), collate([schedule[position] for position in positions])
        assert made["rows"] == plain["rows"]
        assert torch.equal(made["input_ids"], plain["input_ids"])
    assert not batches.begun, "what nobody will ask for is not read"
    batches.close()


def test_the_next_batch_is_read_while_the_last_one_is_trained_on():
    class Disk(list):
        def __getitem__(self, row):
            read.append((row, threading.current_thread()))
            enough.set() if len(read) == 6 else None
            return {"input_ids": torch.tensor([row])}

    read, enough = [], threading.Event()
    batches = ReadAhead(Schedule(Disk(range(20)), 20, 1), Collate(20), stride=2, ahead=2)
    assert batches.__getitems__([0, 1])["rows"] == sample_order(20, 2, 1).tolist()
    assert enough.wait(10), "two more batches were read without being asked for"
    batches.close()
    assert [row for row, _ in read] == sample_order(20, 6, 1).tolist()
    assert threading.current_thread() not in [thread for _, thread in read]


def test_a_limited_corpus_is_spread_over_all_rows_and_seen_again_and_again():
    order = sample_order(rows=1000, samples=35, seed=3, most=10)
    assert sorted(set(order.tolist())) == [i * 100 for i in range(10)]
    assert [sorted(order[first : first + 10].tolist()) for first in (0, 10, 20)] == [[i * 100 for i in range(10)]] * 3
    np.testing.assert_array_equal(sample_order(7, 30, 1, most=100), sample_order(7, 30, 1))
