"""Rows of tokens as inputs: rows of any kind, a subset of rows, batches."""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from elastic_memory.shapes import Int, Tensor


def token_ids(row: Any) -> Int[Tensor, " token"]:
    """The tokens of a row: a mapping with `input_ids`, a tensor, an array or a list."""
    values = row["input_ids"] if isinstance(row, Mapping) else row
    return torch.as_tensor(np.asarray(values, dtype=np.int64)).reshape(-1)


def document_of(rows: Any, index: int) -> str:
    """The document of row `index`; without that information every row is its own document."""
    return str(rows.document(index) if hasattr(rows, "document") else index)


class Spread(Sequence[Any]):
    """`count` of many rows, evenly spread, so that they come from as many documents as possible."""

    def __init__(self, rows: Any, count: int):
        self.rows = rows
        self.indices = [i * len(rows) // count for i in range(count)] if count < len(rows) else range(len(rows))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[self.indices[index]]

    def document(self, index: int) -> str:
        """The document of a row."""
        return document_of(self.rows, self.indices[index])


def batches(rows: Sequence[Any], size: int, done: Container[int]) -> Iterator[tuple[list[int], Tensor]]:
    """Up to `size` consecutive rows of equal length at a time, without those already done."""
    indices: list[int] = []
    held: list[Tensor] = []
    for index in (i for i in range(len(rows)) if i not in done):
        ids = token_ids(rows[index])
        if len(ids) < 2:
            raise ValueError(f"row {index} has {len(ids)} tokens: the shortest that can be scored has 2")
        if held and (len(held) == size or len(held[0]) != len(ids)):
            yield indices, torch.stack(held)
            indices, held = [], []
        indices.append(index)
        held.append(ids)
    if held:
        yield indices, torch.stack(held)
