"""Next-token loss from hidden states; logits are computed and freed piece by piece where they would not fit."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic_memory.common.hooks import has_hooks
from elastic_memory.common.speedups import find
from elastic_memory.shapes import Float, Int, Tensor

# A weight [vocabulary, width], or a module that does more than multiply by it.
Head = Tensor | nn.Module

PIECE = 8192  # tokens whose logits exist at once on a CPU, or if the head is a module
SHARE = 1 / 8  # of a GPU's memory that logits may take in float32

fast = find("loss")


def plain_head(head: nn.Module, hidden: Tensor) -> bool:
    """Whether a head computes `hidden @ head.weight.T` and nothing else: no bias, hooks, wrappers or offloading."""
    return (
        type(head) is nn.Linear
        and head.bias is None
        and type(head.weight) is nn.Parameter
        and head.weight.device == hidden.device
        and "forward" not in head.__dict__  # accelerate replaces it
        and not has_hooks(head)
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
    `shifted` labels are already aligned with the position that predicts them.
    """
    labels = labels.to(hidden.device)
    if not shifted:
        # Each position predicts the next label, the last one nothing. Shifting labels avoids a copy of `hidden`.
        labels = torch.cat((labels[:, 1:], labels.new_full((len(labels), 1), -100)), dim=1)
    count = items if items is not None else (labels != -100).sum()
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    if isinstance(head, nn.Module):  # may contain anything: not compiled
        return summed_loss(hidden, head, labels) / count
    if fast is not None and fast.supports(hidden, head):
        return fast.summed_loss(hidden, head, labels, _piece_size(head)) / count
    return summed(hidden, head, labels) / count


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
