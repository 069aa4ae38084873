"""Charts as data: what the scripts of a page draw, made from results."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

POINTS = 400  # of a loss curve: a screen shows no more
BLOCK_0 = {"from": -0.5, "to": 0.5, "label": "block 0"}
CONTROL = "In block 0 there is nothing to remember yet: differences there are not memory's."


class Series(NamedTuple):
    """A line, or single points if `dots`; its colour follows from its place in the chart unless `color` is given."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    dashed: bool = False
    dots: bool = False
    color: int | None = None


@dataclass(frozen=True)
class Chart:
    """A chart; `log_x` and `log_y` are the bases of logarithmic axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    note: str = ""
    log_x: int | None = None
    log_y: int | None = None
    percent: bool = False
    categories: Sequence[str] | None = None
    marks: Sequence[dict[str, Any]] = ()
    wide: bool = False

    def data(self) -> dict[str, Any]:
        """What `charts.js` draws; values that are missing or not finite become gaps."""
        x = {"label": self.x_label, "log": self.log_x, "categories": self.categories}
        series = [{**one._asdict(), "x": [*one.x], "y": [*map(_finite, one.y)]} for one in self.series]
        y = {"label": self.y_label, "log": self.log_y, "percent": self.percent}
        parts = {"title": self.title, "note": self.note, "marks": [*self.marks], "wide": self.wide}
        return {**parts, "x": x, "y": y, "series": series}


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Short names: without the words that all begin with and without the hash at the end, if they stay different."""
    full = list(dict.fromkeys(names))
    words = [re.sub(r"-[0-9a-f]{8,10}$", "", name).split("-") for name in full]
    shared = 0
    if len(full) > 1:
        while all(len(word) > shared + 1 for word in words) and len({word[shared] for word in words}) == 1:
            shared += 1
    brief = ["-".join(word[shared:]) for word in words]
    return dict(zip(full, brief if len(set(brief)) == len(full) else full, strict=True))


def losses(curves: dict[str, list[dict[str, Any]]]) -> list[Chart]:
    """Loss while training, one line a run."""
    names = short_names(curves)
    series = [Series(names[name], *_curve(steps)) for name, steps in curves.items() if steps]
    note = "Each point is the mean of several steps."
    return [Chart("Loss while training", "tokens", "loss, nats per token", series, note, wide=True)] if series else []


