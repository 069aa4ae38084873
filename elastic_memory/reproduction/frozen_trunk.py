"""The tables of memories in a frozen pretrained model, made of the records of benchmarks/frozen_trunk.py."""

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_memory.report.speed import benchmark_records
from elastic_memory.report.tables import Table
from elastic_memory.reproduction.real_measures import Documents, difference, ppl_of, recall_of
from elastic_memory.reproduction.tables.real_model import BASE, DESIGNS, ELASTIC

RIVAL = "wider window"

NOTE = (
    "{model}, {corpus}, sliding attention over {window:,} tokens in all layers, a memory of order {order:,} in layer "
    "{layer}. All designs start from the model fine-tuned on {adapted:,} tokens under that window, without memory. "
    "Only the attention of that layer and the memory are trained, on {tokens:,} tokens in rows of "
    "{length:,}; {rows} test rows of {twice:,}. The first window is a control: memory is empty there. Differences are "
    "in perplexity beyond the window, with 95% intervals over documents. If a design has several seeds, perplexities "
    "are means over them, and the difference of each seed follows; seeds train on different rows. {recall}LongPPL: "
    "{keys:,} key tokens, found by the untouched model. Not a table of the paper. Measured on {hardware}, torch "
    "{torch}, commit {commit}."
)
RECALL = (
    "Recall: how much likelier, in nats per token, a repeated span of {span} tokens is than the same span in another "
    "text, where it is new, by the distance to its first occurrence; {copy_rows} rows. "
)

SUMMARY = """\
**In a pretrained model.** SmolLM2-135M with a sliding window of {window:,} tokens gets a memory in one layer, and only
that layer's attention is trained. At equal size, perplexity beyond the window falls by {rival:.1%} with a wider window
(the control), by {first:.1%} with "{best}" (the best memory), and by {alone:.1%} with elastic memory.
{verdict}All designs: [attach](docs/attach.md#which-memory).
Record: [{name}](benchmarks/results/{name}).
"""
VERDICT = "In this record no memory is as good as the wider window.\n"
LATER = (
    "A later record, made on {hardware} with a window of {window:,} and {seeds}: perplexity falls by {gains}. "
    'The lead of "{best}" over the wider window has the interval [{low:+.1%}, {high:+.1%}]. '
    "Record: [{name}](benchmarks/results/{name})."
)


def summary(root: Path) -> str:
    """The README's paragraph: the newest record with elastic memory, then those made since."""
    records = _records(root)
    newest = max(index for index, (_, record) in enumerate(records) if record["runs"].keys() & set(ELASTIC))
    path, record = records[newest]
    gains = _gains(record)
    rival = gains.pop(RIVAL)
    best = max(gains, key=lambda design: gains[design])
    alone = max(value for design, value in gains.items() if design in ELASTIC)
    known = {"rival": rival, "best": best, "first": gains[best], "alone": alone, "name": path.name}
    text = SUMMARY.format(**record["plan"], **known, verdict=VERDICT if rival > gains[best] else "")
    return text + "".join(_later(path.name, record) for path, record in records[newest + 1 :])


