"""Write the tables of `results/`, the ledger, and the results in README and docs, from the records in `results/runs`.

python scripts/results.py        # in the root of the repository
"""

from itertools import compress
from pathlib import Path

from elastic_memory.common.strict import read_json
from elastic_memory.report import plots
from elastic_memory.report.catalogue import insert
from elastic_memory.report.speed import headline
from elastic_memory.report.tables import Table
from elastic_memory.reproduction import ledger
from elastic_memory.reproduction.lab import Lab
from elastic_memory.reproduction.tables import experiments, real_model, recall
from elastic_memory.training.plan import make_plan, measurements
from elastic_memory.training.recipe import RECIPES, variants

INDEX = """\
# Results

```sh
elastic reproduce status --tier small       # what is still missing
elastic reproduce claims --tier small       # the paper's claims, judged by these numbers
python scripts/results.py                   # writes all tables of trained models again, from the records in runs/
```

Every number here was measured. A record in `runs/` is one run: recipe, seed, data hash, machine, versions, commit,
date, loss curve, and each measurement with its protocol. `claims-small.json` has every comparison with its numbers,
seeds and interval. Speed, inference and signals have records of their own in this folder.

How to read the tables:

- **The paper's values are in brackets.** The corpora `books`, `proofs` and `edu` replace PG-19, Proof-Pile and
  FineWeb-Edu. They are far smaller: perplexities on them cannot be compared with the paper's.
- **One seed per model decides no ranking.** These models differ by up to 19% in block 0, where no memory can help.
- **The gain from memory is in parentheses:** how much the perplexity of a model rises when its memory is erased. It
  shows how much the model depends on its memory, an upper bound on what the memory is worth.
"""

RECALL = """\
**Recall.** A passkey of two tokens is given in one block and asked for up to 64 blocks later; models were trained on
distances of up to 8. All memories hold the same number of floats. "8x at test time" is the same trained model as the row
above, with order and sample points raised eightfold afterwards. All memories: [results](results/README.md#recall).
Record: [recall-small.json](results/recall-small.json).
"""
SHOWN = (
    "Full attention", "Transformer++", "Elastic, uniform", "Elastic, uniform, 8x at test time", "Memorizing", "Infini",
    "Melodi", "Means",
)  # fmt: skip

LANGUAGE = """\
**Language modelling.** Models of 34M parameters, each trained on 150M tokens. The picture shows, on mathematical text
(`proofs`), how much the perplexity of each model rises when its memory is erased at every block: an upper bound on what
the memory is worth, as a model trained without memory would have adapted. One seed per model decides no ranking (they
differ by up to 19% in block 0, where no memory can help), and the paper's ranking is not reproduced yet. What is
missing, the paper's claims one by one, and how to read the numbers: [results](results/README.md).
Record: [main-small.json](results/main-small.json).
"""


def overview(root: Path) -> str:
    """The README's results: recall by distance, the main table, speed; each with a link to its record."""
    picture = "![What memory gains in each block](results/gain-by-block-small.png)\n"
    speed = f"**Speed.** {headline(root)}"
    links = "Records: [speed](results/speed-paper.json), [peers and streams](benchmarks/results).\n"
    return "\n".join([RECALL, recall_table(root), LANGUAGE, picture, main(root), speed, links])


def main(root: Path) -> str:
    """The main table without the columns that have no number of ours yet; its note says how many are missing."""
    lines = (root / "results" / "main-small.md").read_text().splitlines()
    cells = [line.split("|") for line in lines if line.startswith("|")]
    measured = [not all(cell.startswith(" - [") for cell in column[2:]) for column in zip(*cells, strict=True)]
    shorter = ["|".join(compress(row, measured)) for row in cells]
    return "\n".join([*lines[:2], *shorter, *lines[2 + len(cells) :]]) + "\n"


