"""Tables of the paper that need trained models.

An `Experiment` has rows and columns of settings; where they meet is a `Cell`: a model, how it is read, what is shown. A
`Lab` trains and measures what is missing; table and JSON are written from the files that it keeps, model by model.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from elastic_memory.evaluation.metrics import Conditions
from elastic_memory.report.lab import Lab, Trained, read_kept
from elastic_memory.report.tables import Table
from elastic_memory.training.environment import environment
from elastic_memory.training.files import write_json, write_text
from elastic_memory.training.session import tell

# What a cell shows, and the metrics it takes; what takes none is counted on the model as it is built.
SHOWS: dict[str, tuple[str, ...]] = {
    "ppl": ("ppl",), "longppl": ("longppl",), "both": ("ppl", "longppl"), "mse": ("reconstruction",),
    "memory": (), "added": (), "order": (),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell(Trained):
    """One entry of a table: a model, how it is read and disturbed, and what is shown of it."""

    shows: str
    read: str | None = None  # a sampling that the model was not trained with
    corrupt: float = 0.0
    corrupt_layers: str = "memory"

    @property
    def model(self) -> Trained:
        """The model alone."""
        return Trained(**{field.name: getattr(self, field.name) for field in fields(Trained)})

    @property
    def conditions(self) -> Conditions:
        """What differs from the model as it was trained."""
        return Conditions(sampling=self.read, corrupt=self.corrupt, corrupt_layers=self.corrupt_layers)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table of the paper: its settings, which are fields of `Cell`, and its entries as printed, with & between."""

    name: str
    title: str
    columns: Mapping[str, Mapping[str, Any]]
    rows: Mapping[str, tuple[Mapping[str, Any], str]]
    corner: str = "model"  # over the names of the rows
    note: str = ""

    def cells(self) -> Iterator[tuple[str, str, Cell, str]]:
        """Row, column, what stands there, and what the paper has there."""
        for row, (settings, printed) in self.rows.items():
            for (column, more), paper in zip(self.columns.items(), printed.split("&"), strict=True):
                yield row, column, Cell(**{**settings, **more}), paper.strip()

    def run(self, tier: str, out: Path, data: Path | None = None, reference: str | None = None) -> Table:
        """Train and measure what is missing, write the results, and show them beside the paper's."""
        path = out / f"{self.name}-{tier}.json"
        _check_earlier(path, self.name, tier)
        lab = Lab(tier, out, data, reference)
        lab.require(cell.corpus for *_, cell, _ in self.cells() if SHOWS[cell.shows])
        work = self._work(lab)
        kept = sum(lab.run(model).finished for model, _ in work)
        tell(f"{self.name}, tier {tier}: {len(work)} models, {kept} of them trained before")
        for number, (model, cells) in enumerate(work, 1):
            run = lab.run(model)
            tell(f"model {number} of {len(work)}: {run.folder.name}{', kept' if run.finished else ''}")
            lab.train(model)
            for cell in cells:
                for metric in SHOWS[cell.shows]:
                    lab.measure(model, cell.conditions, metric)
            table = self._write(lab, path)
        return table

    def _work(self, lab: Lab) -> list[tuple[Trained, list[Cell]]]:
        """Every model once, with its cells; first those that find key tokens for the others."""
        cells = [cell for *_, cell, _ in self.cells() if SHOWS[cell.shows]]
        needed = [lab.own_reference(cell.corpus) for cell in cells if "longppl" in SHOWS[cell.shows]]
        work: dict[Path, tuple[Trained, list[Cell]]] = {
            lab.run(model).folder: (model, []) for model in needed if model is not None
        }
        for cell in cells:
            work.setdefault(lab.run(cell.model).folder, (cell.model, []))[1].append(cell)
        return list(work.values())

    def _write(self, lab: Lab, path: Path) -> Table:
        entries = [_entry(lab, *place) for place in self.cells()]
        table = Table(
            title=f"{self.title}; in brackets the paper's",
            columns=[self.corner, *self.columns],
            rows=[[row, *(entry["text"] for entry in entries if entry["row"] == row)] for row in self.rows],
            note=" ".join(filter(None, [_describe(lab, entries), self.note])),
        )
        facts = {"table": self.name, "tier": lab.name, "title": self.title, "note": table.note, **environment()}
        write_json(path, facts | {"cells": entries})
        write_text(path.with_suffix(".md"), table.markdown())
        return table


