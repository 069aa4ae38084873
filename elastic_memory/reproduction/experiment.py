"""Tables of the paper that need trained models.

An `Experiment` has rows and columns of settings. Each pair gives a `Cell`: a model, how its memory is read, and what is
shown. A cell has one run per seed and shows their mean. Tables and JSON are made from the runs' records alone.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from elastic_memory.common.files import write_json, write_text
from elastic_memory.common.strict import read_json
from elastic_memory.evaluation.longppl import FEW_KEY_TOKENS
from elastic_memory.evaluation.metrics import Conditions
from elastic_memory.report.tables import Table
from elastic_memory.reproduction.lab import Lab, Measurement, Trained
from elastic_memory.reproduction.tiers import TIERS

# What a cell can show, and the metrics that it needs; without metrics it is counted on the model itself.
SHOWS: dict[str, tuple[str, ...]] = {
    "ppl": ("ppl",), "longppl": ("longppl",), "both": ("ppl", "longppl"), "mse": ("reconstruction",),
    "memory": (), "added": (), "order": (),
}  # fmt: skip
CORPUS_ORDER = ("proofs", "books", "edu")  # the order in which corpora are worked on
SKIPPED = "skip"  # marks a cell that a table does not have


@dataclass(frozen=True, kw_only=True)
class Cell(Trained):
    """One entry of a table: a model, the conditions of its evaluation, and what is shown."""

    shows: str
    read: str | None = None  # a sampling other than that of training
    corrupt: float = 0.0
    corrupt_layers: str = "memory"
    points_with_memory: bool = False  # the number of memory tokens grows with the order

    def model(self, seed: int | None) -> Trained:
        """The model of this cell."""
        settings = {field.name: getattr(self, field.name) for field in fields(Trained)}
        points = self.multiple if self.points_with_memory else self.points
        return Trained(**settings | {"seed": seed, "points": points})

    @property
    def conditions(self) -> Conditions:
        """What differs from the model as trained."""
        return Conditions(sampling=self.read, corrupt=self.corrupt, corrupt_layers=self.corrupt_layers)

    @property
    def measurements(self) -> list[Measurement]:
        """What must be measured of each run."""
        return [(metric, self.conditions) for metric in SHOWS[self.shows]]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table of the paper: settings (fields of `Cell`), and the paper's entries as printed, separated by &.

    A column may name a corpus in braces, `{books}`; the tier's own name replaces it.
    """

    name: str
    title: str
    columns: Mapping[str, Mapping[str, Any]]
    rows: Mapping[str, tuple[Mapping[str, Any], str]]
    corner: str = "model"  # heading of the row names
    note: str = ""
    seeds: Mapping[str, int] = field(default_factory=dict)  # how many, by corpus; default 2
    tiers: tuple[str, ...] = tuple(TIERS)  # that have this table

    def cells(self) -> Iterator[tuple[str, str, Cell, str]]:
        """Row, column, cell, and the paper's entry."""
        for row, (settings, printed) in self.rows.items():
            for (column, more), paper in zip(self.columns.items(), printed.split("&"), strict=True):
                if paper.strip() != SKIPPED:
                    yield row, column, Cell(**{**settings, **more}), paper.strip()

    def models(self, lab: Lab, seeds: int | None = None) -> list[Trained]:
        """The models to train for this table, most important first: by seed, then corpus, then row."""
        if lab.name not in self.tiers:
            raise ValueError(f"tier {lab.name} has no table {self.name}: choose {' or '.join(self.tiers)}")
        cells = [cell for _, _, cell, _ in self.cells() if SHOWS[cell.shows]]
        found = []
        for number, seed in enumerate(lab.tier.seeds[:seeds]):
            for corpus in CORPUS_ORDER:
                if number < self.seeds.get(corpus, 2):
                    found += [cell.model(seed) for cell in cells if cell.corpus == corpus]
        return list(dict.fromkeys(found))

    def wanted(self, model: Trained) -> list[Measurement]:
        """The measurements that this table needs of a model, whatever its seed."""
        plain = replace(model, seed=None)
        cells = (cell for _, _, cell, _ in self.cells())
        return [pair for cell in cells if cell.model(None) == plain for pair in cell.measurements]

    def write(self, lab: Lab) -> Table:
        """Make the table from the records so far, and write it as JSON and Markdown."""
        path = lab.out / f"{self.name}-{lab.name}.json"
        self.check_earlier(path, lab.name)
        entries = [_entry(lab, *place) for place in self.cells()]
        _check_comparable(entries)
        shown = {(entry["row"], entry["column"]): entry["text"] for entry in entries}
        table = Table(
            title=self.title + ("; in brackets the paper's" if any(e["paper"] != "-" for e in entries) else ""),
            columns=[self.corner, *(column.format(**_titles(lab)) for column in self.columns)],
            rows=[[row, *(shown.get((row, column), "") for column in self.columns)] for row in self.rows],
            note=" ".join(filter(None, [_describe(lab, entries), self.note])),
        )
        facts = {"table": self.name, "tier": lab.name, "title": self.title, "note": table.note}
        write_json(path, facts | {"cells": entries})
        write_text(path.with_suffix(".md"), table.markdown())
        return table

    def check_earlier(self, path: Path, tier: str) -> None:
        """Refuse to overwrite anything but an earlier version of this table."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return
        try:
            earlier = read_json(path)
        except ValueError as error:
            raise ValueError(f"{error}: remove it, and repeat the command") from None
        found = [earlier.get(key) for key in ("table", "tier")] if isinstance(earlier, dict) else []
        if found != [self.name, tier]:
            raise ValueError(
                f"{path} holds other results ({found}), not {self.name} of tier {tier}: move it, or change --out"
            )


def _check_comparable(entries: list[dict[str, Any]]) -> None:
    """Raise if cells of one corpus differ in training rows, test rows or the reference that found key tokens."""
    seen: dict[tuple[str, ...], tuple[str, str]] = {}
    for entry in entries:
        for run in entry["runs"]:
            for metric, how in run["measured"].items():
                # The hash of training rows covers the tokenizer's hash, which older records computed in another way.
                facts = {f"training rows ({how['data']['tokenizer'][:8]})": run["trained"]["data"]}
                facts |= {"test rows": how["data"]["sha256"]} if metric != "reconstruction" else {}
                if metric == "longppl":
                    facts["reference"] = how["reference"]["weights"]
                for name, value in facts.items():
                    first, other = seen.setdefault((entry["corpus"], name), (value, run["run"]))
                    if first != value:
                        raise ValueError(
                            f"{run['run']} and {other} have different {name}: not comparable, move one record away"
                        )


def _titles(lab: Lab) -> dict[str, str]:
    return {corpus: lab.tier.title(corpus) for corpus in CORPUS_ORDER}


def _entry(lab: Lab, row: str, column: str, cell: Cell, paper: str) -> dict[str, Any]:
    """One cell for JSON: the numbers of each seed, their provenance, and the text of the table."""
    metrics = SHOWS[cell.shows]
    values: dict[str, Any] = {metric: None for metric in metrics} or {
        cell.shows: lab.counted(cell.model(lab.tier.seeds[0]))[cell.shows]
    }
    runs = []
    for seed in lab.tier.seeds if metrics else ():
        record = lab.record(cell.model(seed))
        found = {metric: record.find(metric, asdict(cell.conditions)) for metric in metrics}
        if record.trained and any(found.values()):
            runs.append(_run(record.content, seed, {metric: entry for metric, entry in found.items() if entry}))
    for metric in metrics:
        seeds = [run["values"][metric] for run in runs if run["values"].get(metric) is not None]
        # perplexities are averaged as losses
        values[metric] = _mean(seeds, metric) if seeds else None
    entry = {"row": row, "column": column, "paper": paper, "corpus": cell.corpus, "values": values, "runs": runs}
    return entry | {"text": _text(entry, paper)}


def _run(record: dict[str, Any], seed: int, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One seed of a cell: its numbers and their provenance."""
    trained = record["trained"]
    measured = {}
    for metric, entry in found.items():
        keys = ("data", "device", "precision", "torch", "transformers", "commit", "date")
        measured[metric] = {key: entry[key] for key in keys} | _detail(entry["metrics"][metric], metric)
    facts = ("tokens", "final_loss", "parameters", "restarts", "data", "machine", "commit", "date")
    return {
        "run": record["name"],
        "seed": seed,
        "values": {metric: measured[metric]["value"] for metric in measured},
        "trained": {key: trained[key] for key in facts},
        "measured": measured,
    }


