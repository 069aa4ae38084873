"""Next-token loss from hidden states, the logits made and dropped in pieces where they would be too many."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic_memory.fast.kernels import triton_runs_on
from elastic_memory.model.layer import HOOKS
from elastic_memory.shapes import Float, Int, Tensor

# A weight [vocabulary, width], or a module that does more than multiply by one.
Head = Tensor | nn.Module

PIECE = 8192  # tokens whose logits exist at once on a CPU, or of a head that is called
SHARE = 1 / 8  # of a GPU's memory that logits may take in float32


def plain_head(head: nn.Module, hidden: Tensor) -> bool:
    """Whether a head computes `hidden @ head.weight.T`, and nothing else happens when it is called."""
    return (
        type(head) is nn.Linear
        and head.bias is None
        and type(head.weight) is nn.Parameter
        and head.weight.device == hidden.device
        and "forward" not in head.__dict__  # accelerate replaces it
        and not any(getattr(head, name) for name in HOOKS)
    )


def summed_loss(hidden: Float[Tensor, "token width"], head: Head, labels: Int[Tensor, " token"]) -> Float[Tensor, ""]:
    """Cross-entropies of the labels given the hidden states, added up; -100 is not counted."""
    piece = _piece_size(head)
    if len(labels) <= piece:
        return _summed(hidden, head, labels)
    # Recomputing a piece's logits in the backward pass costs one more head product and saves them all.
    pieces = zip(hidden.split(piece), labels.split(piece), strict=True)
    options = {"use_reentrant": False, "preserve_rng_state": isinstance(head, nn.Module)}
    return torch.stack([checkpoint(_summed, h, head, y, **options) for h, y in pieces]).sum()


def next_token_loss(
    hidden: Float[Tensor, "batch token width"],
    head: Head,
    labels: Int[Tensor, "batch token"],
    items: Tensor | int | None = None,
    summed: Callable[..., Tensor] = summed_loss,
    shifted: bool = False,
) -> Float[Tensor, ""]:
    """Mean cross-entropy of each label given the hidden state before it; -100 is not counted.

    `items` divides the sum instead of the count here: with gradient accumulation all micro-batches share one count.
    `shifted` labels stand where they are predicted already.
    """
    labels = labels.to(hidden.device)
    if not shifted:
        # Each place predicts the label after it; the last predicts nothing. This spares a copy of `hidden`.
        labels = torch.cat((labels[:, 1:], labels.new_full((len(labels), 1), -100)), dim=1)
    count = items if items is not None else (labels != -100).sum()
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    if isinstance(head, nn.Module):  # compilers know nothing of what may be in it
        return summed_loss(hidden, head, labels) / count
    if _kernel_fits(hidden, head):
        return _ByKernel.apply(hidden, head, labels, torch.is_grad_enabled()) / count
    return summed(hidden, head, labels) / count


class _ByKernel(torch.autograd.Function):
    """`summed_loss` by a kernel that turns logits into their gradient in place.

    The forward pass goes on to the gradients of hidden states and head, so that no logits wait for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, differentiate: bool) -> Tensor:
        from elastic_memory.fast.kernels.cross_entropy import losses

        weight, tokens, found = head.to(_dtype(hidden)), hidden.to(_dtype(hidden)), []
        of_hidden, of_head = (differentiate and needed for needed in ctx.needs_input_grad[:2])
        slopes = torch.empty_like(tokens) if of_hidden else None
        turned = torch.zeros_like(head) if of_head else None
        for start in range(0, len(tokens), _piece_size(head)):
            piece = slice(start, start + _piece_size(head))
            logits = tokens[piece] @ weight.T
            found.append(losses(logits, labels[piece], of_hidden or of_head).sum())
            if slopes is not None:
                torch.mm(logits, weight, out=slopes[piece])
            if turned is not None:
                turned += logits.T @ tokens[piece]
        ctx.save_for_backward(slopes, turned)
        ctx.dtype = hidden.dtype
        return torch.stack(found).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph: the loss has no second derivative here; compute it from logits instead")
        slopes, turned = ctx.saved_tensors
        of_hidden = None if slopes is None else (slopes * gradient).to(ctx.dtype)
        return of_hidden, None if turned is None else turned * gradient, None, None


def _kernel_fits(hidden: Tensor, head: Tensor) -> bool:
    """Plain tensors on a GPU; a compiler would have to see through it.

    Not in float16: the head's gradient is summed over all tokens before anything scales it.
    """
    if not triton_runs_on(hidden.device) or torch.compiler.is_compiling() or hasattr(head, "device_mesh"):
        return False
    from elastic_memory.fast.kernels import cross_entropy

    return _dtype(hidden) != torch.float16 and cross_entropy.works(hidden.device, _dtype(hidden))


def _dtype(hidden: Tensor) -> torch.dtype:
    """The type of products with it."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _piece_size(head: Head) -> int:
    if isinstance(head, nn.Module) or head.device.type != "cuda":
        return PIECE
    return int(_device_memory(head.device.index or 0) * SHARE) // (4 * head.shape[0])


@torch.compiler.assume_constant_result
def _device_memory(index: int) -> int:
    return torch.cuda.get_device_properties(index).total_memory


def _summed(hidden: Tensor, head: Head, labels: Tensor) -> Tensor:
    logits = head(hidden[None])[0] if isinstance(head, nn.Module) else F.linear(hidden, head)
    return F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")