def _check_earlier(path: Path, name: str, tier: str) -> None:
    """Refuse to write over what is not an earlier state of the same results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    earlier = read_kept(path)
    found = [earlier.get(key) for key in ("table", "tier")] if isinstance(earlier, dict) else []
    if found != [name, tier]:
        raise ValueError(
            f"{path} holds other results ({found}) than {name} of tier {tier}: move it, or choose another --out"
        )


def _entry(lab: Lab, row: str, column: str, cell: Cell, paper: str) -> dict[str, Any]:
    """Everything about one cell: the numbers, where they come from, and the text that the table shows."""
    run = lab.run(cell.model)
    values: dict[str, float | int | None] = {}
    measured: dict[str, dict[str, Any] | None] = {}
    if not SHOWS[cell.shows]:
        values[cell.shows] = lab.counted(cell.model)[cell.shows]
    for metric in SHOWS[cell.shows]:
        path = lab.measurement(cell.model, cell.conditions, metric)
        record = read_kept(path) if path.exists() else None
        values[metric], measured[metric] = _result(record, metric) if record else (None, None)
    places = len(paper.split(" / ")[0].partition(".")[2])
    ours = " / ".join(_number(value, places) for value in values.values())
    result = read_kept(run.result) if run.finished else {}
    return {
        "row": row,
        "column": column,
        "text": f"{ours} [{paper}]",
        "paper": paper,
        "values": values,
        "corpus": cell.corpus,
        "run": run.folder.name,
        "seed": run.recipe.training.seed,
        "trained": {key: result.get(key) for key in ("tokens", "commit", "machine")},
        "measured": measured,
    }


def _result(record: dict[str, Any], metric: str) -> tuple[float | None, dict[str, Any]]:
    """The number of a record, and how it was made."""
    found = record["metrics"][metric]
    how = {"data": record["data"], "device": record["device"], "commit": record["commit"], "torch": record["torch"]}
    if metric == "reconstruction":
        # keys and values weigh the same (choices.md, "reconstruction")
        how |= {"relative": statistics.fmean(part["relative"] for part in found)}
        return statistics.fmean(part["mse"] for part in found), how
    found = found["P0"] if metric == "ppl" else found
    return found[metric], how | {"protocol": found["protocol"], "interval": found["interval"]}


def _number(value: float | int | None, places: int) -> str:
    """As the paper prints it: counts from a tenth of a million on in millions, measurements to as many places."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value / 1e6:.1f}M" if value >= 1e5 else f"{value}"
    return f"{value:.{places}f}"


def _describe(lab: Lab, entries: list[dict[str, Any]]) -> str:
    """How to read the table."""
    parts = [f"Tier {lab.name}, seed {lab.training.seed}, {lab.training.tokens:,} tokens a model.", lab.tier.caution]
    made = [(metric, how, entry) for entry in entries for metric, how in entry["measured"].items()]
    for protocol in dict.fromkeys(how["protocol"] for metric, how, _ in made if how and metric == "ppl"):
        if not ("corrupt=" in protocol or "sampling=" in protocol):
            parts.append(f"PPL[{protocol}].")
    for protocol in dict.fromkeys(
        _reference(how["protocol"]) for metric, how, _ in made if how and metric == "longppl"
    ):
        parts.append(f"LongPPL[{protocol}]; - where no token is key.")
    wanted = [how for metric, how, entry in made if metric != "longppl" or lab.reference(entry["corpus"])]
    if len(wanted) < len(made):
        parts.append("LongPPL is - without a model that finds its key tokens (--reference).")
    if None in wanted:
        parts.append(f"{wanted.count(None)} of {len(wanted)} numbers are still to come.")
    return " ".join(filter(None, parts))


def _reference(protocol: str) -> str:
    """LongPPL's protocol without what differs from cell to cell."""
    return protocol.partition(", keys=")[0]
