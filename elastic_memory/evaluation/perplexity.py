"""Perplexity under a named protocol."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic_memory.common.names import suggest
from elastic_memory.evaluation.inputs import batches, document_of
from elastic_memory.evaluation.journal import Advance, Journal, RowRecord, bootstrap, by_document
from elastic_memory.evaluation.losses import Model, Streamed, block_size_of, streamed_losses, window_losses
from elastic_memory.shapes import Float, Tensor

POSITION_BINS = 32


@dataclass(frozen=True)
class Protocol:
    """Which context a prediction sees: `losses(model, ids, block, stride)`, memory reset per `reset`."""

    reset: str
    losses: Callable[[Model, Tensor, int, int], Tensor]


PROTOCOLS = {
    "P0": Protocol("sample", lambda model, ids, block, stride: streamed_losses(model, ids, block)),
    "P1": Protocol("window", lambda model, ids, block, stride: window_losses(model, ids, block, stride)),
    "P4": Protocol("block", lambda model, ids, block, stride: window_losses(model, ids, block, block)),
}


@dataclass(frozen=True)
class Perplexity:
    """`ppl` is exp(`nll`), and `nll` the mean over all scored `tokens`, never a mean of perplexities.

    `by_block[i]` is the perplexity of the predictions made in block i, `by_position` that of those made in each
    of up to 32 equal parts of a block, `interval` the 95% bootstrap over documents (None for a single one),
    `by_document` the sum of the losses and the number of tokens of each document.
    """

    ppl: float
    nll: float
    tokens: int
    by_block: list[float]
    by_position: list[float]
    interval: tuple[float, float] | None
    by_document: dict[str, list[float]]
    protocol: str

    def __str__(self) -> str:
        spread = "" if self.interval is None else "  (95%: {:.4g} to {:.4g})".format(*self.interval)
        return f"PPL[{self.protocol}] = {self.ppl:.4g}{spread}"


def perplexity(
    model: Model,
    rows: Sequence[Any],
    protocol: str = "P0",
    *,
    block_size: int | None = None,
    stride: int | None = None,
    batch_size: int = 1,
    journal: Journal | None = None,
    advance: Advance = lambda count: None,
    streamed: Streamed | None = None,
) -> Perplexity:
    """Perplexity of any Hugging Face causal language model on rows of tokens.

    P0 streams each row block by block and carries the memory, which is reset at every row. P1 reads overlapping windows
    of one block without earlier context, one every `stride` tokens (default: a quarter of a block). P4 resets at every
    block. All three score the same tokens, each once: every token of a row but the first.

    `block_size` is needed only for models without blocks (default: the paper's); `advance` is called with the number of
    finished rows; `streamed` keeps the losses of P0 for other metrics of the same model and rows.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol {protocol!r}: {suggest(protocol, PROTOCOLS)}")
    block = block_size or block_size_of(model)
    stride = stride or max(1, block // 4)
    if not 1 <= stride <= block:
        raise ValueError(f"stride {stride}: a window of {block} tokens moves by 1 to {block}")
    if len(rows) == 0:
        raise ValueError("no rows to score")
    journal = journal or Journal()
    shared = streamed if protocol == "P0" else None
    advance(len(journal.done))
    for indices, ids in batches(rows, batch_size, journal.done):
        _check_vocabulary(model, ids, indices)
        losses = shared(ids) if shared else PROTOCOLS[protocol].losses(model, ids, block, stride)
        for index, row in zip(indices, losses, strict=True):
            journal.add(_record(index, document_of(rows, index), row, block))
        advance(len(indices))
    return _summary(journal.records(), protocol, block, stride)


def _record(index: int, document: str, losses: Float[Tensor, " prediction"], block: int) -> RowRecord:
    values = losses.double().numpy()
    if not np.isfinite(values).all():
        where = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"row {index}: the loss of token {where + 1} is {values[where]}: the model is broken")
    by_block, by_position = _parts(len(values), block)
    return {
        "row": index,
        "document": document,
        "tokens": len(values),
        "loss": float(values.sum()),
        "by_block": np.bincount(by_block, values).tolist(),
        "by_position": np.bincount(by_position, values).tolist(),
    }


def _summary(records: list[RowRecord], protocol: str, block: int, stride: int) -> Perplexity:
    losses, counts = [r["loss"] for r in records], [r["tokens"] for r in records]
    nll = math.fsum(losses) / sum(counts)
    parts = [_parts(tokens, block) for tokens in counts]
    return Perplexity(
        ppl=math.exp(nll),
        nll=nll,
        tokens=sum(counts),
        by_block=_ratios([r["by_block"] for r in records], [np.bincount(p[0]) for p in parts]),
        by_position=_ratios([r["by_position"] for r in records], [np.bincount(p[1]) for p in parts]),
        interval=bootstrap(losses, counts, [r["document"] for r in records]),
        by_document=by_document((r["document"], r["loss"], r["tokens"]) for r in records),
        protocol=_describe(protocol, block, stride, counts),
    )


def _parts(predictions: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """For each prediction its block, and its bin within the block."""
    position = np.arange(predictions)
    return position // block, position % block * min(POSITION_BINS, block) // block


def _ratios(sums: list[list[float]], counts: list[np.ndarray]) -> list[float]:
    longest = max(map(len, counts))
    total, number = np.zeros(longest), np.zeros(longest)
    for row, count in zip(sums, counts, strict=True):
        total[: len(row)] += row
        number[: len(count)] += count
    return np.exp(total / number).tolist()


def _describe(protocol: str, block: int, stride: int, counts: list[int]) -> str:
    length = f"{counts[0] + 1}" if len(set(counts)) == 1 else f"{min(counts) + 1}..{max(counts) + 1}"
    scored = f"{counts[0]} x {len(counts)}" if len(set(counts)) == 1 else f"{sum(counts)}"
    moved = f", stride={stride}" if protocol == "P1" else ""
    return f"{protocol}, L={block}{moved}, T={length}, reset={PROTOCOLS[protocol].reset}, n={scored}"


def _check_vocabulary(model: Model, ids: Tensor, indices: list[int]) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= model.config.vocab_size:
        rows = f"row {indices[0]}" if len(indices) == 1 else f"rows {indices[0]} to {indices[-1]}"
        raise ValueError(
            f"{rows}: token ids from {low} to {high}, but the model knows 0 to {model.config.vocab_size - 1}; "
            "was this data prepared with another tokenizer?"
        )
