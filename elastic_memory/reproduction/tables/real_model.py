"""Not in the paper: which memory is worth its floats in a pretrained model, fine-tuned for minutes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_memory.common.files import write_json, write_text
from elastic_memory.report.tables import Table
from elastic_memory.reproduction.real_model import Candidate, Setup, Study, difference, ppl_of

USES = ("data", "model", "minutes", "parallel", "seeds")
CORPORA = ("proofs", "books")
SEEDS = (1, 2, 3)
BASE = "no memory"  # what the others are compared with

PLANS = {
    "smoke": Setup(
        model="HuggingFaceTB/SmolLM2-135M-Instruct", length=256, window=64, block=16, order=16, points=16,
        tokens=1024, rows=8, recipe="laptop.yaml", keys={"training.batch_tokens": 512},
    ),
    "small": Setup(
        model="HuggingFaceTB/SmolLM2-135M-Instruct", length=16384, window=1024, block=256, order=540, points=540,
        tokens=40_000_000, rows=64, recipe="full.yaml", keys={"execution.micro_batch": 4},
    ),
}  # fmt: skip

# All with sliding attention over the same window. At equal order they hold the same number of floats, but for gates.
DESIGNS: dict[str, dict[str, Any]] = {
    BASE: {"memory": "none"},
    "elastic, cells": {"memory": "elastic", "sampling": "geometric_cells"},
    "wider window": {"memory": "memorizing", "combine": "joint", "positions": "full"},
    "key-value means": {"memory": "means"},
    "clock per head": {"memory": "clock"},
    "dyadic bank": {"memory": "dyadic"},
    "outliers": {"memory": "outliers"},
    "elastic, cells, mass": {"memory": "elastic", "sampling": "geometric_cells", "mass": True},
    "elastic, cells, raw queries": {"memory": "elastic", "sampling": "geometric_cells", "query": "raw"},
    "elastic, exponential": {"memory": "elastic", "sampling": "exponential"},
    "elastic, uniform": {"memory": "elastic", "sampling": "uniform"},
    "infini": {"memory": "infini"},
    "memorizing, gated": {"memory": "memorizing"},
}


def jobs(tier: str, seeds: int, corpora: Sequence[str]) -> list[Candidate]:
    """Most important first: by seed, then corpus, then design."""
    plan = PLANS[tier]
    shared = {"local_attention": "sliding", "block_size": plan.block, "window": plan.window}
    return [
        Candidate(tier=tier, corpus=corpus, design=name.replace(", ", "-").replace(" ", "-"), seed=seed,
            settings=_sized(settings, plan) | shared)
        for seed in SEEDS[:seeds] for corpus in corpora for name, settings in DESIGNS.items()
    ]  # fmt: skip


def _sized(settings: dict[str, Any], plan: Setup) -> dict[str, Any]:
    """A memory as large as the plan says; sample points where it has them."""
    from elastic_memory.memory import MEMORIES

    kind = MEMORIES[settings["memory"]]
    sizes = {"order": plan.order, "points": plan.points}
    return settings | {name: size for name, size in sizes.items() if kind.has_option(name)}


def run(
    tier: str,
    out: Path,
    data: Path | None = None,
    model: str | None = None,
    minutes: float | None = None,
    parallel: int | None = None,
    seeds: int | None = None,
) -> Table:
    """Train and measure what is missing, within the minutes given, and make the table from all records."""
    if tier not in PLANS:
        raise ValueError(f"tier {tier} has no table real-model: choose {' or '.join(PLANS)}")
    study = Study(PLANS[tier], out, data or Path("DATA"), model)
    if minutes != 0:
        if data is None:
            raise ValueError(
                "table 'real-model' needs --data: a folder with rows of proofs and books in the model's tokens"
            )
        corpora = [corpus for corpus in CORPORA if (data / corpus / "manifest.json").exists()]
        if not corpora:
            raise FileNotFoundError(
                f"{data} has no rows of {' or '.join(CORPORA)}: elastic prepare proofs --tokenizer {study.model} "
                f"--length {study.plan.length} --out {data / 'proofs'}"
            )
        if not study.run(jobs(tier, seeds or 1, corpora), minutes, parallel or 1):
            raise ValueError(f"a model failed: see {out / 'work' / 'logs'}; what is finished is kept")
    table, rows = make(study, tier)
    out.mkdir(parents=True, exist_ok=True)
    facts = {"table": "real-model", "tier": tier, "title": table.title, "note": table.note}
    write_json(out / f"real-model-{tier}.json", facts | {"rows": rows})
    write_text(out / f"real-model-{tier}.md", table.markdown())
    return table


def make(study: Study, tier: str) -> tuple[Table, list[dict[str, Any]]]:
    """The table of what is recorded so far, and its numbers."""
    every = [(job, study.record(job)) for job in jobs(tier, len(SEEDS), CORPORA)]
    rows = []
    for corpus in CORPORA:
        runs: dict[str, dict[int, dict[str, Any]]] = {}
        for job, record in every:
            if record is not None and job.corpus == corpus:
                runs.setdefault(job.design, {})[job.seed] = record
        base = runs.get(BASE.replace(" ", "-"), {})
        rows += [_row(corpus, design, found, base) for design, found in runs.items()]
    plan = study.plan
    table = Table(
        title="A pretrained model with memory: perplexity beyond the window",
        columns=["design", "corpus", "seeds", "floats", "parameters", "first window", "beyond", "against no memory"],
        rows=[
            [row["design"].replace("-", " "), row["corpus"], ", ".join(map(str, row["seeds"])), f"{row['floats']:,}",
             f"{row['parameters']:,}", f"{row['first']:.3f}", f"{row['beyond']:.3f}", row["text"]]
            for row in rows
        ],
        note=f"Sliding attention over {plan.window:,} tokens in all layers, memory in one; {plan.tokens / 1e6:g}M "
        f"tokens of fine-tuning on rows of {plan.length:,}, the same for all; {plan.rows} rows of the test split. In "
        "brackets the 95% interval over documents of the paired difference. The first window is a control: nothing is "
        "in memory there. Not a table of the paper.",
    )  # fmt: skip
    return table, rows


def _row(corpus: str, design: str, found: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """One design on one corpus, compared with the base over the seeds that both have."""
    documents = [record["documents"] for record in found.values()]
    common = sorted(found.keys() & base.keys())
    row: dict[str, Any] = {
        "design": design, "corpus": corpus, "seeds": sorted(found),
        "floats": sum(line["state_floats"] for line in found[min(found)]["memory"]),
        "parameters": sum(line["extra_parameters"] for line in found[min(found)]["memory"]),
        "first": _mean(ppl_of(one, 0, 1) for one in documents),
        "beyond": _mean(ppl_of(one, 1) for one in documents),
        "tokens_per_second": _mean(record["tokens_per_second"] for record in found.values()),
        "by_part": [
            [ppl_of(one, part, part + 1) for part in range(len(next(iter(one.values()))["loss"]))]
            for one in documents
        ],
        "text": "-",
    }  # fmt: skip
    if common and design != BASE.replace(" ", "-"):
        pairs = [[side[seed]["documents"] for seed in common] for side in (found, base)]
        row["difference"], *row["interval"] = difference(*pairs)
        low, high = row["interval"]
        row["text"] = f"{row['difference']:+.2%} [{low:+.2%}, {high:+.2%}]"
    return row


def _mean(values: Any) -> float:
    held = list(values)
    return sum(held) / len(held)
