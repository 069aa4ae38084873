"""Sweeps in one launch against the loops in plain torch."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from elastic_memory import hippo, operators
from elastic_memory.fast.kernels import sweeps
from elastic_memory.operators import Bank

DOUBLE = torch.float64
ORDERS = [1, 2, 3, 64, 65, 200]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]

compiled = pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter stores no bfloat16")
DTYPES = [torch.float64, torch.float32, pytest.param(torch.bfloat16, marks=compiled)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture
def both(monkeypatch):
    """What a function gives with kernels and without."""

    def run(function):
        results = []
        for fused in (True, False):
            offered = SimpleNamespace(kernels_on=lambda device, fused=fused: sweeps if fused else None)
            monkeypatch.setattr(hippo, "fast", offered)
            results.append(function())
        return results

    return run


def close(actual, expected, within: float) -> None:
    """Within so much of the largest entry."""
    within *= max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=within)


def sample_points(device) -> torch.Tensor:
    u = torch.rand(67, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.tensor([0.0, 1.0, 0.5]), u]).to(device)


@pytest.mark.parametrize("order", ORDERS)
def test_transitions(order, device):
    ratios = torch.tensor([0.0, 1e-4, 0.5, 15 / 16, 1 - 1e-6, 1.0], dtype=DOUBLE, device=device)
    ours, plain = sweeps.transitions(order, ratios), hippo.transitions(order, ratios.cpu()).to(device)
    close(ours, plain, 1e-14)
    assert not ours.triu(1).any()
    assert not ours[0].any()
    assert torch.equal(ours[-1], torch.eye(order, dtype=DOUBLE, device=device))


def test_columns_that_begin_below_the_smallest_number_are_not_lost(device, monkeypatch):
    monkeypatch.setattr(sweeps, "LANES", 2048)  # one program: the interpreter takes its time for each
    order, ratio, column = 1200, 0.135, 400
    plain = hippo.transition(order, ratio, 1.0).to(device)
    assert plain[column, column] == 0
    assert plain[:, column].abs().max() > 0.01
    close(sweeps.transitions(order, torch.tensor([ratio], dtype=DOUBLE, device=device))[0], plain, 1e-14)


def test_no_ratio_gives_no_transition(device):
    assert sweeps.transitions(5, torch.empty(0, dtype=DOUBLE, device=device)).shape == (0, 5, 5)


@pytest.mark.parametrize("order", ORDERS)
def test_values_and_areas(order, both, device, monkeypatch):
    u = sample_points(device)
    within = 1e-15 * max(order, 10)
    close(*both(lambda: hippo.basis(order, u)), within)
    for entries in (1, 20 * len(u), 10**6):  # rows one by one, twenty, and all at once
        monkeypatch.setitem(hippo.AT_ONCE, device, entries)
        close(*both(lambda: hippo.integral(order, u)), within)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stretch_of_a_stream(dtype, both, device):
    where = torch.device(device)
    for stretch in (
        both(lambda: operators._steps.__wrapped__(0, 3, 20, 7, where, dtype)),
        both(lambda: operators._steps.__wrapped__(4, 2, 20, 1, where, dtype)),
    ):
        for ours, plain in zip(*stretch, strict=True):
            assert ours.transition.dtype == ours.projection.dtype == dtype
            within = max(1e-14, torch.finfo(dtype).eps)
            close(ours.transition, plain.transition, within)
            close(ours.projection, plain.projection, within)


@pytest.mark.parametrize("sampling", ["exponential", "geometric_cells"])
@pytest.mark.parametrize("order", [15, 16, 17, 40])
def test_the_direct_operator_in_panels(sampling, order, both, device, monkeypatch):
    monkeypatch.setitem(operators.SWEEP, device, 50)
    monkeypatch.setitem(operators.PANEL, device, 16)
    bank, where = Bank(order, 5, sampling), torch.device(device)
    ours, plain = both(lambda: operators._direct.__wrapped__(bank, (30, 70), where, DOUBLE))
    for one, other in zip(ours, plain, strict=True):
        close(one, other, 1e-13)


@pytest.mark.gpu
@pytest.mark.parametrize("order", [540, 8640])
def test_a_gpu_agrees_with_a_cpu_at_full_size(order):
    for ratio in (0.5, 15 / 16, 1 - 1e-5):
        ours = hippo.transition(order, ratio, 1.0, device="cuda")
        close(ours.cpu(), hippo.transition(order, ratio, 1.0), 1e-13)
    u = sample_points("cpu")
    within = 2e-15 * order  # at the ends, where the truth is known, either road is off by about half of that
    close(hippo.basis(order, u, device="cuda").cpu(), hippo.basis(order, u), within)
    close(hippo.integral(order, u, device="cuda").cpu(), hippo.integral(order, u), within)
    close(hippo.projection(order, 2048, 4096, device="cuda").cpu(), hippo.projection(order, 2048, 4096), within)
