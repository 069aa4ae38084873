"""What a model gains from its memory within a run, by two controls.

Neither compares perplexities of two models, which training alone makes differ.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_memory.common.strict import read_json
from elastic_memory.report.tables import Table
from elastic_memory.reproduction.experiment import CORPUS_ORDER
from elastic_memory.reproduction.real_measures import Documents, difference

BASE = "Transformer++"

NOTE = (
    "Erased: rise in perplexity when the memory is erased at every block (P4), with its 95% interval over documents. "
    "From block 0: memory is empty in block 0; the column shows how much more perplexity falls from block 0 to the "
    "whole row than it does in Transformer++. Seeds: {seeds}. Both may overstate what memory is worth: a model that "
    "relies on its memory may be worse without it, in block 0 too, than a model trained without memory."
)


def erased(root: Path, run: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's perplexity with its memory, and with memory erased at every block."""
    measured = read_json(root / "results" / "runs" / f"{run}.json")["measured"]
    ppl = next(one["metrics"]["ppl"] for one in measured if "P4" in one["metrics"].get("ppl", {}))
    return ppl["P0"], ppl["P4"]


def gains(root: Path, tier: str = "small") -> dict[tuple[str, str], tuple[tuple[float, float, float], float]]:
    """By model and corpus: the gain by erasing with its interval, and the gain from block 0; means over seeds."""
    cells = read_json(root / "results" / f"main-{tier}.json")["cells"]
    names = {
        (cell["row"], cell["corpus"]): [run["run"] for run in cell["runs"]]
        for cell in cells
        if cell["column"].endswith(" PPL") and cell["runs"]
    }
    found = {}
    for (row, corpus), runs in names.items():
        if row == BASE or (BASE, corpus) not in names:
            continue
        pairs = [erased(root, run) for run in runs]
        by_erasing = difference([_documents(p4) for _, p4 in pairs], [_documents(p0) for p0, _ in pairs], first=0)
        falls = [_fall(root, one) for one in (runs, names[BASE, corpus])]
        found[row, corpus] = by_erasing, math.expm1(falls[0] - falls[1])
    return found


def table(root: Path, tier: str = "small") -> Table:
    """Both controls, one row a model."""
    found, records = gains(root, tier), read_json(root / "results" / f"main-{tier}.json")["cells"]
    rows = list(dict.fromkeys(row for row, _ in found))
    seeds = sorted({len(cell["runs"]) for cell in records if cell["runs"]})
    return Table(
        "What memory gains within a run",
        ["model", *(f"{corpus}: {control}" for corpus in CORPUS_ORDER for control in ("erased", "from block 0"))],
        [[row, *(text for corpus in CORPUS_ORDER for text in _texts(found.get((row, corpus))))] for row in rows],
        NOTE.format(seeds=" or ".join(map(str, seeds))),
    )


def _texts(gain: tuple[tuple[float, float, float], float] | None) -> list[str]:
    if gain is None:
        return ["-", "-"]
    (middle, low, high), from_first = gain
    return [f"{middle:.1%} [{low:.1%}, {high:.1%}]", f"{from_first:.1%}"]


def _documents(ppl: dict[str, Any]) -> Documents:
    return {name: {"loss": [loss], "tokens": [tokens]} for name, (loss, tokens) in ppl["by_document"].items()}


def _fall(root: Path, runs: Sequence[str]) -> float:
    """By how much the loss of whole rows is below that of block 0; the mean over seeds."""
    both = [erased(root, run)[0] for run in runs]
    return sum(math.log(one["by_block"][0]) - one["nll"] for one in both) / len(both)
