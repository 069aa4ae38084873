"""What a model recalls of its own text: spans that come a second time, at a chosen distance.

Every period of a text ends with a copy of what stood `distance` tokens before it. The first quarter of a copy tells
that it is one; on the rest, the loss is lower than at its first occurrence as far as that is remembered.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_memory.evaluation.inputs import batches, document_of
from elastic_memory.shapes import Int, Tensor

PERIOD = 12  # spans


def with_copies(row: Int[Tensor, " token"], distance: int, span: int) -> tuple[Tensor, list[int]]:
    """A text of the same length with copies of `span` tokens, and where each copy begins."""
    period = PERIOD * span
    if not span <= distance % period <= period - span:
        raise ValueError(f"distance {distance}: a copy of {span} tokens would be one of another copy, choose another")
    text, starts, used = row[:0], [], 0
    while len(text) + period <= len(row):
        fresh = row[used : used + period - span]
        text, used = torch.cat((text, fresh)), used + len(fresh)
        if len(text) < distance:
            fresh = row[used : used + span]  # nothing to copy yet
            used += span
        else:
            starts.append(len(text))
            fresh = text[len(text) - distance : len(text) - distance + span]
        text = torch.cat((text, fresh))
    return torch.cat((text, row[used : used + len(row) - len(text)])), starts


def copy_losses(
    read: Callable[[Tensor], Tensor], rows: Sequence[Any], distance: int, span: int
) -> dict[str, list[float]]:
    """By document: loss at the first occurrence, loss in the copy, number of tokens; `read` gives losses of rows."""
    found: dict[str, list[float]] = {}
    for indices, ids in batches(rows, 8, ()):
        texts, starts = zip(*(with_copies(row, distance, span) for row in ids), strict=True)
        for index, losses, begun in zip(indices, read(torch.stack(texts)).double(), starts, strict=True):
            held = found.setdefault(document_of(rows, index), [0.0, 0.0, 0.0])
            for start in begun:
                # the loss of token t is at t - 1
                copied = slice(start + span // 4 - 1, start + span - 1)
                first = slice(copied.start - distance, copied.stop - distance)
                held[0] += float(losses[first].sum())
                held[1] += float(losses[copied].sum())
                held[2] += copied.stop - copied.start
    return found