def recall_table(root: Path) -> str:
    """The rows of `elastic reproduce recall` that most readers look for."""
    lines = (root / "results" / "recall-small.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| passkey: ")]
    shown = [row for row in rows if row.split("|")[1].strip().removeprefix("passkey: ") in SHOWN]
    return "\n".join([line for line in lines[:4]] + shown + lines[4 + len(rows) :]) + "\n"


def plan(root: Path) -> str:
    """Time and cost of the paper's runs on eight H200, estimated from the runs in `results/`."""
    devices, price, rows = 8, 2.5, []
    measured = measurements(root / "results")
    for path in sorted((RECIPES / "paper").glob("*.yaml")):
        recipes = [] if path.stem == "base" else variants(path)
        plans = [make_plan(recipe, measured, devices, price) for recipe in recipes]
        known = [one for one in plans if one.hours is not None and one.cost is not None and one.tokens_per_second]
        if plans:
            first = known[0] if known else None
            speed = f"{(first.tokens_per_second or 0) / 1e3:.0f}k" if first else "?"
            hours = f"{first.hours:.0f}" if first else "?"
            total, cost = sum(one.hours or 0 for one in known), sum(one.cost or 0 for one in known)
            every = [f"{total:.0f}", f"{cost:,.0f}"] if len(known) == len(plans) else ["?", "?"]
            rows.append([f"paper/{path.stem}", str(len(plans)), speed, hours, *every])
    columns = ["recipe", "models", "tokens/s a GPU, first model", "hours, first model", "hours, all", "cost, all"]
    note = f"40B tokens a model on {devices} H200 at {price} a GPU and hour, from the runs in `results/runs`."
    return Table("The plan", columns, rows, note).markdown()


def pictures(root: Path) -> None:
    """Plots for the main table's models on proofs: PPL by block, and the gain from memory by block."""
    results, ppl, gain = root / "results", {}, {}
    for entry in read_json(results / "main-small.json")["cells"]:
        for run in entry["runs"][:1] if entry["column"] == "{proofs} PPL" else []:
            measured = read_json(results / "runs" / f"{run['run']}.json")["measured"]
            found = next(m["metrics"]["ppl"] for m in measured if "P4" in m["metrics"].get("ppl", {}))
            streamed, erased = found["P0"]["by_block"], found["P4"]["by_block"]
            blocks = list(range(len(streamed)))
            ppl[entry["row"]] = (blocks, streamed)
            gain[entry["row"]] = (blocks, [100 * (b / a - 1) for a, b in zip(streamed, erased, strict=True)])
    plots.save(plots.lines(ppl, "block of 512 tokens", "PPL"), results / "ppl-by-block-small.png")
    plots.save(
        plots.lines(gain, "block of 512 tokens", "PPL without its memory, % higher"),
        results / "gain-by-block-small.png",
    )


def index(root: Path) -> str:
    """`results/README.md`: an introduction and all tables."""
    names = [f"{name}-small" for name in (*experiments(), "real-model", "claims")]
    tables = "\n".join((root / "results" / f"{name}.md").read_text() for name in names)
    return "\n".join([INDEX, tables, "## Recall\n", (root / "results" / "recall-small.md").read_text()])


def write(root: Path) -> None:
    """Update tables, ledger and pages from the records."""
    lab = Lab("small", root / "results")
    for experiment in experiments().values():
        experiment.write(lab)
    real_model.run("small", root / "results", minutes=0)
    recall.run("small", root / "results", minutes=0)
    ledger.write(root / "results", "small")
    pictures(root)
    (root / "results" / "README.md").write_text(index(root), encoding="utf-8")
    pages = [("README.md", overview(root), "results"), ("docs/training.md", plan(root), "plan")]
    for page, text, name in [*pages, ("docs/evaluation.md", recall_table(root), "recall")]:
        path = root / page
        path.write_text(insert(path.read_text(encoding="utf-8"), text, name), encoding="utf-8")


if __name__ == "__main__":
    write(Path.cwd())
