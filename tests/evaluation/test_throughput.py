"""Throughput: rates and ratios of models that take turns, in the units the paper uses."""

import sys
from types import SimpleNamespace

import pytest
import torch

from elastic_memory.evaluation import Workload, throughput
from tests.evaluation.conftest import model_with


class Clock:
    """Time that passes only when a model is called."""

    now = 0.0


class Slow(torch.nn.Module):
    """Takes a known time for every call."""

    def __init__(self, seconds):
        super().__init__()
        self.inner, self.seconds = model_with("none"), seconds
        self.config = self.inner.config

    def forward(self, *args, **kwargs):
        Clock.now += self.seconds
        kwargs.pop("past_key_values", None)
        return self.inner(*args, **kwargs)


def test_rates_and_ratios_are_those_of_the_models(monkeypatch):
    module = sys.modules["elastic_memory.evaluation.throughput"]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: Clock.now))
    work = Workload(length=16, rows=4, history=16, decoded=3, repeats=3)
    fast, slow = throughput({"fast": Slow(0.05), "slow": Slow(0.15)}, work)
    for kind in ("training", "inference", "decoding"):
        # Four samples in one call; decoding, four rows of one token in each call.
        assert getattr(fast, kind) == pytest.approx(4 / 0.05)
        assert getattr(fast, f"{kind}_ratio") == 1
        assert getattr(slow, f"{kind}_ratio") == pytest.approx(1 / 3)
    assert fast.peak_memory is None


def test_a_machine_that_slows_down_favours_nobody(monkeypatch):
    """Equal models, while every call takes longer than the one before, and less so from call to call."""
    module = sys.modules["elastic_memory.evaluation.throughput"]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: Clock.now))
    slope = [1.0]

    class Warming(Slow):
        def forward(self, *args, **kwargs):
            slope[0] *= 0.97
            self.seconds = 0.1 * (1 - slope[0] / 2)
            return super().forward(*args, **kwargs)

    work = Workload(length=16, decoded=0, steps=2, repeats=4)
    _, found = throughput({"one": Warming(0), "other": Warming(0)}, work)
    assert found.training_ratio == pytest.approx(1, abs=0.004)
    assert found.inference_ratio == pytest.approx(1, abs=0.02)


def test_timing_trains_nothing():
    model = model_with()
    before = [weight.clone() for weight in model.parameters()]
    throughput({"one": model}, Workload(length=20, history=9, decoded=2, repeats=1))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(weight.grad is None for weight in model.parameters())


def test_float32_products_are_those_of_training():
    seen = []
    model = model_with("none")
    model.register_forward_pre_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    throughput({"one": model}, Workload(length=16, decoded=0, repeats=1))
    assert set(seen) == {"high"} and torch.get_float32_matmul_precision() == "highest"


def test_a_gpu_is_warmed_up(monkeypatch):
    """Rounds of the first seconds do not count, and not those seconds that a compiler takes."""
    module = sys.modules["elastic_memory.evaluation.throughput"]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: Clock.now))
    monkeypatch.setattr(module, "_warm_seconds", lambda model: 3.0)
    calls = [0]

    class Compiled(Slow):
        def forward(self, *args, **kwargs):
            calls[0] += 1
            self.seconds = 60 if calls[0] == 1 else 2 if calls[0] < 5 else 1
            return super().forward(*args, **kwargs)

    (found,) = throughput({"one": Compiled(0)}, Workload(length=16, decoded=0, steps=1, repeats=2))
    assert calls[0] == 2 * (1 + 1 + 2)  # compiles; warms up, 4 seconds; counts
    assert found.training == 1


def test_what_cannot_be_timed_is_an_error():
    with pytest.raises(ValueError, match="no models"):
        throughput({}, Workload(length=8))
    with pytest.raises(ValueError, match="repeats=0"):
        throughput({"one": model_with()}, Workload(length=8, repeats=0))


@pytest.mark.parametrize("room", [1.0, float("inf")])
def test_captured_steps_keep_their_memory_where_there_is_room(room, monkeypatch):
    module = sys.modules["elastic_memory.evaluation.throughput"]
    calls = {"step": 0, "release": 0}

    class Kept(module.capture.Captured):
        def __call__(self, **inputs):
            calls["step"] += 1
            self.graph = object()
            return self.step(**inputs)

        def release(self):
            calls["release"] += self.__dict__.get("graph") is not None
            super().release()

    monkeypatch.setattr(module.capture, "Captured", Kept)
    monkeypatch.setattr(module.capture, "gains", lambda model: True)
    monkeypatch.setattr(module, "_peak", lambda *_: 1)
    monkeypatch.setattr(module, "_room", lambda models: room)
    monkeypatch.setattr(module, "_check_room", lambda *_: None)
    throughput({"one": model_with("none"), "other": model_with("none")}, Workload(length=16, decoded=0, repeats=2))
    # Three rounds of two models, three steps each; two steps before them where a graph is new.
    assert calls == ({"step": 30, "release": 6} if room == 1 else {"step": 22, "release": 0})
