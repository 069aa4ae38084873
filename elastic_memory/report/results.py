"""The README's results, written from the records that runs and benchmarks left in the repository.

python -m elastic_memory.report.results        # in the root of the repository
"""

import json
from pathlib import Path
from typing import Any

from elastic_memory.report.catalogue import insert
from elastic_memory.report.speed import headline, training
from elastic_memory.report.tables import Table


def overview(root: Path) -> str:
    """All tables, each with its protocol."""
    return "\n".join([recall(root), headline(root), training(root), small(root)])


def recall(root: Path) -> str:
    """What `elastic reproduce recall` wrote."""
    return (root / "results" / "recall.md").read_text()


def small(root: Path) -> str:
    """Runs of the tier small: too short to rank anything, long enough to see that all of it works."""
    rows = []
    for path in sorted((root / "results" / "training").glob("small-*.json")):
        run, evaluated = json.loads(path.read_text()), root / "results" / "evaluation" / path.name
        metrics: dict[str, Any] = (
            json.loads(evaluated.read_text())["metrics"]["ppl"]["P0"] if evaluated.exists() else {}
        )
        rows.append(
            [
                path.stem.removeprefix("small-"),
                f"{run['tokens'] / 1e6:.0f}M",
                f"{run['tokens_per_second'] / 1e3:.0f}k",
                f"{run['final_loss']:.2f}",
                f"{metrics['ppl']:.1f}" if metrics else "-",
                " ".join(f"{metrics['by_block'][block]:.0f}" for block in (0, 1, 15)) if metrics else "-",
            ]
        )
    columns = ["memory", "tokens", "tokens/s", "final loss", "validation PPL", "PPL of blocks 0, 1, 15"]
    note = (
        "Tier small: 34M parameters, blocks of 512, samples of 8,192 tokens of mathematical text, one seed, one H200. "
        "PPL[P0, L=512, T=8192, reset=sample, n=8191 x 48]. Residuals in float32; Melodi shared the GPU with tests. "
        "This early in training no ranking means anything."
    )
    return Table("Recipes of the tier small", columns, rows, note).markdown()


def write(root: Path) -> None:
    """Bring the README up to date."""
    readme = root / "README.md"
    readme.write_text(insert(readme.read_text(encoding="utf-8"), overview(root), "results"), encoding="utf-8")


if __name__ == "__main__":
    write(Path.cwd())
