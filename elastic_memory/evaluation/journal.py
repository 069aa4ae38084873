"""One small record per evaluated row, kept on disk so that an evaluation can be resumed; and statistics over them."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RowRecord = dict[str, Any]
Advance = Callable[[int], None]  # is told how many more rows are done


class Journal:
    """The records of finished rows, one JSON line each, in a file named after the settings.

    An interrupted evaluation resumes after the last complete line. Without a folder nothing is written.
    """

    def __init__(self, folder: Path | None = None, **settings: Any):
        name = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.path = folder / f"{name}.jsonl" if folder else None
        self.done: dict[int, RowRecord] = {}
        if self.path and self.path.exists():
            lines = self.path.read_bytes().split(b"\n")
            # Text after the last newline is a line that was cut off.
            self.done = {record["row"]: record for record in map(json.loads, lines[:-1])}
            self.path.write_bytes(b"".join(line + b"\n" for line in lines[:-1]))

    def add(self, record: RowRecord) -> None:
        """Add a finished row."""
        self.done[record["row"]] = record
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def records(self) -> list[RowRecord]:
        """All records in the order of the rows."""
        return [self.done[row] for row in sorted(self.done)]


def by_document(records: Iterable[tuple[str, float, int]]) -> dict[str, list[float]]:
    """Sum of the losses and number of tokens of each document, from rows of (document, loss, tokens)."""
    totals: dict[str, list[float]] = {}
    for document, loss, tokens in records:
        held = totals.setdefault(document, [0.0, 0])
        held[0] += loss
        held[1] += tokens
    return totals


def bootstrap(
    losses: Sequence[float], counts: Sequence[int], documents: Sequence[str], draws: int = 1000
) -> tuple[float, float] | None:
    """The 95% bootstrap interval of exp(mean loss) over documents; None for fewer than two.

    Rows of one document are not independent, documents are.
    """
    names = {name: i for i, name in enumerate(dict.fromkeys(documents))}
    index = [names[name] for name in documents]
    total = np.bincount(index, np.asarray(losses, dtype=np.float64))
    tokens = np.bincount(index, np.asarray(counts, dtype=np.float64))
    total, tokens = total[tokens > 0], tokens[tokens > 0]
    if len(tokens) < 2:
        return None
    weights = np.random.default_rng(0).multinomial(len(tokens), np.full(len(tokens), 1 / len(tokens)), size=draws)
    low, high = np.quantile(np.exp((weights @ total) / (weights @ tokens)), [0.025, 0.975])
    return float(low), float(high)
