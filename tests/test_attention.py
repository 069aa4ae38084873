import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_memory import attention
from elastic_memory.attention import masked, rotate, trapezoidal, window_mask


def slow(query, key, value, visible):
    """Softmax attention spelled out, in float64."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query.double() @ key.mT / math.sqrt(query.shape[-1])
    return scores.masked_fill(~visible, -math.inf).softmax(-1) @ value


def heads(count, tokens, dim, seed):
    return torch.randn(2, count, tokens, dim, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 17), st.integers(0, 40), st.sampled_from([(4, 4), (4, 2), (6, 1)]), st.sampled_from([2, 8, 90]))
def test_trapezoid(queries, before, grouping, dim):
    """Every relation of block to memory: none, shorter, longer; one token; grouped heads; the paper's head size."""
    query = heads(grouping[0], queries, dim, 0).requires_grad_()
    key, value = (heads(grouping[1], before + queries, dim, seed).requires_grad_() for seed in (1, 2))
    visible = torch.ones(queries, before + queries, dtype=torch.bool).tril(before)
    fast, oracle = trapezoidal(query, key, value), slow(query, key, value, visible)
    torch.testing.assert_close(fast.double(), oracle, atol=1e-5, rtol=1e-5)
    weight = heads(grouping[0], queries, dim, 3)
    for ours, theirs in zip(
        torch.autograd.grad((fast * weight).sum(), (query, key, value)),
        torch.autograd.grad((oracle * weight).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs.float(), atol=1e-5, rtol=1e-4)


@given(st.integers(1, 9), st.integers(0, 20), st.integers(1, 12))
def test_window(queries, before, window):
    mask = window_mask(queries, before, window, torch.device("cpu"))
    for i in range(queries):
        assert [j for j, seen in enumerate(mask[i]) if seen] == list(
            range(max(0, before + i - window + 1), before + i + 1)
        )
    query, key, value = heads(4, queries, 8, 0), heads(2, before + queries, 8, 1), heads(2, before + queries, 8, 2)
    oracle = slow(query, key, value, mask)
    torch.testing.assert_close(masked(query, key, value, mask).double(), oracle, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_close_to_float32():
    query, key, value = heads(4, 16, 90, 0), heads(4, 28, 90, 1), heads(4, 28, 90, 2)
    low = trapezoidal(*(x.bfloat16() for x in (query, key, value)))
    torch.testing.assert_close(low.float(), trapezoidal(query, key, value), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("shift", [1, 1000])
def test_rotation_is_relative(shift):
    """Scores depend on the distance of two positions, negative ones included."""

    def score(first, second):
        angles = [torch.tensor([[p]]) / 100.0 ** (torch.arange(4) / 4) for p in (first, second)]
        a, b = (
            rotate(heads(1, 1, 8, seed), torch.cat((t, t), -1).cos(), torch.cat((t, t), -1).sin())
            for seed, t in enumerate(angles)
        )
        return (a * b).sum()

    torch.testing.assert_close(score(5, -3), score(5 + shift, -3 + shift), atol=1e-4, rtol=1e-4)


def test_gradients_of_attention_come_in_one_layout():
    """Whatever the layout that reaches it (see `_one_gradient_layout`); the numbers stay."""
    output = torch.randn(2, 3, 5, 4, requires_grad=True)
    for order in itertools.permutations(range(3)):
        gradient = torch.randn(2, 3, 5, 4)
        back = [order.index(axis) for axis in range(3)]
        laid_out = gradient.permute(*order, 3).contiguous().permute(*back, 3)
        seen = []
        handle = output.register_hook(seen.append)
        attention._OneGradientLayout.apply(output).backward(laid_out)
        handle.remove()
        assert seen[0].stride() == (60, 4, 12, 1)
        assert torch.equal(seen[0], gradient)