def _later(name: str, record: dict[str, Any]) -> str:
    """A record without elastic memory, in one sentence."""
    gains = sorted(_gains(record).items(), key=lambda pair: -pair[1])
    best = next(design for design, _ in gains if design != RIVAL)
    _, low, high = _difference(record, RIVAL, best)
    seeds = min(len(runs) for runs in record["runs"].values())
    text = LATER.format(
        window=record["plan"]["window"],
        seeds=f"{seeds} seeds" if seeds > 1 else "one seed",
        hardware=_facts(record)["hardware"],
        gains=", ".join(f'{gain:.1%} with "{design}"' for design, gain in gains),
        best=best,
        low=low,
        high=high,
        name=name,
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _gains(record: dict[str, Any]) -> dict[str, float]:
    """By how much each trained design lowers the perplexity beyond the window."""
    return {
        design: -_difference(record, design, BASE)[0]
        for design in record["runs"]
        if design != BASE and "untrained" not in DESIGNS[design]
    }


def tables(root: Path) -> str:
    """One table per record, the newest first; the best design on top."""
    return "\n".join(_table(record).markdown() for _, record in reversed(_records(root)))


def _records(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Those whose designs start from a trunk that was fine-tuned under the window, the newest last."""
    found = [(path, json.loads(path.read_text())) for path in benchmark_records(root, "frozen-trunk")]
    return [(path, record) for path, record in found if record["plan"].get("adapted")]


def _table(record: dict[str, Any]) -> Table:
    ranked = sorted(record["runs"], key=lambda design: _difference(record, design, BASE)[0])
    recall = [f"recall at {distance:,}" for distance in _distances(record)]
    window = record["plan"]["window"]
    return Table(
        f"Memories in a frozen pretrained model, behind a window of {window:,} tokens",
        ["design", "floats", "parameters", "first window", "beyond", "against no memory", f"against {RIVAL}", *recall,
         "LongPPL"],
        [_row(record, design) for design in ranked],
        NOTE.format(**_facts(record)),
    )  # fmt: skip


def _row(record: dict[str, Any], design: str) -> list[str]:
    runs, documents = list(record["runs"][design].values()), _documents(record, design)
    free = "untrained" in DESIGNS[design]
    memory = [] if free else runs[0]["memory"]
    counts = ["-" if free else f"{sum(line[key] for line in memory):,}" for key in ("state_floats", "extra_parameters")]
    longppl = _mean(math.exp(run["longppl"]["loss"] / run["longppl"]["tokens"]) for run in runs)
    return [
        design,
        *counts,
        f"{_mean(ppl_of(one, 0, 1) for one in documents):.3f}",
        f"{_mean(ppl_of(one, 1) for one in documents):.3f}",
        _against(record, design, BASE),
        _against(record, design, RIVAL),
        *(f"{_mean(recall_of(run['recall'][str(d)]) for run in runs):.3f}" for d in _distances(record)),
        f"{longppl:.2f}",
    ]


def _against(record: dict[str, Any], design: str, other: str) -> str:
    """How much higher the perplexity of `design` is than that of `other`, with its interval; and by seed if several."""
    if design == other:
        return "-"
    middle, low, high = _difference(record, design, other)
    seeds = _common(record, design, other)
    each = ", ".join(f"{_difference(record, design, other, [seed])[0]:+.2%}" for seed in seeds)
    return f"{middle:+.2%} [{low:+.2%}, {high:+.2%}]" + (f"; {each}" if len(seeds) > 1 else "")


def _difference(
    record: dict[str, Any], design: str, other: str, seeds: Sequence[str] | None = None
) -> tuple[float, float, float]:
    """The relative difference in perplexity and its interval, over `seeds` or all seeds that both designs have."""
    chosen = seeds or _common(record, design, other)
    these, those = ([record["runs"][name][seed]["documents"] for seed in chosen] for name in (design, other))
    return difference(these, those)


def _common(record: dict[str, Any], design: str, other: str) -> list[str]:
    return sorted(record["runs"][design].keys() & record["runs"][other].keys())


def _documents(record: dict[str, Any], design: str) -> list[Documents]:
    return [run["documents"] for run in record["runs"][design].values()]


def _distances(record: dict[str, Any]) -> Sequence[int]:
    """The distances at which recall was measured; none in older records."""
    return record["plan"].get("distances", ())


def _facts(record: dict[str, Any]) -> dict[str, Any]:
    plan = record["plan"]
    environments = [run["environment"] for runs in record["runs"].values() for run in runs.values()]
    every = {name: ", ".join(sorted({one[name] for one in environments})) for name in ("hardware", "torch", "commit")}
    return plan | every | {
        "model": plan["model"].removesuffix(".gguf"),
        "corpus": record["data"]["corpus"],
        "adapted": plan["adapted"]["tokens"],
        "recall": RECALL.format(**plan) if _distances(record) else "",
        "tokens": plan["steps"] * plan.get("batch", 1) * plan["length"],
        "twice": 2 * plan["length"],
        "keys": sum(len(places) for places in record["keys"].values()),
    }  # fmt: skip


def _mean(values: Any) -> float:
    held = list(values)
    return sum(held) / len(held)
