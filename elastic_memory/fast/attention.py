"""Attention by FlashAttention-4, if it is installed: on Hopper and Blackwell faster than torch's own kernels.

Registered as custom operations, so that compiled graphs can hold them. Shapes are [batch, token, head, dim].
"""

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from elastic_memory.fast.kernels import agrees, largest
from elastic_memory.shapes import Float, Tensor

Tokens = Float[Tensor, "batch token head dim"]


def supports(query: Tensor, key: Tensor) -> bool:
    """Whether it supports these tensors; not in deterministic mode, as its backward pass sums in no fixed order."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or query.dtype != key.dtype:
        return False
    if query.shape[-1] % 8 or query.shape[-1] > 128 or torch.are_deterministic_algorithms_enabled():
        return False
    return _works(str(query.device), query.shape[-1], query.dtype)


@torch.compiler.assume_constant_result
def _works(device: str, dim: int, dtype: torch.dtype) -> bool:
    return _installed(device) and _agrees(device, dim, dtype)


@lru_cache
def _installed(device: str) -> bool:
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@lru_cache
def _agrees(device: str, dim: int, dtype: torch.dtype) -> bool:
    """Compared on each device: heads of 16 get wrong gradients on Hopper (version 4.0.0b36)."""
    what = f"FlashAttention-4's kernels for heads of {dim}"
    return agrees(what, lambda: _error(device, dim, dtype), within=2e-2)


def _error(device: str, dim: int, dtype: torch.dtype) -> float:
    """Relative error of a trapezoid and of all its gradients."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((2, 160, 4, dim), (2, 224, 2, dim), (2, 224, 2, dim), (2, 160, 4, dim))
    *inputs, weight = (torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes)
    query, key, value = (x.float().transpose(1, 2).requires_grad_() for x in inputs)
    mask = torch.ones(160, 224, dtype=torch.bool, device=device).tril(64)
    plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    gradients = torch.autograd.grad(plain, (query, key, value), weight.float().transpose(1, 2))
    ours = [x.requires_grad_() for x in inputs]
    mixed = causal(ours[0], ours[1], ours[2])
    found = (mixed, *torch.autograd.grad(mixed, ours, weight))
    pairs = zip(found, (plain, *gradients), strict=True)
    return largest((a.float() - b.transpose(1, 2)).norm() / b.norm() for a, b in pairs)


def causal(query: Tokens, key: Tokens, value: Tokens, scale: float | None = None) -> Tokens:
    """Causal attention of the last of the keys' tokens: each query sees its own key and every key before it."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _forward(query, key, value, scale)[0]


@torch.library.custom_op("elastic_memory::flash_forward", mutates_args=())
def _forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    with torch.cuda.device_of(query):
        mixed, normaliser, *_ = _flash_attn_fwd(query, key, value, softmax_scale=scale, causal=True, return_lse=True)
    return mixed, normaliser


@torch.library.custom_op("elastic_memory::flash_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, normaliser: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    with torch.cuda.device_of(query):
        parts = _flash_attn_bwd(query, key, value, mixed, gradient, normaliser, softmax_scale=scale, causal=True)
    return parts[0], parts[1], parts[2]


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _dim = query.shape
    mixed = query.new_empty(batch, tokens, heads, value.shape[-1])
    return mixed, query.new_empty(batch, heads, tokens, dtype=torch.float32)


@_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Tensor, normaliser: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _remember(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.scale), None


_forward.register_autograd(_gradients, setup_context=_remember)
