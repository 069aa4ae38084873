"""One self-contained page of results, as one would show it in a group meeting: charts first, tables below them."""

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_memory.report import charts
from elastic_memory.report.charts import Chart
from elastic_memory.report.results import Results, collect
from elastic_memory.report.single_page import render
from elastic_memory.report.tables import Table, number

__all__ = ["collect", "page", "perplexity_by_block"]

PROTOCOL_NOTE = "L: tokens of a block; T: of a row; reset: when memory is emptied; n: predictions a row x rows."
MACHINE = ("device", "torch", "transformers", "python", "commit", "precision")


@dataclass(frozen=True)
class PageSection:
    """A part of the page; `folded` tables are shown when asked for."""

    id: str
    title: str
    lead: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[tuple[str, str]] = ()
    folded: Sequence[Table] = ()
    folded_title: str = ""

    def __bool__(self) -> bool:
        return bool(self.charts or self.tables or self.pictures or self.folded)


def page(path: Path, title: str = "Results") -> str:
    """The page, as HTML, of a folder, a run, an evaluation or a table."""
    results = collect(path)
    evaluations = list(results.evaluations.values())
    names = charts.short_names(it["checkpoint"] for it in evaluations)
    named = [{**it, "checkpoint": names[it["checkpoint"]]} for it in evaluations]
    every = [
        PageSection("recall", "Recall", charts=charts.recall_charts(results.recall)),
        PageSection(
            "paper",
            "Beside the paper",
            "The paper's models are larger and its corpora are others: compare the order of models, not the numbers.",
            charts=[chart for table in results.measured.values() for chart in charts.paper_charts(table)],
        ),
        PageSection(
            "evaluation",
            "Evaluation",
            charts=charts.evaluation_charts(evaluations),
            tables=[*_summary(named), *_other_metrics(named)],
            folded=perplexity_by_block(named),
            folded_title="Perplexity by block as tables",
        ),
        PageSection("training", "Training", charts=charts.losses(results.curves), tables=_runs(results)),
        PageSection("tables", "Tables and pictures", tables=[*results.tables.values()], pictures=_pictures(results)),
        _settings(results),
    ]
    sections, more = [section for section in every if section], len(results.left_out) - 5
    return render(
        "report.html",
        ("report.js",),
        {section.id: [chart.data() for chart in section.charts] for section in sections},
        title=title,
        sections=sections,
        left_out=", ".join(results.left_out[:5]) + (f" and {more} more" if more > 0 else ""),
    )


def perplexity_by_block(evaluations: Iterable[dict[str, Any]]) -> list[Table]:
    """One table per protocol, since protocols do not compare: a column per checkpoint, a line per block."""
    columns: dict[str, dict[str, list[float]]] = {}
    for checkpoint, result in charts.perplexities(evaluations):
        columns.setdefault(result["protocol"], {})[checkpoint] = [result["ppl"], *result["by_block"]]
    tables = []
    for protocol, found in columns.items():
        labels = ["all", *map(str, range(max(map(len, found.values())) - 1))]
        cells = [
            [label, *(f"{values[line]:.3f}" if line < len(values) else "-" for values in found.values())]
            for line, label in enumerate(labels)
        ]
        tables.append(Table(f"PPL by block [{protocol}]", ["block", *found], cells, PROTOCOL_NOTE))
    return tables


def _summary(evaluations: Iterable[dict[str, Any]]) -> list[Table]:
    """A line per model: perplexity with its memory and with memory erased at every block, LongPPL, size of memory."""
    rows = []
    for evaluation in evaluations:
        metrics = evaluation["metrics"]
        kept, erased = (metrics.get("ppl", {}).get(protocol, {}).get("ppl") for protocol in ("P0", "P4"))
        long = metrics.get("longppl")
        long = long.get("longppl") if isinstance(long, dict) else None
        told = [_cell(kept), _cell(erased), f"{erased / kept - 1:.1%}" if kept and erased else "-"]
        rows.append([evaluation["checkpoint"], *told, _cell(long), _cell(charts.carried(evaluation))])
    columns = ["model", "PPL", "PPL, memory erased", "rise", "LongPPL", "numbers carried"]
    note = "Rise: how much higher the perplexity is when memory is erased at every block (P4 against P0)."
    return [Table("Models", columns, rows, note)] if rows else []


