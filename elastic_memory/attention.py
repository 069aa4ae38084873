"""Softmax attention inside a block with memory columns in front of it, on SDPA and mostly without mask tensors.

Shapes are [batch, head, token, dim]; keys and values may have fewer heads than queries (grouped).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from elastic_memory.common.speedups import find
from elastic_memory.shapes import Bool, Float, Int, Tensor

fast = find("attention")


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Attention without cuDNN, which plans each number of keys for tens of milliseconds: it grows along a stream."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def rotate(
    x: Float[Tensor, "batch head token dim"], cos: Float[Tensor, "... token dim"], sin: Float[Tensor, "... token dim"]
) -> Float[Tensor, "batch head token dim"]:
    """Apply rotary positions; as in Llama, features of a head's first half are paired with those of its second."""
    # Halves stay separate until the end, and tokens come first, as in projections: the compiled backward pass is then
    # one kernel, without a copy.
    first, second = x.transpose(1, 2).chunk(2, dim=-1)
    (cos_first, cos_second), (sin_first, sin_second) = (table.unsqueeze(-2).chunk(2, dim=-1) for table in (cos, sin))
    rotated = torch.cat((first * cos_first - second * sin_first, second * cos_second + first * sin_second), dim=-1)
    return rotated.transpose(1, 2)


def trapezoidal(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key dim"],
    scale: float | None = None,
) -> Float[Tensor, "batch head query dim"]:
    """Causal attention of the last of the keys' tokens: each query sees its own key and every key before it.

    With as many keys as queries the mask is a triangle; memory columns in front of the block make it a trapezoid.
    """
    queries, before = query.shape[2], key.shape[2] - query.shape[2]
    if queries > 1 and fast is not None and fast.supports(query, key):
        mixed = fast.causal(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale)
        return mixed.transpose(1, 2)
    grouped = query.shape[1] != key.shape[1]
    if before == 0 or queries == 1:
        causal = before == 0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
        return _one_gradient_layout(mixed)
    if before <= queries:
        # Idle queries in front make the trapezoid a square, which every fused kernel knows as `is_causal`.
        # Their share of the work is small ((before / all)^2), a mask tensor would cost the fused kernel.
        idle = query.new_zeros(1, 1, 1, 1).expand(query.shape[0], query.shape[1], before, query.shape[3])
        square = torch.cat((idle, query), dim=2)
        mixed = F.scaled_dot_product_attention(square, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
        return _one_gradient_layout(mixed)[:, :, before:]
    # Few queries, many keys: here the mask is small.
    mask = torch.ones(queries, key.shape[2], dtype=torch.bool, device=query.device).tril(before)
    return masked(query, key, value, mask, scale)


def masked(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key dim"],
    mask: Bool[Tensor, "*rows query key"] | Float[Tensor, "*rows query key"] | None,
    scale: float | None = None,
) -> Float[Tensor, "batch head query dim"]:
    """Attention where `mask` is true, or to all keys: for rows at different positions, sliding windows, queues.

    A mask of numbers, 0 and -inf, is added to the scores: fused kernels take it without conversion.
    """
    grouped = query.shape[1] != key.shape[1]
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return _one_gradient_layout(mixed)


def _one_gradient_layout(mixed: Float[Tensor, "batch head token dim"]) -> Float[Tensor, "batch head token dim"]:
    """`mixed`, with a gradient that always has the same memory layout.

    torch caches cuDNN's backward plans by the shapes and strides of queries, keys and values, but a plan also holds the
    strides that the gradient had when it was made: two calls that differ only in these get wrong gradients, silently
    (pytorch pull request 191576; seen with torch 2.11).
    """
    return _OneGradientLayout.apply(mixed) if mixed.is_cuda and mixed.requires_grad else mixed


class _OneGradientLayout(torch.autograd.Function):
    """Identity; its gradient is [batch, token, head, dim] in memory, as output projections make it."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor) -> Tensor:
        return mixed.view_as(mixed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.transpose(1, 2).contiguous().transpose(1, 2)


def blended(
    local: Float[Tensor, "batch head token dim"],
    mixed: Float[Tensor, "batch head token dim"],
    blend: Float[Tensor, "*row head"],
) -> Float[Tensor, "batch head token dim"]:
    """local + blend (mixed - local), in float32 at least."""
    wide = torch.promote_types(mixed.dtype, torch.float32)
    return torch.lerp(local.to(wide), mixed.to(wide), blend.to(wide)[..., None, None]).to(mixed.dtype)


def with_score(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head column dim"],
    scale: float,
    score: Float[Tensor, "batch _ column 1"],
) -> tuple[Tensor, Tensor]:
    """Query and key with one more feature, whose product adds `score` to attention's scores without a mask."""
    asking = query.new_full((1,), 1 / scale).expand(*query.shape[:3], 1)
    return torch.cat((query, asking), dim=-1), torch.cat((key, score.to(key.dtype).expand(*key.shape[:3], 1)), dim=-1)


def pad_to_multiple_of_8(*tensors: Float[Tensor, "_ _ _ _"]) -> list[Tensor]:
    """Zeros appended to the features, up to one multiple of 8 for all: the fastest attention kernels need it."""
    dim = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    return [x if x.shape[-1] == dim else F.pad(x, (0, dim - x.shape[-1])) for x in tensors]


def window_mask(
    queries: int, before: int, window: int, device: torch.device, memory: int = 0
) -> Bool[Tensor, "query key"]:
    """Sliding attention: the last `queries` of `before + queries` tokens each see the newest `window`, itself included.

    All of them also see `memory` more columns in front.
    """
    distance = (before + torch.arange(queries, device=device))[:, None] - torch.arange(before + queries, device=device)
    visible = (distance >= 0) & (distance < window)
    return torch.cat((visible.new_ones(queries, memory), visible), dim=1)


def column_mask(
    positions: Int[Tensor, "row token"],
    local: Int[Tensor, " column"],
    remembered: Bool[Tensor, "row memory"],
    seen: Int[Tensor, "row 1"],
    window: int | None,
) -> Bool[Tensor, "row 1 token all"]:
    """Which columns each token sees: those of memory, then `local` positions, the `seen` before the block negative."""
    query = positions[:, :, None]
    visible = (local <= query) & (local >= -seen[:, :, None])
    if window is not None:
        visible = visible & (query - local < window)
    front = remembered[:, None].expand(-1, positions.shape[1], -1)
    return torch.cat((front, visible), dim=2).unsqueeze(1)


def used_twice(x: Float[Tensor, "batch head token dim"]) -> tuple[Tensor, Tensor]:
    """x for attention and for memory, whose gradients are added with tokens first, as projections need them.

    A compiler would write the sum with heads first, and then copy it.
    """
    one, other = _UsedTwice.apply(x)
    return one, other


class _UsedTwice(torch.autograd.Function):
    """The identity with two outputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, one: Tensor | None, other: Tensor | None) -> Tensor | None:  # type: ignore[override]
        if one is None or other is None:
            return one if other is None else other
        return (one.transpose(1, 2) + other.transpose(1, 2)).transpose(1, 2)
