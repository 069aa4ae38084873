"""Write the tables of `results/`, the ledger, and the results in README and docs, from the records in `results/runs`.

python scripts/results.py        # in the root of the repository
"""

from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from elastic_memory.common.strict import read_json
from elastic_memory.report import plots
from elastic_memory.report.catalogue import insert
from elastic_memory.report.speed import headline
from elastic_memory.report.tables import Table
from elastic_memory.reproduction import frozen_trunk, gains, ledger
from elastic_memory.reproduction.experiment import CORPUS_ORDER
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
- **One seed is too few to rank models.** {seeds} All models start
  from the same weights and see the same samples in the same order. Still, perplexities differ by up to {block_0:.0%}
  in block 0, where no memory can help.
- **The gain from memory is in parentheses:** how much the perplexity of a model rises when its memory is erased.
  It may overstate what memory is worth: trained without memory, the model might not need it. The first table adds a
  second control with the same limit.
- **Infini-Transformer has {infini:.1f} times the memory of the others:** its heads fix the size.
- **`proofs` has two data hashes,** 25ef764e and 04c7a0f0, for the same rows. The newer hash covers more settings of
  the tokenizer.
"""

PICTURES = {
    "PPL by block, proofs": "ppl-by-block",
    "What memory gains in each block, proofs": "gain-by-block",
    "PPL by size of the memory, proofs": "ppl-by-memory",
}

# Rows of the table of speeds, by the recipe whose first model they are.
MEASURED = {
    "Transformer++|1x": "none", "Mem. Transformer|1x": "memorizing", "Infini-Transformer|1x": "infini",
    "Melodi|1x": "melodi", "Elastic, exponential|1x": "elastic",
}  # fmt: skip

RECALL = """\
**Recall.** A two-token passkey is shown in one block and queried up to 64 blocks later. Training used distances of up
to 8 (grey). Without memory, recall is at chance. Elastic Memory with uniform sampling degrades beyond the trained
distances; with eight times the order at test time it hardly does. Infini and Means look up by content and lose little
with distance. Memorizing's queue holds four blocks. Melodi did not learn the task within 1,200 steps, the budget of
every model. Mean of three seeds; all numbers: [evaluation](docs/evaluation.md#recall).
Record: [recall-small.json](results/recall-small.json).

![Recall by distance](results/recall-small.png)
"""
SHOWN = (
    "Full attention", "Transformer++", "Elastic, uniform", "Elastic, uniform, 8x at test time", "Memorizing", "Infini",
    "Melodi", "Means",
)  # fmt: skip

ELASTIC = ("Elastic Memory, uniform", "Elastic Memory, exponential")
LANGUAGE = """\
**Language modelling.** Models of {parameters:.0f}M parameters, each trained on {tokens:.0f}M tokens. {seeds}
One seed is too few to rank models: perplexity differs by up to {block_0:.0%} even in block 0, where no memory can help.
The first table therefore measures the gain from memory within each run, by two controls, which agree to {gap:.1f}
points. Both may overstate what memory is worth. {better} on every
corpus (Infini's memory is {infini:.1f} times as large). The picture shows the first control by block on `proofs`,
mathematical text. Of {claims} claims of the paper {verdicts}.
All numbers, and how to read them: [results](results/README.md). Record: [main-small.json](results/main-small.json).
"""


def known(root: Path) -> dict[str, Any]:
    """The numbers in the texts above, from the main table and the ledger."""
    results = root / "results"
    entries = read_json(results / "main-small.json")["cells"]
    models = [entry for entry in entries if entry["column"].endswith(" PPL") and entry["runs"]]
    first = models[0]["runs"][0]["trained"]
    by_corpus: dict[str, list[float]] = {}
    for entry in models:
        by_corpus.setdefault(entry["corpus"], []).append(by_block(root, entry)[0][0])
    one = sum(len(entry["runs"]) == 1 for entry in models)
    size = {entry["row"]: entry["values"]["memory"] for entry in entries if "memory" in entry["values"]}
    judged = [claim["verdict"] for claim in read_json(results / "claims-small.json")["claims"]]
    held, not_held, open_ones = (judged.count(verdict) for verdict in (ledger.HELD, ledger.NOT_HELD, ledger.UNDECIDED))
    return {
        "parameters": first["parameters"] / 1e6,
        "tokens": first["tokens"] / 1e6,
        "seeds": f"{one} of {len(models)} models have one seed so far." if one else "All models have several.",
        "block_0": max(max(found) / min(found) - 1 for found in by_corpus.values()),
        "infini": size["Infini-Transformer"] / size["Elastic Memory, exponential"],
        **compared_gains(root),
        "claims": len(judged),
        "verdicts": f"{held} hold, {not_held} do not, {open_ones} are undecided, and "
        f"{len(judged) - held - not_held - open_ones} are not fully measured yet",
    }


def by_block(root: Path, entry: dict[str, Any]) -> tuple[list[float], list[float]]:
    """A model's perplexity in each block, with its memory and with it erased; the mean over seeds, of losses."""
    found = [[one["by_block"] for one in gains.erased(root, run["run"])] for run in entry["runs"]]
    streamed, erased = np.exp(np.log(found).mean(0)).tolist()
    return streamed, erased


def compared_gains(root: Path) -> dict[str, Any]:
    """By how much the two controls differ at most, and which models gain more than Elastic Memory on every corpus."""
    found = gains.gains(root)
    by_erasing = {place: middle for place, ((middle, *_), _) in found.items()}
    elastic = {corpus: max(by_erasing[row, corpus] for row in ELASTIC) for corpus in CORPUS_ORDER}
    rows = dict.fromkeys(row for row, _ in found if row not in ELASTIC)
    more = [row for row in rows if all(by_erasing[row, corpus] > elastic[corpus] for corpus in CORPUS_ORDER)]
    better = (
        f"{' and '.join(more)} gain more than Elastic Memory" if more else "No model gains more than Elastic Memory"
    )
    return {"gap": 100 * max(abs(first[0] - second) for first, second in found.values()), "better": better}


def overview(root: Path) -> str:
    """The README's results: recall by distance, the main table, speed; each with a link to its record."""
    picture = "![What memory gains in each block](results/gain-by-block-small.png)\n"
    speed = f"**Speed.** {headline(root)}"
    links = "Records: [speed](results/speed-paper.json), [peers and streams](benchmarks/results).\n"
    language = LANGUAGE.format(**known(root))
    gained = gains.table(root).markdown()
    return "\n".join([RECALL, language, gained, picture, main(root), frozen_trunk.summary(root), speed, links])


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
    return "\n".join([*lines[:4], *shown, *lines[4 + len(rows) :]]) + "\n"


def plan(root: Path) -> str:
    """Time and cost of the paper's runs on eight H200, estimated from the runs in `results/`."""
    devices, price, rows = 8, 2.5, []
    measured, record = measurements(root / "results"), read_json(root / "results" / "speed-paper.json")
    steps = {
        MEASURED[name]: cell["training"] * record["length"]
        for name, cell in record["cells"].items()
        if name in MEASURED
    }
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
            timed = f"{steps[path.stem] / 1e3:.0f}k"
            rows.append([f"paper/{path.stem}", str(len(plans)), speed, timed, hours, *every])
    columns = [
        "recipe",
        "models",
        "tokens/s per GPU, first model",
        "measured",
        "hours, first model",
        "hours, all",
        "cost, all",
    ]
    note = (
        f"40B tokens per model on {devices} H200 at {price} per GPU-hour, scaled from the runs in `results/runs`. "
        "Measured: training steps of the first model ([speed](speed.md))."
    )
    return Table("The plan", columns, rows, note).markdown()


def pictures(root: Path) -> None:
    """Plots: of the main table's models on proofs PPL and gain from memory by block; PPL against the size of memory."""
    results, ppl, gain = root / "results", {}, {}
    for entry in read_json(results / "main-small.json")["cells"]:
        if entry["column"] == "{proofs} PPL" and entry["runs"]:
            streamed, erased = by_block(root, entry)
            blocks = list(range(len(streamed)))
            ppl[entry["row"]] = (blocks, streamed)
            gain[entry["row"]] = (blocks, [100 * (b / a - 1) for a, b in zip(streamed, erased, strict=True)])
    sizes: dict[str, tuple[list[float], list[float]]] = {}
    for entry in read_json(results / "memory-scaling-small.json")["cells"]:
        if entry["values"].get("ppl"):
            x, y = sizes.setdefault(entry["row"], ([], []))
            x.append(int(entry["column"].partition("x")[0]))
            y.append(entry["values"]["ppl"])
    plots.save(plots.lines(ppl, "block of 512 tokens", "PPL"), results / "ppl-by-block-small.png")
    plots.save(
        plots.lines(gain, "block of 512 tokens", "PPL without its memory, % higher"),
        results / "gain-by-block-small.png",
    )
    by_memory = plots.lines(sizes, "size of the memory", "PPL")
    by_memory.axes[0].set_xscale("log", base=2)
    by_memory.axes[0].xaxis.set_major_formatter("{x:g}x")
    plots.save(by_memory, results / "ppl-by-memory-small.png")
    plots.save(recall_picture(root), results / "recall-small.png")


def recall_picture(root: Path) -> Figure:
    """Share of right answers by distance, of the rows that most readers look for; the mean over seeds."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for cell in read_json(root / "results" / "recall-small.json")["rows"]:
        if cell["row"] in SHOWN:
            x, y = found.setdefault(cell["row"], ([], []))
            x.append(cell["distance"])
            y.append(100 * cell["accuracy"])
    figure = plots.lines(found, "blocks between passkey and question", "right answers, %")
    figure.axes[0].axvspan(1, recall.TRAINED - 1, color="black", alpha=0.06, lw=0)
    figure.axes[0].set_xscale("log", base=2)
    figure.axes[0].xaxis.set_major_formatter("{x:g}")
    return figure


def index(root: Path) -> str:
    """`results/README.md`: an introduction and all tables."""
    names = [f"{name}-small" for name in (*experiments(), "real-model", "claims")]
    tables = "\n".join(
        [gains.table(root).markdown(), *((root / "results" / f"{name}.md").read_text() for name in names)]
    )
    shown = "\n".join(f"![{title}]({name}-small.png)\n" for title, name in PICTURES.items())
    recalled = (root / "results" / "recall-small.md").read_text()
    frozen = ["## In a pretrained model whose other layers are frozen\n", frozen_trunk.tables(root)]
    return "\n".join([INDEX.format(**known(root)), tables, shown, "## Recall\n", recalled, *frozen])


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
    pages = [
        ("README.md", overview(root), "results"),
        ("docs/training.md", plan(root), "plan"),
        ("docs/evaluation.md", recall_table(root), "recall"),
        ("docs/attach.md", frozen_trunk.tables(root), "frozen"),
    ]
    for page, text, name in pages:
        path = root / page
        path.write_text(insert(path.read_text(encoding="utf-8"), text, name), encoding="utf-8")


if __name__ == "__main__":
    write(Path.cwd())