def perplexities(evaluations: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Checkpoint and result of every perplexity that was measured."""
    for evaluation in evaluations:
        for result in evaluation["metrics"].get("ppl", {}).values():
            yield evaluation["checkpoint"], result


def evaluation_charts(evaluations: Sequence[dict[str, Any]]) -> list[Chart]:
    """Perplexity by block, by position in the block and by size of the memory, and what memory gains by block.

    Models that were measured on different data do not share a chart.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for evaluation in evaluations:
        data = evaluation.get("data")
        groups.setdefault(str(data.get("sha256")) if isinstance(data, dict) else "", []).append(evaluation)
    charts = []
    for data, group in groups.items():
        names = short_names(evaluation["checkpoint"] for evaluation in group)
        first, brief = next(iter(names.items()))
        shared = first.partition(brief)[0].strip("-") or f"data {data[:8]}"
        where = f": {shared}" if len(groups) > 1 else ""
        charts += [replace(chart, title=chart.title + where) for chart in _evaluation_charts(group, names)]
    return charts


def _evaluation_charts(evaluations: Sequence[dict[str, Any]], names: dict[str, str]) -> list[Chart]:
    gains = _gains(evaluations, names)
    blocks: dict[str, list[Series]] = {}
    positions: dict[str, list[Series]] = {}
    for checkpoint, result in perplexities(evaluations):
        place, by_block, by_position = result["protocol"], result["by_block"], result.get("by_position") or []
        if gains and place.startswith("P4"):
            continue  # what it gains says more
        blocks.setdefault(place, []).append(Series(names[checkpoint], range(len(by_block)), by_block))
        if len(by_position) > 1:
            middles = [(part + 0.5) / len(by_position) for part in range(len(by_position))]
            positions.setdefault(place, []).append(Series(names[checkpoint], middles, by_position))
    charts = []
    for place, series in blocks.items():
        title, note = f"Perplexity by block{_handling(place)}", f"{place}. {CONTROL}"
        charts.append(Chart(title, "block", "perplexity", series, note, marks=[BLOCK_0]))
    for place, series in positions.items():
        title, x_label = f"Perplexity by position in the block{_handling(place)}", "position, 0 first, 1 last"
        charts.append(Chart(title, x_label, "perplexity", series, f"{place}."))
    return [*gains, *charts, *_sizes(evaluations, names)]


def recall_charts(recall: dict[str, list[dict[str, Any]]]) -> list[Chart]:
    """Share of right answers by distance, one line per task and model."""
    series = []
    for name, entries in recall.items():
        entries = sorted(entries, key=lambda entry: entry["distance"])
        series.append(Series(name, [it["distance"] for it in entries], [it["accuracy"] for it in entries]))
    note = "Distance in blocks between what was said and the question about it."
    title, x_label = "Recall by distance", "distance, blocks"
    return [Chart(title, x_label, "right answers", series, note, log_x=2, percent=True)] if series else []


def paper_charts(table: dict[str, Any]) -> list[Chart]:
    """For each metric that we measured in a table of the paper, a chart of our values and one of the paper's."""
    charts = []
    title = re.sub(r",? PPL.*$", "", table["title"])
    for metric, label in (("ppl", "perplexity"), ("longppl", "LongPPL")):
        cells = [cell for cell in table["cells"] if metric in cell["values"]]
        ours, papers = _paper_series(cells, metric, _ours), _paper_series(cells, metric, _papers)
        if not ours:
            continue
        columns = dict.fromkeys(cell["column"] for cell in cells)
        names = [re.sub(r"[{}]|\s*(PPL|LongPPL|Long\.)$", "", column) or column for column in columns]
        against = f" against {cells[0]['row']}" if ours[0].dots else ""
        settings: dict[str, Any] = {"categories": names, "percent": ours[0].dots}
        y_label = "difference" if against else label
        charts.append(Chart(f"{title}: {label}{against}, ours", "", y_label, ours, wide=not papers, **settings))
        if papers:
            charts.append(Chart(f"{title}: {label}{against}, the paper's", "", y_label, papers, **settings))
    return charts


def _paper_series(
    cells: Sequence[dict[str, Any]], metric: str, read: Callable[[dict[str, Any], str], float | None]
) -> list[Series]:
    """A series per row with numbers: a line if the columns are sizes such as 1x 2x 4x.

    Else, as columns such as corpora differ far more than rows do: dots, each relative to the first row.
    """
    places = {column: place for place, column in enumerate(dict.fromkeys(cell["column"] for cell in cells))}
    steps = sum(any(letter.isdigit() for letter in column) for column in places) >= len(places) - 1
    series, first = [], {cell["column"]: read(cell, metric) for cell in cells if cell["row"] == cells[0]["row"]}
    for color, row in enumerate(dict.fromkeys(cell["row"] for cell in cells)):
        known = []
        for cell in cells:
            value, base = read(cell, metric), first.get(cell["column"])
            if cell["row"] == row and value is not None and (steps or base):
                known.append((places[cell["column"]], value if steps or not base else value / base - 1))
        if known:
            at, values = zip(*known, strict=True)
            series.append(Series(row, at, values, dots=not steps, color=color))
    if steps:
        return series
    # Dots of one column stand beside each other.
    aside = [(place - (len(series) - 1) / 2) * 0.07 for place in range(len(series))]
    return [one._replace(x=[x + shift for x in one.x]) for one, shift in zip(series, aside, strict=True)]


def carried(evaluation: dict[str, Any]) -> float | None:
    """How many numbers a model carries from block to block, if its evaluation says so."""
    layers = evaluation.get("memory")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        return None
    sizes = [layer.get("carried_floats") for layer in layers]
    return sum(sizes) if all(isinstance(size, int | float) for size in sizes) else None


def _ours(cell: dict[str, Any], metric: str) -> float | None:
    value = cell["values"][metric]
    return value if isinstance(value, int | float) else None


def _papers(cell: dict[str, Any], metric: str) -> float | None:
    """The paper's number; a cell may hold several, in the order of ours."""
    parts = str(cell.get("paper", "")).split(" / ")
    place = list(cell["values"]).index(metric)
    try:
        return float(parts[place])
    except (ValueError, IndexError):
        return None


def _handling(protocol: str) -> str:
    """What a protocol does with memory, for a title."""
    return {"P0": ", memory carried", "P4": ", memory erased at every block"}.get(protocol.split(",")[0], "")


def _gains(evaluations: Sequence[dict[str, Any]], names: dict[str, str]) -> list[Chart]:
    """How much the perplexity of each block rises when memory is erased before it (P4 against P0)."""
    series = []
    for evaluation in evaluations:
        kept, erased = (evaluation["metrics"].get("ppl", {}).get(protocol) for protocol in ("P0", "P4"))
        if kept and erased:
            pairs = zip(kept["by_block"], erased["by_block"], strict=False)
            gain = [without / with_ - 1 if with_ else None for with_, without in pairs]
            series.append(Series(names[evaluation["checkpoint"]], range(len(gain)), gain))
    note = f"How much higher the perplexity of the same model is when its memory is erased at every block. {CONTROL}"
    title, y_label = "What memory gains, by block", "rise without memory"
    return [Chart(title, "block", y_label, series, note, percent=True, marks=[BLOCK_0], wide=True)] if series else []


def _sizes(evaluations: Sequence[dict[str, Any]], names: dict[str, str]) -> list[Chart]:
    """Perplexity against the numbers a model carries from block to block, one colour per mechanism."""
    found: dict[str, list[Series]] = {}
    kinds: dict[str, int] = {}
    for evaluation in evaluations:
        result = evaluation["metrics"].get("ppl", {}).get("P0")
        size = carried(evaluation)
        if result and size is not None:
            kind = ", ".join(sorted({str(layer.get("memory")) for layer in evaluation["memory"]}))
            color, name = kinds.setdefault(kind, len(kinds)), names[evaluation["checkpoint"]]
            point = Series(name, [size], [result["ppl"]], dots=True, color=color)
            found.setdefault(result["protocol"], []).append(point)
    note = (
        "Each point is a model; one colour per kind of memory. Size: numbers carried from block to block, for one text."
    )
    title, x_label = "Memory size and perplexity", "numbers carried"
    return [
        Chart(title, x_label, "perplexity", points, f"{place}. {note}")
        for place, points in found.items()
        if len(points) > 1
    ]


def _curve(steps: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Tokens and losses, each point the mean of enough steps that noise does not hide the course."""
    group = max(1, len(steps) // POINTS, min(10, len(steps) // 20))
    groups = [steps[start : start + group] for start in range(0, len(steps), group)]
    means = [sum(step["loss"] for step in group) / len(group) for group in groups]
    return [group[-1]["tokens"] for group in groups], means


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
