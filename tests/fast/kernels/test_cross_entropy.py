"""The loss whose logits become their own gradient, against torch's."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from elastic_memory.fast import loss as fast
from elastic_memory.fast.kernels import cross_entropy
from elastic_memory.model import loss as module

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(params=[pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


def close(actual, expected, dtype) -> None:
    assert (actual.float() - expected.float()).norm() <= TOLERANCE[dtype] * expected.float().norm()


def samples(device, rows, vocabulary, dtype):
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = (5 * torch.randn(rows, vocabulary, generator=generator)).to(device, dtype)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator).to(device)
    labels[::3] = -100
    return logits, labels


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 2), (7, 61), (5, 8192), (4, 20_001)])
def test_losses_and_slopes(rows, vocabulary, dtype, device):
    logits, labels = samples(device, rows, vocabulary, dtype)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (slopes,) = torch.autograd.grad(expected.sum(), exact)
    before = logits.clone()
    close(cross_entropy.losses(logits, labels, differentiate=False), expected, torch.float32)
    assert torch.equal(logits, before)
    close(cross_entropy.losses(logits, labels, differentiate=True), expected, torch.float32)
    close(logits, slopes, dtype)
    assert not logits[labels == -100].any()


def test_extremes_and_strangers(device):
    """Huge logits do not overflow, -inf weighs nothing, and a label without a logit is noticed."""
    logits = torch.tensor([[1e4, -1e4, 0.0], [-torch.inf, 0.0, 0.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0]], device=device)
    labels = torch.tensor([1, 2, 3, -7], device=device)
    found = cross_entropy.losses(logits, labels, differentiate=False)
    torch.testing.assert_close(found[:2].cpu(), torch.tensor([2e4, 0.6931472]))
    assert found[2:].isnan().all()


@pytest.mark.parametrize("piece", [6, 100])
@pytest.mark.parametrize("narrow", [False, True])
def test_the_loss_and_its_gradients(piece, narrow, device, monkeypatch):
    """Of hidden states and head, in pieces and whole, with a count of somebody else's, and twice."""
    monkeypatch.setattr(module, "_piece_size", lambda head: piece)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 11, 16, generator=generator).to(device).requires_grad_()
    head = torch.randn(37, 16, generator=generator).to(device).requires_grad_()
    labels = torch.randint(0, 37, (2, 11), generator=generator).to(device)
    labels[0, 4:6] = -100
    results = []
    for fits in (True, False):
        monkeypatch.setattr(fast, "supports", lambda hidden, head, fits=fits: fits)
        with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
            loss = module.next_token_loss(hidden, head, labels, items=13)
        gradients = [torch.autograd.grad(3 * loss, (hidden, head), retain_graph=True) for _ in range(2)]
        results.append((loss, *gradients[0], *gradients[1]))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        close(ours, theirs, torch.bfloat16 if narrow else torch.float32)
    with torch.no_grad():
        close(module.next_token_loss(hidden, head, labels, items=13), results[1][0], torch.bfloat16)


def test_it_is_checked_before_use(device, monkeypatch):
    monkeypatch.setattr(cross_entropy, "PIECE", 64)
    for dtype in TOLERANCE:
        assert cross_entropy.works.__wrapped__(device, dtype)
    monkeypatch.setattr(cross_entropy, "_error", lambda *_: 0.5)
    with pytest.warns(UserWarning, match="a relative error of 5.0e-01 here: PyTorch code is used"):
        assert not cross_entropy.works.__wrapped__(device, torch.float32)
    monkeypatch.setattr(cross_entropy, "_error", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="do not run here: PyTorch code is used"):
        assert not cross_entropy.works.__wrapped__(device, torch.float32)


def test_only_what_is_asked_for_is_differentiated(device, monkeypatch):
    """Nothing without gradients, and nothing for a frozen head; a second derivative is refused."""
    seen = []
    spied = cross_entropy.losses
    monkeypatch.setattr(cross_entropy, "losses", lambda *args: seen.append(args[2]) or spied(*args))
    monkeypatch.setattr(fast, "supports", lambda hidden, head: True)
    hidden, head = torch.randn(1, 5, 8, device=device, requires_grad=True), torch.randn(9, 8, device=device)
    labels = torch.arange(5, device=device)[None]
    with torch.no_grad():
        module.next_token_loss(hidden, head, labels)
    loss = module.next_token_loss(hidden, head, labels)
    assert seen == [False, True]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)
