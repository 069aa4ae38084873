"""Measurements of one model of `real_model.Study`, and the comparison of two."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from elastic_memory.evaluation.inputs import batches, document_of, token_ids
from elastic_memory.evaluation.longppl import Settings, key_positions
from elastic_memory.shapes import Tensor

Documents = dict[str, dict[str, list[float]]]  # sum of losses and number of tokens, by document and part of the row
Read = Callable[[Tensor], Tensor]  # losses of rows of tokens


def row_losses(read: Read, rows: Sequence[Any]) -> list[np.ndarray]:
    """The loss of every token of every row but its first."""
    return [row for _, ids in batches(rows, 8, ()) for row in read(ids).double().numpy()]


def by_document(rows: Any, losses: Sequence[np.ndarray], part: int) -> Documents:
    """Sums by document and part of the row; a part has `part` tokens."""
    found: Documents = {}
    for index, row in enumerate(losses):
        parts = np.arange(len(row)) // part
        held = found.setdefault(document_of(rows, index), {"loss": [], "tokens": []})
        for name, values in (("loss", np.bincount(parts, row)), ("tokens", np.bincount(parts).astype(float))):
            before = np.zeros(len(values)) if not held[name] else np.array(held[name])
            held[name] = (before + values).tolist()
    return found


def find_keys(reference: Any, rows: Any, count: int, window: int) -> dict[str, list[int]]:
    """LongPPL's key tokens in `count` evenly spread rows, cut at the reference's maximum length: those that it predicts
    much better from the whole row than from a window.
    """
    settings = Settings(trunc_len=window, sliding_window=max(1, window // 4))
    limit = reference.config.max_position_embeddings
    chosen = sorted({index * len(rows) // count for index in range(count)})
    return {str(index): key_positions(reference, token_ids(rows[index])[:limit], settings) for index in chosen}


def key_loss(losses: Sequence[np.ndarray], keys: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Sum of the losses of key tokens, and their number."""
    picked = [losses[int(index)][np.array(places, dtype=int) - 1] for index, places in keys.items()]
    return {"loss": math.fsum(x for row in picked for x in row), "tokens": sum(len(row) for row in picked)}


def recall_of(held: Mapping[str, Sequence[float]]) -> float:
    """Recall in nats per token, from `copy_losses`: how much lower the loss of copies is than in another text."""
    other, copy, tokens = (math.fsum(sums[part] for sums in held.values()) for part in range(3))
    return (other - copy) / tokens


def ppl_of(documents: Documents, first: int = 0, last: int | None = None) -> float:
    """Perplexity over the parts `first` to `last - 1` of all rows."""
    sums = {
        name: math.fsum(x for held in documents.values() for x in held[name][first:last]) for name in ("loss", "tokens")
    }
    return math.exp(sums["loss"] / sums["tokens"])


def difference(these: Sequence[Documents], those: Sequence[Documents], first: int = 1) -> tuple[float, float, float]:
    """How much higher, as a share, the perplexity of `these` runs is than that of `those`, with its 95% interval.

    The bootstrap is over documents; a document's losses are averaged over the runs.
    """
    names = sorted(those[0])
    gap = np.array([_mean_loss(these, name, first) - _mean_loss(those, name, first) for name in names])
    tokens = np.array([sum(those[0][name]["tokens"][first:]) for name in names])
    draws = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), size=2000)
    low, high = np.quantile(np.expm1((draws @ gap) / (draws @ tokens)), [0.025, 0.975])
    return math.expm1(gap.sum() / tokens.sum()), float(low), float(high)


def _mean_loss(runs: Sequence[Documents], name: str, first: int) -> float:
    return float(np.mean([sum(run[name]["loss"][first:]) for run in runs]))
