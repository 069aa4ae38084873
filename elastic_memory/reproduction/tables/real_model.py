"""Not in the paper: which memory is worth its floats in a pretrained model, fine-tuned for minutes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_memory.common.files import write_json, write_text
from elastic_memory.common.names import suggest
from elastic_memory.report.tables import Table
from elastic_memory.reproduction.real_measures import difference, ppl_of, recall_of
from elastic_memory.reproduction.real_model import Candidate, Setup, Study

USES = ("data", "model", "minutes", "parallel", "seeds", "designs", "keep-weights")
CORPORA = ("proofs", "books")
SEEDS = (1, 2, 3)
BASE = "no memory"  # what the others are compared with
BLOCKS = " in blocks"  # ends the name of a design with block-local attention

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PLANS = {
    "smoke": Setup(
        model=MODEL, length=256, window=64, block=16, order=16, points=16, tokens=1024, rows=8, key_rows=4, copy_rows=4,
        span=8, distances=(32, 128), history=64, recipe="laptop.yaml", keys={"training.batch_tokens": 512},
        execution={},
    ),
    "small": Setup(
        model=MODEL, length=16384, window=1024, block=256, order=540, points=540, tokens=40_000_000, rows=64,
        key_rows=16, copy_rows=8, span=64, distances=(512, 2048, 4096, 8192), history=2048, recipe="full.yaml",
        keys={}, execution={"micro_batch": 2, "save_every": 1000},
    ),
}  # fmt: skip
SECONDS = {"smoke": None, "small": 150.0}  # of a design alone on a GPU, until one was measured

# At equal order they hold the same number of floats, but for gates and lengths.
DESIGNS: dict[str, dict[str, Any]] = {
    "full attention": {"untrained": "full"},
    "attention sinks": {"untrained": "sinks"},
    BASE: {"memory": "none"},
    "elastic cells": {"memory": "elastic", "sampling": "geometric_cells"},
    "wider window": {"memory": "memorizing", "combine": "joint", "positions": "full"},
    "key-value means": {"memory": "means"},
    "merged far": {"memory": "merged", "distance": 2048},
    "merged slow keys": {"memory": "merged", "distance": 2048, "slow": 0.375},
    "half window half merged": {"memory": "recent_merged", "distance": 2048},
    "half window half merged slow keys": {"memory": "recent_merged", "distance": 2048, "slow": 0.375},
    "clock per head": {"memory": "clock"},
    "clock learned": {"memory": "clock", "rate": "learned"},
    "clock by content": {"memory": "clock", "rate": "content"},
    "dyadic bank": {"memory": "dyadic"},
    "outliers": {"memory": "outliers"},
    "elastic cells mass": {"memory": "elastic", "sampling": "geometric_cells", "mass": True},
    "elastic cells raw queries": {"memory": "elastic", "sampling": "geometric_cells", "query": "raw"},
    "elastic cells length": {"memory": "elastic", "sampling": "geometric_cells", "length": True},
    "elastic cells together": {
        "memory": "elastic", "sampling": "geometric_cells", "mass": True, "query": "raw", "length": True,
    },
    "clock by content raw queries": {"memory": "clock", "rate": "content", "query": "raw"},
    "dyadic bank together": {"memory": "dyadic", "mass": True, "query": "raw"},
    "half window half elastic": {"memory": "recent", "sampling": "geometric_cells"},
    "elastic exponential": {"memory": "elastic", "sampling": "exponential"},
    "elastic uniform": {"memory": "elastic", "sampling": "uniform"},
    "infini": {"memory": "infini"},
    "memorizing gated": {"memory": "memorizing"},
    BASE + BLOCKS: {"memory": "none"},
    "elastic cells" + BLOCKS: {"memory": "elastic", "sampling": "geometric_cells"},
    "queue" + BLOCKS: {"memory": "memorizing", "combine": "joint", "positions": "full"},
    "key-value means" + BLOCKS: {"memory": "means"},
    "merged far" + BLOCKS: {"memory": "merged", "distance": 2048},
    "clock per head" + BLOCKS: {"memory": "clock"},
}  # fmt: skip

ELASTIC = tuple(name for name, settings in DESIGNS.items() if settings.get("memory") == "elastic")


def jobs(tier: str, seeds: int, corpora: Sequence[str], designs: Sequence[str]) -> list[Candidate]:
    """Most important first: by seed, then corpus, then design. What is not trained has one seed."""
    return [
        Candidate(tier=tier, corpus=corpus, design=name.replace(" ", "-"), seed=seed, settings=_settings(name, tier))
        for seed in SEEDS[:seeds]
        for corpus in corpora
        for name in designs
        if seed == SEEDS[0] or "untrained" not in DESIGNS[name]
    ]


def _settings(name: str, tier: str) -> dict[str, Any]:
    """A memory as large as the plan says, sample points where it has them; the local attention of its name."""
    from elastic_memory.memory import MEMORIES

    settings, plan = DESIGNS[name], PLANS[tier]
    if "untrained" in settings:
        return settings
    kind = MEMORIES[settings["memory"]]
    sizes = {"order": plan.order, "points": plan.points}
    local: dict[str, Any] = {"local_attention": "sliding", "block_size": plan.block, "window": plan.window}
    if name.endswith(BLOCKS):
        local = {"local_attention": "block", "block_size": plan.window}
    return settings | {option: size for option, size in sizes.items() if kind.has_option(option)} | local


def run(
    tier: str,
    out: Path,
    data: Path | None = None,
    model: str | None = None,
    minutes: float | None = None,
    parallel: int | None = None,
    seeds: int | None = None,
    designs: str | None = None,
    keep_weights: bool = False,
) -> Table:
    """Train and measure what is missing, within the minutes given, and make the table from all records."""
    chosen, done = _chosen(designs), True
    study = Study(PLANS[tier], out, data or Path("DATA"), model, keep_weights)
    if minutes != 0:
        if data is None:
            raise ValueError(
                "table 'real-model' needs --data: a folder with rows of proofs and books in the model's tokens"
            )
        corpora = [corpus for corpus in CORPORA if (data / corpus / "manifest.json").exists()]
        if not corpora:
            raise FileNotFoundError(
                f"{data} has no rows of {' or '.join(CORPORA)}: elastic prepare TEXT --tokenizer {study.model} "
                f"--length {study.plan.length} --out {data / 'proofs'}"
            )
        done = study.run(jobs(tier, seeds or 1, corpora, chosen), minutes, parallel or 1, SECONDS[tier])
    table, rows = make(study, tier)
    out.mkdir(parents=True, exist_ok=True)
    facts = {"table": "real-model", "tier": tier, "title": table.title, "note": table.note}
    write_json(out / f"real-model-{tier}.json", facts | {"rows": rows})
    write_text(out / f"real-model-{tier}.md", table.markdown())
    if not done:
        raise ValueError(f"a model failed: see {out / 'work' / 'logs'}; what is finished is in {out}")
    return table


def status(tier: str, out: Path) -> list[str]:
    """This table's line in `elastic reproduce status`."""
    study = Study(PLANS[tier], out, Path("DATA"), None)
    every = jobs(tier, len(SEEDS), CORPORA, list(DESIGNS))
    missing = [job for job in every if study.record(job) is None]
    first = sum(job.seed == SEEDS[0] for job in missing)
    seconds = study.expected_seconds(every, SECONDS[tier])
    minutes = _text(seconds and len(missing) * seconds / 60, ".0f")
    return ["real-model", *map(str, (len(every), len(missing), first, len(missing) - first)), minutes]