def _detail(found: Any, metric: str) -> dict[str, Any]:
    """The value of a measurement, and its details."""
    if metric == "reconstruction":
        # keys and values weigh the same (choices.md, "reconstruction")
        mse, relative = (statistics.fmean(part[key] for part in found) for key in ("mse", "relative"))
        return {"value": mse, "relative": relative}
    if metric == "longppl":
        keys = ("protocol", "interval", "by_document", "key_tokens", "reference")
        return {"value": found["longppl"]} | {key: found[key] for key in keys}
    streamed, erased = found["P0"], found.get("P4")
    detail = {"value": streamed["ppl"]} | {
        key: streamed[key] for key in ("protocol", "interval", "by_document", "by_block")
    }
    if erased:
        detail["gain"] = erased["ppl"] / streamed["ppl"] - 1
    return detail


def _mean(values: list[float], metric: str) -> float:
    if metric == "reconstruction":
        return statistics.fmean(values)
    return math.exp(statistics.fmean(map(math.log, values)))


def _text(entry: dict[str, Any], paper: str) -> str:
    """The value as the paper prints it, its spread over seeds, and for a perplexity alone the gain from memory."""
    places = 2 if paper == "-" else len(paper.split(" / ")[0].partition(".")[2])
    parts = []
    for metric, value in entry["values"].items():
        text = _number(value, places)
        seeds = [run["values"][metric] for run in entry["runs"] if run["values"].get(metric) is not None]
        if len(seeds) > 1:
            text += f"±{statistics.stdev(seeds):.{places}f}"
        if metric == "longppl" and any(
            run["measured"][metric]["key_tokens"] < FEW_KEY_TOKENS for run in _runs_with(entry, metric)
        ):
            text += "†"
        parts.append(text)
    gains = _gains(entry)
    if gains:
        parts[0] += f" ({statistics.fmean(gains):.1%})"
    return " / ".join(parts) + (f" [{paper}]" if paper != "-" else "")


