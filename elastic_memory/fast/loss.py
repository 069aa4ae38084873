"""The summed loss by a kernel that overwrites logits with their gradient."""

from typing import Any

import torch

from elastic_memory.fast.kernels import triton_runs_on
from elastic_memory.shapes import Float, Int, Tensor


def supports(hidden: Tensor, head: Tensor) -> bool:
    """Plain tensors on a GPU, outside of torch.compile.

    Not in float16: the head's gradient is summed over all tokens before the loss scale is applied.
    """
    if not triton_runs_on(hidden.device) or torch.compiler.is_compiling() or hasattr(head, "device_mesh"):
        return False
    from elastic_memory.fast.kernels import cross_entropy

    return _dtype(hidden) != torch.float16 and cross_entropy.works(hidden.device, _dtype(hidden))


def summed_loss(
    hidden: Float[Tensor, "token width"],
    head: Float[Tensor, "vocabulary width"],
    labels: Int[Tensor, " token"],
    piece: int,
) -> Float[Tensor, ""]:
    """Cross-entropies of the labels, added up; logits of `piece` tokens exist at once."""
    result: Tensor = _SummedLoss.apply(hidden, head, labels, piece, torch.is_grad_enabled())
    return result


class _SummedLoss(torch.autograd.Function):
    """The forward pass computes the gradients of hidden states and head too, so that no logits are kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, size: int, differentiate: bool) -> Tensor:
        from elastic_memory.fast.kernels.cross_entropy import losses

        weight, tokens, found = head.to(_dtype(hidden)), hidden.to(_dtype(hidden)), []
        of_hidden, of_head = (differentiate and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(tokens) if of_hidden else None
        grad_weight = torch.zeros_like(head) if of_head else None
        for start in range(0, len(tokens), size):
            piece = slice(start, start + size)
            logits = tokens[piece] @ weight.T
            found.append(losses(logits, labels[piece], of_hidden or of_head).sum())
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[piece])
            if grad_weight is not None:
                grad_weight += logits.T @ tokens[piece]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = hidden.dtype
        return torch.stack(found).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph: the loss has no second derivative here; compute it from logits instead")
        grad_hidden, grad_weight = ctx.saved_tensors
        of_hidden = None if grad_hidden is None else (grad_hidden * gradient).to(ctx.dtype)
        return of_hidden, None if grad_weight is None else grad_weight * gradient, None, None, None


def _dtype(hidden: Tensor) -> torch.dtype:
    """The precision of products with `hidden`."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