def _chosen(designs: str | None) -> list[str]:
    """The designs named, separated by commas, in the order of the table."""
    named = list(DESIGNS) if designs is None else [name.strip() for name in designs.split(",")]
    for name in named:
        if name not in DESIGNS:
            raise ValueError(f"--designs: {name!r}: {suggest(name, DESIGNS)}")
    return [name for name in DESIGNS if name in named]


def make(study: Study, tier: str) -> tuple[Table, list[dict[str, Any]]]:
    """The table of what is recorded so far, and its numbers."""
    every = [(job, study.record(job)) for job in jobs(tier, len(SEEDS), CORPORA, list(DESIGNS))]
    rows = []
    for corpus in CORPORA:
        runs: dict[str, dict[int, dict[str, Any]]] = {}
        for job, record in every:
            if record is not None and job.corpus == corpus:
                runs.setdefault(job.design, {})[job.seed] = record
        rows += [_row(corpus, name, runs, study.plan) for name in DESIGNS if name.replace(" ", "-") in runs]
    return _table(rows, study.plan), rows


def _table(rows: Sequence[dict[str, Any]], plan: Setup) -> Table:
    ends = [f"to {_short(plan.window * last)}" for _, last in _parts(plan)]
    distances = ", ".join(_short(distance) for distance in plan.distances)
    return Table(
        title="A pretrained model with memory: perplexity beyond the window",
        columns=["design", "corpus", "seeds", "floats", "parameters", "first window", *ends, "beyond",
                 "against no memory", "LongPPL", f"recall at {distances}", "tokens/s training, decoding"],
        rows=[
            [row["design"], row["corpus"], ", ".join(map(str, row["seeds"])), _text(row["floats"], ","),
             _text(row["parameters"], ","), *(_text(row[name], ".3f") for name in ("first", *ends, "beyond")),
             row["text"], _text(row["longppl"], ".3f"), " ".join(_text(value, ".2f") for value in row["recall"]),
             ", ".join(_text(row[name], ",.0f") for name in ("training", "decoding"))]
            for row in rows
        ],
        note=f"Sliding attention over {plan.window:,} tokens in all layers, or blocks of as many; memory in one "
        f"layer; {plan.tokens / 1e6:g}M tokens of fine-tuning on rows of {plan.length:,}, the same for all; "
        f"{plan.rows} rows of the test split. In brackets the 95% interval over documents of the paired difference; "
        "it does not include the spread between seeds. The first window is a control: memory is empty there. Recall: "
        "how much likelier, in nats per token, a repeated span of text is than the same span in another text, where "
        "it is new, by the distance to its first occurrence. LongPPL: the untouched model finds the key tokens. Full "
        "attention and attention sinks use the untouched model; full attention breaks beyond the positions that it "
        "was trained for. Training speeds are of processes that shared a GPU; decoding is shown if it ran alone. Not "
        "a table of the paper.",
    )  # fmt: skip