def _other_metrics(evaluations: Iterable[dict[str, Any]]) -> Iterator[Table]:
    """Every metric but perplexity, as a table."""
    found: dict[str, list[dict[str, Any]]] = {}
    for evaluation in evaluations:
        for metric in evaluation["metrics"].keys() - {"ppl"}:
            result = evaluation["metrics"][metric]
            records = result if isinstance(result, list) else [result]
            found.setdefault(metric, []).extend({"checkpoint": evaluation["checkpoint"], **it} for it in records)
    for metric, records in sorted(found.items()):
        shown = [{key: value for key, value in record.items() if not isinstance(value, dict)} for record in records]
        columns = list(dict.fromkeys(key for record in shown for key in record))
        yield Table(metric, columns, [[_cell(record.get(key)) for key in columns] for record in records])


def _runs(results: Results) -> list[Table]:
    keys = ("parameters", "tokens", "final_loss", "tokens_per_second")
    rows = [[str(it["name"]), *(_cell(it.get(key)) for key in keys)] for it in results.trainings.values()]
    return [Table("Runs", ["run", "parameters", "tokens", "final loss", "tokens/s"], rows)] if rows else []


def _pictures(results: Results) -> list[tuple[str, str]]:
    """Each picture with its caption: the title of the table of the same name, or its own name."""
    titles = {re.sub(r"\.md$", ".png", name): table.title for name, table in results.tables.items()}
    return [(titles.get(name, name), base64.b64encode(it).decode()) for name, it in results.pictures.items()]


def _settings(results: Results) -> PageSection:
    """Where the recipes of the runs differ, what they share, and the machines and versions behind the numbers."""
    recipes = {str(it["name"]): dict(_flat(it["recipe"])) for it in results.trainings.values() if it.get("recipe")}
    keys = list(dict.fromkeys(key for recipe in recipes.values() for key in recipe))
    values = {key: [_cell(recipe.get(key), exact=True) for recipe in recipes.values()] for key in keys}
    differing = [key for key in keys if len(set(values[key])) > 1]
    shared = [[key, values[key][0]] for key in keys if key not in differing]
    names = charts.short_names(recipes)
    tables = []
    if differing:
        columns = ["setting", *names.values()]
        tables.append(Table("Where the recipes differ", columns, [[key, *values[key]] for key in differing]))
    records = [*results.trainings.values(), *results.evaluations.values()]
    machines: dict[tuple[str, ...], int] = {}
    for record in records:
        known = {**record, **(record.get("machine") or {})}
        told = tuple(_cell(known.get(key), exact=True) for key in MACHINE)
        machines[told] = machines.get(told, 0) + 1
    if any(set(told) != {"-"} for told in machines):
        rows = [[*told, str(count)] for told, count in machines.items()]
        tables.append(Table("Environment", [*MACHINE, "records"], rows))
    folded = [Table("In every recipe", ["setting", "value"], shared)] if shared else []
    title = "Recipes and environment"
    return PageSection("settings", title, tables=tables, folded=folded, folded_title="Shared settings")


def _flat(recipe: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in recipe.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _cell(value: Any, exact: bool = False) -> str:
    """A value as text: numbers rounded for reading, or `exact` as they were written."""
    if isinstance(value, list):
        return " ".join(_cell(it, exact) for it in value[:8]) + (" ..." if len(value) > 8 else "")
    if isinstance(value, float) and 0 < value < 1000 and not exact:
        return number(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and not (exact and isinstance(value, float)):
        return f"{value:,.0f}"
    return "-" if value is None else str(value)
