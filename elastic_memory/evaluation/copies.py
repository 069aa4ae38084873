"""What a model recalls of its own text: spans that come a second time, at a chosen distance.

Every period of a text ends with a copy of what stood `distance` tokens before it. The same spans are also pasted into
another text, at the same places: there they interrupt the text just as much, but are new. The first quarter of a span
is not scored: the model has yet to notice the copy. How much likelier the rest is in its own text measures recall.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_memory.evaluation.inputs import document_of, token_ids
from elastic_memory.shapes import Int, Tensor

PERIOD = 12  # length of a period, in spans


def with_copies(row: Int[Tensor, " token"], distance: int, span: int) -> tuple[Tensor, list[int]]:
    """A text of the same length with copies of `span` tokens, and where each copy begins."""
    period = PERIOD * span
    if not span <= distance % period <= period - span:
        raise ValueError(
            f"distance {distance}: spans of {span} tokens every {period} would copy a copy; choose a distance whose "
            f"remainder modulo {period} is {span} to {period - span}"
        )
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
    """By document: summed losses of spans in another text and of their copies, and how many tokens are scored.

    `read` returns the losses of rows of tokens.
    """
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} rows: spans are also pasted into another row, give at least two")
    found: dict[str, list[float]] = {}
    ids = torch.stack([token_ids(rows[index]) for index in range(len(rows))])
    pairs = [with_copies(row, distance, span) for row in ids]
    texts, starts = torch.stack([text for text, _ in pairs]), pairs[0][1]
    others = texts.clone()
    for start in starts:
        others[:, start : start + span] = texts[:, start : start + span].roll(1, dims=0)
    copied, pasted = read(texts).double(), read(others).double().roll(-1, dims=0)
    for index in range(len(rows)):
        held = found.setdefault(document_of(rows, index), [0.0, 0.0, 0.0])
        for start in starts:
            scored = slice(start + span // 4 - 1, start + span - 1)  # the loss of token t is at t - 1
            held[0] += float(pasted[index, scored].sum())
            held[1] += float(copied[index, scored].sum())
            held[2] += scored.stop - scored.start
    return found
