"""The order of samples: one list for the whole run, the same for every model and any number of devices.

Step s takes samples s*batch .. (s+1)*batch-1 of the list, however devices and micro-batches divide them. A run
resumed at step s starts reading there.
"""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from elastic_memory.shapes import Int, Tensor


class Schedule(Dataset):
    """Rows in training order: each epoch is a permutation drawn from (seed, epoch), epochs follow one another."""

    def __init__(self, rows: Any, samples: int, seed: int, most: int | None = None) -> None:
        if len(rows) == 0:
            raise ValueError("the prepared folder has no training rows")
        self.rows = rows
        self.ids = sample_order(len(rows), samples, seed, most)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, position: int) -> dict[str, Any]:
        row = int(self.ids[position])
        return {"input_ids": self.rows[row]["input_ids"], "row": row}

    @property
    def digest(self) -> str:
        """The hash of the order, equal for all models trained on the same samples."""
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()[:16]


def sample_order(rows: int, samples: int, seed: int, most: int | None = None) -> np.ndarray:
    """`samples` row numbers in training order; with `most`, only that many rows, spread over all, are used."""
    used = rows if most is None else min(rows, max(1, most))
    epochs = -(-samples // used)
    shuffled = [np.random.default_rng([seed, epoch]).permutation(used) for epoch in range(epochs)]
    return np.concatenate(shuffled)[:samples] * rows // used


class Collate:
    """Stacks rows into a batch; refuses tokens outside the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Inputs, labels and row numbers of some samples."""
        # numpy: torch would start all its threads for so little work, and wait for busy ones
        stacked = np.stack([item["input_ids"].numpy() for item in items])
        for item, least, most in zip(items, stacked.min(axis=1), stacked.max(axis=1), strict=True):
            if least < 0 or most >= self.vocabulary:
                raise ValueError(f"row {item['row']} has a token outside the model's vocabulary of {self.vocabulary:,}")
        input_ids: Int[Tensor, "sample token"] = torch.from_numpy(stacked)
        return {"input_ids": input_ids, "labels": input_ids, "rows": [item["row"] for item in items]}


class ReadAhead(Dataset):
    """The micro-batches of a schedule, built in a background thread during training.

    A process reads every `stride`-th sample position; `ahead` micro-batches are kept ready.
    """

    def __init__(self, schedule: Schedule, collate: Collate, stride: int, ahead: int) -> None:
        self.schedule, self.collate, self.stride, self.ahead = schedule, collate, stride, ahead
        # not a process, which would inherit the run's lock and survive a kill
        self.reader = ThreadPoolExecutor(1, "read-ahead")
        self.begun: dict[int, Future] = {}

    def __len__(self) -> int:
        return len(self.schedule)

    def __getitems__(self, positions: list[int]) -> dict[str, Any]:
        """The batch of these positions; starts building the next ones."""
        first, size = positions[0], len(positions)
        end = min(first + self.stride * self.ahead + 1, len(self) - size + 1)
        for start in range(first, end, self.stride):
            if start not in self.begun:
                self.begun[start] = self.reader.submit(self._make, start, size)
        return self.begun.pop(first).result()

    def _make(self, start: int, size: int) -> dict[str, Any]:
        return self.collate([self.schedule[position] for position in range(start, start + size)])

    def close(self) -> None:
        """Stop reading."""
        self.reader.shutdown(wait=False, cancel_futures=True)
