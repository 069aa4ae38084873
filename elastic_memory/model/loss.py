"""Next-token loss from hidden states, the logits made and dropped in pieces where they would be too many."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from elastic_memory.shapes import Float, Int, Tensor

PIECE = 8192  # tokens whose logits exist at once on a CPU
SHARE = 1 / 8  # of a GPU's memory that logits may take in float32


def next_token_loss(
    hidden: Float[Tensor, "batch token width"],
    head: Float[Tensor, "vocabulary width"],
    labels: Int[Tensor, "batch token"],
    items: Tensor | int | None = None,
) -> Float[Tensor, ""]:
    """Mean cross-entropy of each label given the hidden state before it; -100 is not counted.

    `items` divides the sum instead of the count here: with gradient accumulation all micro-batches share one count.
    """
    labels = labels.to(hidden.device)
    count = items if items is not None else (labels[:, 1:] != -100).sum()
    # Each place predicts the label after it; the last predicts nothing. Slicing the labels spares a copy of `hidden`.
    following = torch.cat((labels[:, 1:], labels.new_full((len(labels), 1), -100)), dim=1).flatten()
    hidden = hidden.flatten(0, 1)
    piece = _piece_size(head)
    if len(following) <= piece:
        return _summed(hidden, head, following) / count
    # Recomputing a piece's logits in the backward pass costs one more head product and saves them all.
    pieces = zip(hidden.split(piece), following.split(piece), strict=True)
    return (
        torch.stack(
            [checkpoint(_summed, h, head, y, use_reentrant=False, preserve_rng_state=False) for h, y in pieces]
        ).sum()
        / count
    )


def _piece_size(head: Tensor) -> int:
    if head.device.type != "cuda":
        return PIECE
    return int(_device_memory(head.device.index or 0) * SHARE) // (4 * head.shape[0])


@torch.compiler.assume_constant_result
def _device_memory(index: int) -> int:
    return torch.cuda.get_device_properties(index).total_memory


def _summed(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head).float(), labels, ignore_index=-100, reduction="sum")
