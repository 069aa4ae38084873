"""Multi-query associative recall, in the layout of Zoology (arXiv 2312.04927, HazyResearch/zoology).

A row begins with pairs of a key and a value, each key once. Then each key comes once more, at an even distance that
follows a power law, and the model is to predict its value there. All other tokens are random.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from elastic_memory.evaluation.losses import Model, block_size_of, streamed_logits
from elastic_memory.shapes import Int, Tensor

IGNORED = -100
BLOCKS = 4  # of a row
PAIRS = (4, 8, 16, 32, 64)
VOCABULARY = 8_192  # Zoology's


@dataclass(frozen=True)
class MQAR:
    """Share of keys whose value was predicted, beside that of guessing among all values."""

    pairs: int
    length: int
    accuracy: float
    chance: float


def examples(
    count: int, length: int, pairs: int, vocabulary: int, random: np.random.Generator, power: float = 0.01
) -> tuple[Int[Tensor, "row token"], Int[Tensor, "row token"]]:
    """Rows and their labels: at the second place of a key its value, elsewhere -100."""
    if length % 2 or 4 * pairs > length or vocabulary <= length:
        raise ValueError(
            f"{pairs} pairs in rows of {length} tokens, vocabulary {vocabulary}: give an even length of {4 * pairs} or "
            "more, below the vocabulary"
        )
    half, places = vocabulary // 2, (length - 2 * pairs) // 2
    weights = np.arange(1, places + 1) ** (power - 1.0)
    weights /= weights.sum()
    rows = random.integers(vocabulary, size=(count, length))
    labels = np.full((count, length), IGNORED)
    for row, label in zip(rows, labels, strict=True):
        keys = random.choice(np.arange(1, half), pairs, replace=False)
        values = random.choice(np.arange(half, vocabulary), pairs, replace=False)
        row[: 2 * pairs : 2], row[1 : 2 * pairs : 2] = keys, values
        asked = 2 * pairs + 2 * random.choice(places, pairs, replace=False, p=weights)
        row[asked], label[asked] = keys, values
    return torch.from_numpy(rows), torch.from_numpy(labels)


def sizes(model: Model) -> tuple[int, int, list[int]]:
    """Row length (four blocks), vocabulary size, and the numbers of pairs that fit such rows."""
    length = BLOCKS * block_size_of(model) // 2 * 2
    vocabulary = min(model.config.vocab_size, max(VOCABULARY, 2 * length))
    pairs = [number for number in PAIRS if 4 * number <= length and 4 * number <= vocabulary]
    if vocabulary <= length or not pairs:
        raise ValueError(
            f"a vocabulary of {vocabulary} for rows of {length} tokens: MQAR needs more tokens than a row has"
        )
    return length, vocabulary, pairs


def mqar(model: Model, pairs: int, samples: int = 64, seed: int = 1) -> MQAR:
    """Accuracy with so many pairs, rows streamed block by block."""
    length, vocabulary, _ = sizes(model)
    rows, labels = examples(samples, length, pairs, vocabulary, np.random.default_rng([seed, pairs]))
    hits = []
    for piece, logits in streamed_logits(model, rows, block_size_of(model)):
        wanted = labels[:, piece]
        hits.append((logits.argmax(-1).cpu() == wanted)[wanted != IGNORED])
    right = torch.cat(hits).float().mean()
    return MQAR(pairs, length, float(right), 1 / (vocabulary - vocabulary // 2))


def batches(model: Model, steps: int, rows: int = 32, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Training batches, which cycle through the numbers of pairs."""
    length, vocabulary, pairs = sizes(model)
    random = np.random.default_rng(seed)
    for step in range(steps):
        yield examples(rows, length, pairs[step % len(pairs)], vocabulary, random)
