"""Next-token loss from hidden states, the logits made and dropped in pieces where they would be too many."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from elastic_memory.kernels import triton_runs_on
from elastic_memory.shapes import Float, Int, Tensor

PIECE = 8192  # tokens whose logits exist at once on a CPU
SHARE = 1 / 8  # of a GPU's memory that logits may take in float32


def summed_loss(
    hidden: Float[Tensor, "token width"], head: Float[Tensor, "vocabulary width"], labels: Int[Tensor, " token"]
) -> Float[Tensor, ""]:
    """Cross-entropies of the labels given the hidden states, added up; -100 is not counted."""
    piece = _piece_size(head)
    if len(labels) <= piece:
        return _summed(hidden, head, labels)
    # Recomputing a piece's logits in the backward pass costs one more head product and saves them all.
    pieces = zip(hidden.split(piece), labels.split(piece), strict=True)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.stack([checkpoint(_summed, h, head, y, **options) for h, y in pieces]).sum()


def next_token_loss(
    hidden: Float[Tensor, "batch token width"],
    head: Float[Tensor, "vocabulary width"],
    labels: Int[Tensor, "batch token"],
    items: Tensor | int | None = None,
    summed: Callable[..., Tensor] = summed_loss,
) -> Float[Tensor, ""]:
    """Mean cross-entropy of each label given the hidden state before it; -100 is not counted.

    `items` divides the sum instead of the count here: with gradient accumulation all micro-batches share one count.
    """
    labels = labels.to(hidden.device)
    count = items if items is not None else (labels[:, 1:] != -100).sum()
    # Each place predicts the label after it; the last predicts nothing. Slicing the labels spares a copy of `hidden`.
    following = torch.cat((labels[:, 1:], labels.new_full((len(labels), 1), -100)), dim=1).flatten()
    if _kernel_fits(hidden, head):
        summed = _ByKernel.apply
    return summed(hidden.flatten(0, 1), head, following) / count


class _ByKernel(torch.autograd.Function):
    """`summed_loss` by a kernel that turns logits into their gradient in place.

    The forward pass goes on to the gradients of hidden states and head, so that no logits wait for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        from elastic_memory.kernels.cross_entropy import losses

        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        weight, tokens, wanted = head.to(dtype), hidden.to(dtype), any(ctx.needs_input_grad)
        found, slopes, turned = [], [], None
        for some, own in zip(tokens.split(_piece_size(head)), labels.split(_piece_size(head)), strict=True):
            logits = some @ weight.T
            found.append(losses(logits, own, wanted).sum())
            if wanted:
                slopes.append(logits @ weight)
                product = logits.T @ some
                turned = product.to(head.dtype) if turned is None else turned + product
        if wanted:
            ctx.save_for_backward(torch.cat(slopes) if len(slopes) > 1 else slopes[0], turned)
        ctx.dtype = hidden.dtype
        return torch.stack(found).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        slopes, turned = ctx.saved_tensors
        return (slopes * gradient).to(ctx.dtype), turned * gradient, None


def _kernel_fits(hidden: Tensor, head: Tensor) -> bool:
    """Plain tensors on a GPU; a compiler would have to see through it."""
    if not triton_runs_on(hidden.device) or torch.compiler.is_compiling() or hasattr(head, "device_mesh"):
        return False
    from elastic_memory.kernels import cross_entropy

    return cross_entropy.works(hidden.device)


def _piece_size(head: Tensor) -> int:
    if head.device.type != "cuda":
        return PIECE
    return int(_device_memory(head.device.index or 0) * SHARE) // (4 * head.shape[0])


@torch.compiler.assume_constant_result
def _device_memory(index: int) -> int:
    return torch.cuda.get_device_properties(index).total_memory


def _summed(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head).float(), labels, ignore_index=-100, reduction="sum")
