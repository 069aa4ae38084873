"""Throughput: rates and ratios of models that take turns, in the units the paper uses."""

import time

import pytest
import torch

from elastic_memory.evaluation import Workload, throughput
from elastic_memory.evaluation import throughput as timed
from tests.evaluation.conftest import model_with


class Slow(torch.nn.Module):
    """Takes a known time for every call."""

    def __init__(self, seconds):
        super().__init__()
        self.inner, self.seconds = model_with("none"), seconds
        self.config = self.inner.config

    def forward(self, *args, **kwargs):
        time.sleep(self.seconds)
        kwargs.pop("past_key_values", None)
        return self.inner(*args, **kwargs)


def test_rates_and_ratios_are_those_of_the_models():
    work = Workload(length=16, rows=4, history=16, decoded=3, repeats=3)
    fast, slow = throughput({"fast": Slow(0.05), "slow": Slow(0.15)}, work)
    assert fast.training_ratio == fast.inference_ratio == fast.decoding_ratio == 1
    for kind in ("training", "inference", "decoding"):
        assert getattr(slow, f"{kind}_ratio") == pytest.approx(1 / 3, rel=0.35)
    # Four samples in 0.05 s and what the model itself takes; four rows of one token each in as much.
    assert 20 < fast.inference <= 80 and 20 < fast.decoding <= 80
    assert fast.peak_memory is None


def test_timing_trains_nothing():
    model = model_with()
    before = [weight.clone() for weight in model.parameters()]
    timed({"one": model}, Workload(length=20, history=9, decoded=2, repeats=1))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(weight.grad is None for weight in model.parameters())


def test_no_models_is_an_error():
    with pytest.raises(ValueError, match="no models"):
        throughput({}, Workload(length=8))