def _gains(entry: dict[str, Any]) -> list[float]:
    """The gain from memory of each seed, if the cell shows a perplexity alone."""
    gains = [run["measured"]["ppl"].get("gain") for run in _runs_with(entry, "ppl")]
    return gains if list(entry["values"]) == ["ppl"] and None not in gains else []


def _runs_with(entry: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    return [run for run in entry["runs"] if metric in run["measured"]]


def _number(value: float | int | None, places: int) -> str:
    """As the paper prints it: large counts in millions, measurements with `places` decimals."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value / 1e6:.1f}M" if value >= 1e5 else f"{value}"
    return f"{value:.{places}f}"


def _describe(lab: Lab, entries: list[dict[str, Any]]) -> str:
    """The note of the table: how its numbers were made, and what is still missing."""
    runs = [run for entry in entries for run in entry["runs"]]
    measured = [(metric, how) for run in runs for metric, how in run["measured"].items()]
    parts = [f"Tier {lab.name}."]
    if runs:
        seeds, tokens = {run["seed"] for run in runs}, {run["trained"]["tokens"] for run in runs}
        several = f"seeds {_listed(seeds)} (mean ± standard deviation)" if len(seeds) > 1 else f"seed {_listed(seeds)}"
        parts = [f"Tier {lab.name}, {several}, {_listed(tokens)} tokens a model."]
    parts.append(lab.tier.caution)
    if any(map(_gains, entries)):
        parts.append(
            "In parentheses the gain from memory: how much the perplexity of a model rises when its memory is erased "
            "at every block (P4)."
        )
    protocols = dict.fromkeys(how["protocol"] for metric, how in measured if metric == "ppl")
    parts += [f"PPL[{text}]." for text in protocols if not ("corrupt=" in text or "sampling=" in text)]
    keyed = [how for metric, how in measured if metric == "longppl"]
    for text in dict.fromkeys(_reference(how) for how in keyed):
        parts.append(f"LongPPL[{text}].")
    counted = _key_counts(entries)
    if counted:
        found = ", ".join(f"{lab.tier.title(corpus)} {' or '.join(counts)}" for corpus, counts in counted.items())
        parts.append(f"Key tokens: {found}.")
    if any(how["key_tokens"] < FEW_KEY_TOKENS for how in keyed):
        parts.append(f"† fewer than {FEW_KEY_TOKENS} key tokens: too few to mean much.")
    made: dict[tuple[str, str], set[str]] = {}
    for _, how in measured:
        made.setdefault((how["device"], how["torch"]), set()).add(str(how["commit"]))
    for (device, torch), commits in sorted(made.items()):
        several = "commits" if len(commits) > 1 else "commit"
        parts.append(f"Measured on {device}, torch {torch}, {several} {', '.join(sorted(commits))}.")
    missing = sum(value is None for entry in entries for value in entry["values"].values())
    total = sum(len(entry["values"]) for entry in entries)
    if missing:
        parts.append(f"{missing} of {total} numbers are still to come.")
    return " ".join(filter(None, parts))


def _key_counts(entries: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Numbers of key tokens by corpus; more than one if several searches rounded differently."""
    counts: dict[str, set[int]] = {}
    for entry in entries:
        for run in _runs_with(entry, "longppl"):
            counts.setdefault(entry["corpus"], set()).add(run["measured"]["longppl"]["key_tokens"])
    return {corpus: [f"{count:,}" for count in sorted(found)] for corpus, found in counts.items()}


def _listed(values: set[int]) -> str:
    return ", ".join(f"{value:,}" for value in sorted(values))


def _reference(how: dict[str, Any]) -> str:
    """LongPPL's protocol without the counts of each cell, and the hash of the reference's weights."""
    return f"{how['protocol'].partition(', keys=')[0]}, weights {how['reference']['weights'][:8]}"
