"""Sliding attention on FlashAttention's own window, which torch brings along: no mask, and no work outside the window.

Memory columns, which every token of a block sees, are a second part of the same softmax. Parts are merged by the
logarithms of their sums. Each part's backward kernel gets the merged output and sums: its probabilities and gradients
are then those of the whole softmax.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from elastic_memory.attention import pad_to_multiple_of_8
from elastic_memory.fast.kernels import agrees, largest
from elastic_memory.memory.contract import Heads
from elastic_memory.shapes import Float, Tensor

LONGEST = 2**17  # tokens of a sample; float32 positions beyond would be less exact than the kernel's own precision
ALL = 0  # instead of a window: every key is seen

SoftmaxPart = tuple[Heads, Float[Tensor, "batch kv_head column dim"], Float[Tensor, "batch kv_head column dim"]]


def supports(query: Float[Tensor, "batch block head token dim"], key: Tensor) -> bool:
    """Whether it supports the blocks of these samples."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or query.dtype != key.dtype:
        return False
    if query.shape[-1] > 128 or query.shape[1] * query.shape[3] > LONGEST:
        return False
    return _works(str(query.device), query.shape[-1], query.dtype)


@torch.compiler.assume_constant_result
def _works(device: str, dim: int, dtype: torch.dtype) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 8 and _agrees(device, dim, dtype)


@lru_cache
def _agrees(device: str, dim: int, dtype: torch.dtype) -> bool:
    what = f"FlashAttention's windows for heads of {dim}"
    return agrees(what, lambda: _error(device, dim, dtype), within=2e-2)


def _error(device: str, dim: int, dtype: torch.dtype) -> float:
    """Relative error of two blocks, the second with memory columns, and of all gradients."""
    generator = torch.Generator(device).manual_seed(0)
    size, window, columns = 160, 200, 24
    shapes = [(2, 4, 2 * size, dim), *[(2, 2, 2 * size, dim)] * 2, (2, 4, size, dim), *[(2, 2, columns, dim)] * 2]
    drawn = [torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes]
    weight = torch.randn(shapes[0], device=device, generator=generator).to(dtype)
    ours = [x.requires_grad_() for x in drawn]
    mixed = attend(ours[0], ours[1], ours[2], window, dim**-0.5, [(ours[3], ours[4], ours[5])])
    found = (mixed, *torch.autograd.grad(mixed, ours, weight))
    exact = [x.detach().float().requires_grad_() for x in drawn]
    plain = _plain(exact, window)
    pairs = zip(found, (plain, *torch.autograd.grad(plain, exact, weight.float())), strict=True)
    return largest((a.float() - b).norm() / b.norm() for a, b in pairs)


def _plain(tensors: Sequence[Tensor], window: int) -> Tensor:
    """A plain `attend` for one part of memory: the last tokens, with queries `late`, also see its columns."""
    query, late = tensors[0], tensors[3]
    groups = query.shape[1] // tensors[1].shape[1]
    key, value, memory_key, memory_value = (tensors[index].repeat_interleave(groups, dim=1) for index in (1, 2, 4, 5))
    tokens, early = query.shape[2], query.shape[2] - late.shape[2]
    place = torch.arange(tokens, device=query.device)
    distance = place[:, None] - place
    scores = (query @ key.mT).masked_fill((distance < 0) | (distance >= window), -torch.inf)
    beside = F.pad(late @ memory_key.mT, (0, 0, early, 0), value=-torch.inf)
    return (torch.cat((beside, scores), 3) * query.shape[-1] ** -0.5).softmax(3) @ torch.cat((memory_value, value), 2)


def attend(query: Heads, key: Heads, value: Heads, window: int, scale: float, parts: Sequence[SoftmaxPart]) -> Heads:
    """Each token sees the newest `window` tokens, itself included.

    `parts` hold queries, keys and values of memory for the last blocks of the sample, in order: some blocks each, whose
    rows are [batch * block]. All queries of a block see all of its columns.
    """
    tensors = [x.transpose(1, 2) for part in ((query, key, value), *parts) for x in part]
    mixed: Tensor = _Merged.apply(window, scale, *tensors)
    return mixed.transpose(1, 2)


