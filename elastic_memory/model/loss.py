"""Next-token loss from hidden states, the logits made and dropped in pieces."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from elastic_memory.shapes import Float, Int, Tensor

PIECE = 8192  # tokens whose logits exist at once


def next_token_loss(
    hidden: Float[Tensor, "batch token width"],
    head: Float[Tensor, "vocabulary width"],
    labels: Int[Tensor, "batch token"],
    items: Tensor | int | None = None,
) -> Float[Tensor, ""]:
    """Mean cross-entropy of each label given the hidden state before it; -100 is not counted.

    `items` divides the sum instead of the count here: with gradient accumulation all micro-batches share one count.
    """
    hidden = hidden[:, :-1].flatten(0, 1)
    labels = labels[:, 1:].flatten().to(hidden.device)
    if len(labels) <= PIECE:
        total = _piece(hidden, head, labels)
    else:
        # Recomputing a piece's logits in the backward pass costs one more head product and saves them all.
        pieces = zip(hidden.split(PIECE), labels.split(PIECE), strict=True)
        total = torch.stack([checkpoint(_piece, h, head, y, use_reentrant=False) for h, y in pieces]).sum()
    count = items if items is not None else (labels != -100).sum()
    return total / count


def _piece(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head).float(), labels, ignore_index=-100, reduction="sum")
