"""`hippo.transitions` and `hippo.projections` with gradients to their times, for clocks that are learned.

The derivative of P(r) = r^A is A P / r, that of an integral of the basis up to u is the basis at u. Both are custom
operations, so that torch.compile does not trace float64 recurrences.
"""

from typing import Any

import torch
import torch.nn.functional as F

from elastic_memory import hippo
from elastic_memory.shapes import Tensor

AT_ONCE = 64  # operators whose float64 derivatives are in memory together


@torch.library.custom_op("elastic_memory::clock_transitions", mutates_args=())
def transitions(ratios: Tensor, order: int, dtype: torch.dtype) -> Tensor:
    """P(r) for ratios of any shape: [...] -> [..., order, order]."""
    return hippo.transitions(order, ratios.flatten(), dtype).unflatten(0, ratios.shape)


@torch.library.custom_op("elastic_memory::clock_transitions_backward", mutates_args=())
def _transitions_backward(gradient: Tensor, ratios: Tensor, order: int) -> Tensor:
    generator, _ = hippo.legs(order, device=ratios.device)
    pieces = zip(ratios.flatten().split(AT_ONCE), gradient.flatten(0, -3).split(AT_ONCE), strict=True)
    found = [((generator @ hippo.transitions(order, some)) * own).sum((1, 2)) / some for some, own in pieces]
    return torch.cat(found).view(ratios.shape)


@torch.library.custom_op("elastic_memory::clock_projections", mutates_args=())
def projections(places: Tensor, order: int, dtype: torch.dtype) -> Tensor:
    """Integrals of the basis between neighbouring places: [..., edge] -> [..., order, edge - 1]."""
    return hippo.projections(order, places, dtype)


@torch.library.custom_op("elastic_memory::clock_projections_backward", mutates_args=())
def _projections_backward(gradient: Tensor, places: Tensor, order: int) -> Tensor:
    found = []
    _, roots = hippo.legs(order, device=places.device)
    for some, own in zip(places.flatten(0, -2).split(AT_ONCE), gradient.flatten(0, -3).split(AT_ONCE), strict=True):
        own = own.double()
        by_edge = F.pad(own, (1, 0)) - F.pad(own, (0, 1))  # the end of one token is the beginning of the next
        # `hippo.basis` checks its points, which synchronises with a GPU
        basis = next(hippo.legendre(some.flatten(), order - 1))[1:].unflatten(1, some.shape)
        found.append((basis * roots[:, None, None] * by_edge.movedim(1, 0)).sum(0))
    return torch.cat(found).view(places.shape)


@transitions.register_fake
def _(ratios: Tensor, order: int, dtype: torch.dtype) -> Tensor:
    return ratios.new_empty(*ratios.shape, order, order, dtype=dtype)


@projections.register_fake
def _(places: Tensor, order: int, dtype: torch.dtype) -> Tensor:
    return places.new_empty(*places.shape[:-1], order, places.shape[-1] - 1, dtype=dtype)


@_transitions_backward.register_fake
@_projections_backward.register_fake
def _(gradient: Tensor, times: Tensor, order: int) -> Tensor:
    return torch.empty_like(times)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, int, torch.dtype], output: Tensor) -> None:
    times, ctx.order, _ = inputs
    ctx.save_for_backward(times)


transitions.register_autograd(
    lambda ctx, gradient: (_transitions_backward(gradient, *ctx.saved_tensors, ctx.order), None, None),
    setup_context=_save_inputs,
)
projections.register_autograd(
    lambda ctx, gradient: (_projections_backward(gradient, *ctx.saved_tensors, ctx.order), None, None),
    setup_context=_save_inputs,
)
