"""Sliding attention without masks: its two kernels are replaced by plain float64 code here, all else is as on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_memory.fast import windows
from tests.memory.cases import CASES, fresh, memory_of, small, tokens

KERNELS = {name: getattr(windows, name) for name in ("_flash_forward", "_flash_backward")}


def scores_of(query, key, scale, window):
    """[batch, head, query, key], minus infinity where nothing is seen; tokens come before heads."""
    groups = query.shape[2] // key.shape[2]
    query, key = query.transpose(1, 2), key.transpose(1, 2).repeat_interleave(groups, dim=1)
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(key.shape[2])
    hidden = (distance < 0) | (distance >= window) if window != windows.ALL else torch.zeros_like(distance).bool()
    return (query @ key.mT * scale).masked_fill(hidden, -torch.inf)


def flash_forward(query, key, value, scale, window):
    scores = scores_of(query, key, scale, window)
    held = value.transpose(1, 2).repeat_interleave(query.shape[2] // key.shape[2], dim=1)
    return (scores.softmax(-1) @ held).transpose(1, 2), scores.logsumexp(-1)


def flash_backward(gradient, query, key, value, mixed, sums, scale, window):
    """As FlashAttention does: probabilities from the given sums, and the given output in place of their product."""
    groups = query.shape[2] // key.shape[2]
    share = (scores_of(query, key, scale, window) - sums[..., None]).exp()
    grad, out, q = (x.transpose(1, 2) for x in (gradient, mixed, query))
    held, known = (x.transpose(1, 2).repeat_interleave(groups, dim=1) for x in (value, key))
    grad_scores = share * (grad @ held.mT - (grad * out).sum(-1, keepdim=True)) * scale
    by_group = lambda x: x.unflatten(1, (-1, groups)).sum(2).transpose(1, 2)  # noqa: E731
    return (grad_scores @ known).transpose(1, 2), by_group(grad_scores.mT @ q), by_group(share.mT @ grad)


@pytest.fixture(autouse=True, scope="module")
def plain_kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "_flash_forward", flash_forward)
        patch.setattr(windows, "_flash_backward", flash_backward)
        patch.setattr(windows, "supports", lambda query, key: True)
        yield


def one_softmax(query, key, value, window, scale, parts, size):
    """`attend`, token by token: the columns of its block, then those of its window."""
    groups, early = query.shape[1] // key.shape[1], query.shape[2] // size - sum(len(part[0]) for part in parts) // 2
    columns = []  # of each block with memory: its queries, keys and values, by sample
    for part in parts:
        columns += zip(*(x.unflatten(0, (2, -1)).unbind(1) for x in part), strict=True)
    mixed = []
    for token in range(query.shape[2]):
        start, block = max(0, token - window + 1), token // size
        scores = [query[:, :, token, None] @ key[:, :, start : token + 1].repeat_interleave(groups, dim=1).mT]
        held = [value[:, :, start : token + 1]]
        if block >= early:
            looking, known, remembered = columns[block - early]
            scores.append(looking[:, :, token % size, None] @ known.repeat_interleave(groups, dim=1).mT)
            held.append(remembered)
        weights = (torch.cat(scores, dim=3) * scale).softmax(3)
        mixed.append(weights @ torch.cat(held, dim=2).repeat_interleave(groups, dim=1))
    return torch.cat(mixed, dim=2)


@given(
    size=st.integers(1, 5),
    groups=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 7)), max_size=3),
    early=st.integers(1, 2),
    window=st.integers(1, 20),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    dims=st.sampled_from([(8, 8, 8), (6, 6, 6), (8, 16, 8), (6, 14, 6)]),
)
@settings(max_examples=40)
def test_parts_of_a_softmax_make_the_whole(size, groups, early, window, heads, dims):
    """Any sizes, and memory whose queries and keys have further features: outputs and gradients."""
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()  # noqa: E731
    length = size * (early + sum(count for count, _ in groups))
    (count, kv), (dim, wide, value_dim) = heads, dims
    query, key, value = make(2, count, length, dim), make(2, kv, length, dim), make(2, kv, length, value_dim)
    parts = [
        (make(2 * n, count, size, wide), make(2 * n, kv, columns, wide), make(2 * n, kv, columns, value_dim))
        for n, columns in groups
    ]
    mixed = windows.attend(query, key, value, window, 0.3, parts)
    expected = one_softmax(query, key, value, window, 0.3, parts, size)
    torch.testing.assert_close(mixed, expected)
    inputs = [query, key, value, *(x for part in parts for x in part)]
    pairs = zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (mixed, expected)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("case", [case for case in CASES if case == "none" or not memory_of(small(case)).no_sliding])
@pytest.mark.parametrize("blocks, length", [(1, 45), (3, 45), (2, 5), (1, 40)])
def test_a_model_is_the_one_with_masks(case, blocks, length, monkeypatch):
    """Logits and gradients of every weight, of a model in float64."""
    model = fresh(case, local_attention="sliding", window=8 * blocks).double()
    ids, results = tokens(2, length), []
    for fast in (True, False):
        monkeypatch.setattr(windows, "supports", lambda query, key, fast=fast: fast)
        logits = model(ids).logits
        gradients = torch.autograd.grad(
            logits.square().sum(), list(model.parameters()), materialize_grads=True, allow_unused=True
        )
        results.append((logits, *gradients))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4 * max(1.0, theirs.abs().max().item()), rtol=0)


@pytest.mark.parametrize("memory", ["none", "elastic"])
def test_compiled_layers_hold_it(memory):
    """In one graph each, without a break."""
    model = fresh(memory, local_attention="sliding", window=16)
    ids = tokens(2, 45)
    plain = model(ids, labels=ids).loss
    torch.compiler.reset()
    model.compile_blocks(backend="aot_eager")
    loss = model(ids, labels=ids).loss
    torch.testing.assert_close(loss, plain, atol=1e-6, rtol=0)
    loss.backward()


def test_the_self_test_compares_with_one_softmax():
    """On a GPU it decides whether the kernels run: it must pass with sound ones, and fail with any that are not."""
    assert windows._error("cpu", 16, torch.float32) < 1e-5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "_flash_forward", lambda q, k, v, s, w: flash_forward(q, k, v, s, w and w + 1))
        assert windows._error("cpu", 16, torch.float32) > 2e-2


def test_the_kernels_take_these_arguments():
    """Of the torch that is installed: shapes come out as expected. What they compute only a GPU can tell."""
    with torch.device("meta"):
        query, key = torch.empty(2, 48, 4, 16, dtype=torch.bfloat16), torch.empty(2, 48, 2, 16, dtype=torch.bfloat16)
    for window in (windows.ALL, 8):
        left, right = windows._sides(window)
        sides = {"scale": 0.25, "window_size_left": left, "window_size_right": right}
        mixed, sums, *_ = torch.ops.aten._flash_attention_forward(
            query, key, key, None, None, 48, 48, 0.0, False, False, **sides
        )
        assert mixed.shape == query.shape and sums.shape == (2, 4, 48)
        unused = torch.empty(2, dtype=torch.uint64, device="meta")
        gradients = torch.ops.aten._flash_attention_backward(
            query, query, key, key, mixed, sums, None, None, 48, 48, 0.0, False, unused, unused, **sides
        )
        assert [x.shape for x in gradients] == [query.shape, key.shape, key.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [16, 64, 90, 128])
def test_the_kernels_of_this_gpu_agree(dim, monkeypatch):
    for name, kernel in KERNELS.items():
        monkeypatch.setattr(windows, name, kernel)
    for dtype in (torch.bfloat16, torch.float16):
        assert windows._error("cuda", dim, dtype) < 2e-2
