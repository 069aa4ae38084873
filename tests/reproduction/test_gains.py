"""What memory gains within a run, from records whose gains are known."""

import json
import math

import pytest

from elastic_memory.reproduction.gains import gains, table

# Loss in block 0 and in later blocks, with memory and with it erased; of two documents that differ in length.
RUNS = {
    ("Transformer++", 1): (2.0, 1.9, 1.9),
    ("Transformer++", 2): (2.2, 2.1, 2.1),
    ("Some memory", 1): (2.3, 2.0, 2.15),
    ("Some memory", 2): (1.9, 1.7, 1.75),
}
BLOCKS, BLOCK = 4, 10
LENGTHS = {"short": 1, "long": 3}  # rows


def ppl(first: float, later: float) -> dict:
    """As evaluation records it; documents are worse and better by 0.1 a token."""
    documents = {
        name: [
            rows * BLOCK * (first + (BLOCKS - 1) * later) + (0.1 if name == "short" else -0.1),
            rows * BLOCKS * BLOCK,
        ]
        for name, rows in LENGTHS.items()
    }
    nll = sum(loss for loss, _ in documents.values()) / sum(tokens for _, tokens in documents.values())
    return {"by_block": [math.exp(first), *[math.exp(later)] * (BLOCKS - 1)], "nll": nll, "by_document": documents}


@pytest.fixture
def root(tmp_path):
    cells: dict[str, dict] = {}
    (tmp_path / "results" / "runs").mkdir(parents=True)
    for (row, seed), (first, later, without) in RUNS.items():
        name = f"{row}-{seed}"
        measured = [{"metrics": {}}, {"metrics": {"ppl": {"P0": ppl(first, later), "P4": ppl(first, without)}}}]
        (tmp_path / "results" / "runs" / f"{name}.json").write_text(json.dumps({"measured": measured}))
        cell = {"row": row, "corpus": "books", "column": "{books} PPL", "runs": []}
        cells.setdefault(row, cell)["runs"].append({"run": name})
    empty = {"row": "Some memory", "corpus": "edu", "column": "{edu} PPL", "runs": []}
    (tmp_path / "results" / "main-small.json").write_text(json.dumps({"cells": [*cells.values(), empty]}))
    return tmp_path


def test_both_controls_are_means_over_seeds(root):
    found = gains(root)
    assert found.keys() == {("Some memory", "books")}
    (erased, low, high), from_first = found["Some memory", "books"]
    share = (BLOCKS - 1) / BLOCKS
    assert erased == pytest.approx(math.expm1(share * (0.15 + 0.05) / 2))
    assert low == pytest.approx(erased) and high == pytest.approx(erased)  # the same in every document
    assert from_first == pytest.approx(math.expm1(share * ((0.3 + 0.2) / 2 - 0.1)))


def test_a_corpus_without_records_is_left_open(root):
    text = table(root).markdown()
    assert "| Some memory | - | - | 7.8% [7.8%, 7.8%] | 11.9% | - | - |" in text and "Seeds: 2." in text