def _parts(plan: Setup) -> list[tuple[int, int]]:
    """Parts of a row beyond the window that are shown together: each as long as all before it."""
    count = plan.length // plan.window
    bounds = [2**power for power in range(2, count.bit_length())]
    return list(zip([1, *bounds[:-1]], bounds, strict=True))


def _text(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _short(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:,.0f}"


def _row(corpus: str, name: str, runs: dict[str, dict[int, dict[str, Any]]], plan: Setup) -> dict[str, Any]:
    """One design on one corpus, compared with its base over the seeds that both have."""
    base = BASE + BLOCKS * name.endswith(BLOCKS)
    found, those = (runs.get(one.replace(" ", "-"), {}) for one in (name, base))
    records = list(found.values())
    documents = [record["documents"] for record in records]
    row: dict[str, Any] = {
        "design": name, "corpus": corpus, "seeds": sorted(found),
        "floats": _sum(records[0], "state_floats"), "parameters": _sum(records[0], "extra_parameters"),
        "first": _mean(ppl_of(one, 0, 1) for one in documents),
        "beyond": _mean(ppl_of(one, 1) for one in documents),
        **{
            f"to {_short(plan.window * last)}": _mean(ppl_of(one, first, last) for one in documents)
            for first, last in _parts(plan)
        },
        "longppl": _mean(_long(record) for record in records),
        "recall": [_mean(_recall(record, d) for record in records) for d in plan.distances],
        "training": _mean(record.get("result", {}).get("tokens_per_second") for record in records),
        "decoding": _mean(record["decoding"] if record["sharing"] == 1 else None for record in records),
        "by_part": [
            [ppl_of(one, part, part + 1) for part in range(len(next(iter(one.values()))["loss"]))]
            for one in documents
        ],
        "text": "-",
    }  # fmt: skip
    common = sorted(found.keys() & those.keys())
    if common and name != base and "untrained" not in DESIGNS[name]:
        pairs = [[side[seed]["documents"] for seed in common] for side in (found, those)]
        row["difference"], *row["interval"] = difference(*pairs)
        low, high = row["interval"]
        row["text"] = f"{row['difference']:+.2%} [{low:+.2%}, {high:+.2%}]"
    return row


def _sum(record: dict[str, Any], key: str) -> int | None:
    """The sum over layers with memory; None for the untouched model."""
    return None if "untrained" in record["job"]["settings"] else sum(line[key] for line in record["memory"])


def _long(record: dict[str, Any]) -> float | None:
    """LongPPL; None without key tokens."""
    held = record["longppl"]
    return math.exp(held["loss"] / held["tokens"]) if held["tokens"] else None


def _recall(record: dict[str, Any], distance: int) -> float | None:
    """Recall in nats per token; None in older records."""
    return recall_of(record["recall"][str(distance)]) if "recall" in record else None


def _mean(values: Any) -> Any:
    """The mean; None if a value is missing."""
    held = list(values)
    return None if None in held else sum(held) / len(held)
