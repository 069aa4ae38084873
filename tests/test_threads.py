import time

import pytest
import torch

from elastic_memory.common import threads


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("slow", "expected"), [(1, 2), (2, 1)])
def test_the_faster_number_of_threads_is_chosen(monkeypatch, slow, expected):
    torch.set_num_threads(2)
    clock = [0.0]

    def work(x):
        clock[0] += 1.0 if torch.get_num_threads() == slow else 0.1

    monkeypatch.setattr(torch.nn.functional, "silu", work)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert threads.choose_threads() == torch.get_num_threads() == expected


def test_starting_threads_does_not_count(monkeypatch):
    """After each change of their number the threads start anew, which takes longer than small products."""
    torch.set_num_threads(2)
    clock, before = [0.0], [2]

    def work(x):
        threads_now = torch.get_num_threads()
        clock[0] += 1.0 / threads_now + (100.0 if before[0] != threads_now == 2 else 0.0)
        before[0] = threads_now

    monkeypatch.setattr(torch.nn.functional, "silu", work)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert threads.choose_threads() == 2


def test_what_the_user_says_stays(monkeypatch):
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(time, "perf_counter", None)
    assert threads.choose_threads() == 2


def test_products_as_wide_as_the_model_decide(monkeypatch):
    """Small ones can be slow with two threads on busy cores where those of the model are not."""
    torch.set_num_threads(2)
    clock, wide = [0.0], 576

    def work(x):
        several = torch.get_num_threads() == 2
        clock[0] += 0.1 if several == (x.shape[1] == 4 * wide) else 1.0

    monkeypatch.setattr(torch.nn.functional, "silu", work)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert threads.choose_threads() == 1
    torch.set_num_threads(2)
    assert threads.choose_threads(wide) == 2