class _Merged(torch.autograd.Function):
    """Parts of one softmax, three tensors each: the window's first, then memory's. Tokens come before heads here."""

    @staticmethod
    def forward(ctx: Any, window: int, scale: float, *tensors: Tensor) -> Tensor:
        ctx.window, ctx.scale = window, scale
        batch, tokens = tensors[0].shape[:2]
        mixed, sums = _forward(*tensors[:3], scale, window)
        others = [_forward(*tensors[index : index + 3], scale, ALL) for index in range(3, len(tensors), 3)]
        if others:
            other = torch.cat([_by_sample(one, batch) for one, _ in others], dim=1)
            other_sums = torch.cat([_by_sample(one.transpose(1, 2), batch) for _, one in others], dim=1).transpose(1, 2)
            early = tokens - other.shape[1]
            total = torch.logaddexp(sums[:, :, early:], other_sums)
            share = (other_sums - total).exp().transpose(1, 2)[..., None]
            merged = mixed[:, early:] + share * (other.float() - mixed[:, early:])
            mixed = torch.cat((mixed[:, :early], merged.to(mixed.dtype)), dim=1)
            sums = torch.cat((sums[:, :, :early], total), dim=2)
        ctx.save_for_backward(mixed, sums, *tensors)
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        mixed, sums, *tensors = ctx.saved_tensors
        gradients = [*_backward(gradient, *tensors[:3], mixed, sums, ctx.scale, ctx.window)]
        batch = len(gradient)
        begin = gradient.shape[1] - sum(x.shape[0] * x.shape[1] for x in tensors[3::3]) // batch
        for index in range(3, len(tensors), 3):
            rows, size = tensors[index].shape[:2]
            end = begin + rows * size // batch
            own, own_mixed = (x[:, begin:end].unflatten(1, (-1, size)).flatten(0, 1) for x in (gradient, mixed))
            own_sums = sums[:, :, begin:end].unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
            gradients += _backward(own, *tensors[index : index + 3], own_mixed, own_sums, ctx.scale, ALL)
            begin = end
        return None, None, *gradients


def _by_sample(x: Float[Tensor, "rows token ..."], batch: int) -> Float[Tensor, "batch all ..."]:
    """Blocks as rows -> samples as rows, with their blocks in sequence."""
    return x.unflatten(0, (batch, -1)).flatten(1, 2)


@torch.library.custom_op("elastic_memory::window_forward", mutates_args=())
def _forward(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """Attention [batch, token, head, dim], and the logarithms of its sums [batch, head, token]."""
    dim = value.shape[-1]
    query, key, value = pad_to_multiple_of_8(query, key, value)
    mixed, sums = _flash_forward(query, key, value, scale, window)
    return mixed[..., :dim].contiguous(), sums.contiguous()


@torch.library.custom_op("elastic_memory::window_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, sums: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    dims = [x.shape[-1] for x in (query, key, value)]
    query, key, value, gradient, mixed = pad_to_multiple_of_8(query, key, value, gradient, mixed)
    found = _flash_backward(gradient, query, key, value, mixed, sums, scale, window)
    grad_query, grad_key, grad_value = (x[..., :dim].contiguous() for x, dim in zip(found, dims, strict=True))
    return grad_query, grad_key, grad_value


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _dim = query.shape
    precise = torch.promote_types(query.dtype, torch.float32)
    mixed = query.new_empty(batch, tokens, heads, value.shape[-1])
    return mixed, query.new_empty(batch, heads, tokens, dtype=precise)


@_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, sums: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    left, right = _sides(window)
    with torch.cuda.device_of(query):
        mixed, sums, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, None, None, query.shape[1], key.shape[1], 0.0, False, False,
            scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
    return mixed, sums


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, sums: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = _sides(window)
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the random state of dropout
    with torch.cuda.device_of(query):
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            gradient, query, key, value, mixed, sums.contiguous(), None, None, query.shape[1], key.shape[1], 0.0, False,
            unused, unused, scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
    return found


def _sides(window: int) -> tuple[int, int]:
    """How many tokens a token sees to its left and right, as FlashAttention counts them; -1: all."""
    return (-1, -1) if window == ALL else (window - 1, 0)
