"""One self-contained page from a folder of results.

1. `collect` walks the folder and sorts what it knows: tables in Markdown with the pictures beside them, evaluations,
   results of training, and the runs' own logs. Everything else is counted, not guessed at.
2. `page` writes it as HTML that asks the network for nothing: styles and pictures are inside, scripts there are none.
"""

import base64
import html
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_memory.common.strict import parse_json, read_json
from elastic_memory.report import plots
from elastic_memory.report.tables import Table, number

# a run's result, checkpoints and model, or a prepared corpus: a folder that one of these files says all about
CLOSED = {"run.json": "run", "manifest.json": "corpus"}
PROTOCOL_NOTE = "L: tokens of a block; T: of a row; reset: when memory is emptied; n: predictions a row x rows."
POINTS = 400  # of a loss curve: more would not be seen

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { font-weight: 600; line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
figure { margin: 1.5rem 0; overflow-x: auto; } img { max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { padding: .2rem .8rem; text-align: right; white-space: nowrap; } tr:nth-child(even) td { background: #f6f6f6; }
th { border-bottom: 1px solid #888; } th:first-child, td:first-child { text-align: left; }
figcaption, footer { color: #555; font-size: 13px; max-width: 60rem; }
"""


@dataclass
class Results:
    """What a folder holds, by kind; each with the path it came from, relative to the folder."""

    tables: dict[str, Table] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainings: dict[str, dict[str, Any]] = field(default_factory=dict)
    curves: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.tables, self.pictures, self.evaluations, self.trainings, self.curves))


def collect(folder: Path) -> Results:
    """Sort the results below a folder; a file that is broken is an error, one of another kind is left out."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: give one with results, such as --out of `elastic reproduce`")
    found = Results()
    for path in _files(folder):
        _sort(path, path.relative_to(folder).as_posix(), found)
    if not found:
        raise ValueError(
            f"{folder} holds no results: expected tables of `elastic reproduce`, JSON of `elastic evaluate --out`, "
            "or runs of `elastic train`"
        )
    return found


def page(folder: Path, title: str = "Results") -> str:
    """The page, as HTML."""
    results = collect(folder)
    parts = [*_perplexity(results), *_training(results), *_tables(results), _left_out(results)]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join([f"<h1>{html.escape(title)}</h1>", *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def perplexity_by_block(evaluations: Iterable[dict[str, Any]]) -> list[Table]:
    """One table per protocol, since protocols do not compare: a column per checkpoint, a line per block."""
    columns: dict[str, dict[str, list[float]]] = {}
    for checkpoint, result in _perplexities(evaluations):
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


def _files(folder: Path) -> Iterator[Path]:
    """Every file, in order; of a run only its metrics and its result, of a prepared corpus none, nothing hidden."""
    closed = next((kind for name, kind in CLOSED.items() if (folder / name).is_file()), None)
    if closed:
        names = ("metrics.jsonl", "result.json") if closed == "run" else ()
        yield from (folder / name for name in names if (folder / name).is_file())
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.is_symlink():
            continue
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _sort_record(content: dict[str, Any], path: Path, name: str, found: Results) -> None:
    """A run's record of `elastic reproduce`: its training, and what was measured of it as it was trained."""
    if content["trained"]:
        found.trainings[name] = content["trained"]
    for entry in content["measured"]:
        if (
            "ppl" in entry.get("metrics", {})
            and not entry["conditions"]["corrupt"]
            and not entry["conditions"]["sampling"]
        ):
            _check_evaluation(entry, path)
            found.evaluations[name] = entry


def _sort(path: Path, name: str, found: Results) -> None:
    content = read_json(path) if path.suffix == ".json" else None
    table = _parse(path) if path.suffix == ".md" else None
    if table:
        found.tables[name] = table
    elif path.suffix == ".png":
        found.pictures[name] = _png(path)
    elif path.name == "metrics.jsonl":
        found.curves[path.parent.name] = _steps(path)
    elif isinstance(content, dict) and {"trained", "measured", "tier"} <= content.keys():
        _sort_record(content, path, name, found)
    elif isinstance(content, dict) and isinstance(content.get("metrics"), dict):
        _check_evaluation(content, path)
        found.evaluations[name] = content
    elif isinstance(content, dict) and {"final_loss", "tokens", "name"} <= content.keys():
        found.trainings[name] = content
    elif not path.with_suffix(".md").exists():  # a table's own data says nothing that the table does not
        found.left_out.append(name)


def _parse(path: Path) -> Table | None:
    """What `Table.markdown` wrote; None for any other page."""
    first, *rest = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
    bold = re.fullmatch(r"\*\*(.+)\*\*", first)
    rows = [[cell.strip() for cell in line.strip()[1:-1].split(" | ")] for line in rest if line.startswith("|")]
    if not bold or len(rows) < 2:
        return None
    columns, _, *cells = rows
    for row in cells:
        if len(row) != len(columns):
            raise ValueError(f"{path}: {len(columns)} columns, but a row has {len(row)}: {' | '.join(row)[:80]}")
    note = " ".join(line for line in rest if line and not line.startswith("|"))
    return Table(bold[1], columns, cells, note)


def _png(path: Path) -> bytes:
    content = path.read_bytes()
    if not content.startswith(b"\x89PNG"):
        raise ValueError(f"{path}: not a PNG picture")
    return content


def _steps(path: Path) -> list[dict[str, Any]]:
    """The steps of a run; a last line without an end was being written and does not count."""
    *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    steps = [parse_json(line, f"{path} line {index}") for index, line in enumerate(whole, 1)]
    for index, step in enumerate(steps, 1):
        try:
            step |= {"tokens": int(step["tokens"]), "loss": float(step["loss"])}
        except (TypeError, LookupError, ValueError):
            raise ValueError(f"{path} line {index}: a step has `tokens` and `loss`, this is {str(step)[:80]}") from None
    return steps


def _check_evaluation(content: dict[str, Any], path: Path) -> None:
    """Refuse, before anything is drawn, what `elastic evaluate` would not have written."""
    metrics, known = content["metrics"], content.get("checkpoint")
    others = [it for name, result in metrics.items() if name != "ppl" for it in _list(result)]
    if not isinstance(known, str) or not all(isinstance(it, dict) for it in [metrics.get("ppl", {}), *others]):
        raise ValueError(f"{path}: not an evaluation as `elastic evaluate` writes it")
    for protocol, result in metrics.get("ppl", {}).items():
        sound = isinstance(result, dict) and isinstance(result.get("protocol"), str)
        sound = sound and isinstance(result.get("by_block"), list)
        numbers = [result.get("ppl"), *result["by_block"]] if sound else []
        if not sound or not all(isinstance(it, int | float) for it in numbers):
            raise ValueError(
                f"{path}: the perplexity by {protocol} lacks its protocol or blocks, or holds what is no number"
            )


def _perplexities(evaluations: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for evaluation in evaluations:
        for result in evaluation["metrics"].get("ppl", {}).values():
            yield evaluation["checkpoint"], result


def _perplexity(results: Results) -> Iterator[str]:
    """What `elastic evaluate` measured: perplexity drawn by block, every other metric as a table."""
    if not results.evaluations:
        return
    yield "<h2>Evaluation</h2>"
    curves: dict[str, dict[str, Any]] = {}
    for checkpoint, result in _perplexities(results.evaluations.values()):
        blocks = result["by_block"]
        curves.setdefault(result["protocol"], {})[checkpoint] = (range(len(blocks)), blocks)
    for table in perplexity_by_block(results.evaluations.values()):
        yield _table(table)
    for protocol, series in curves.items():
        yield _picture(plots.png(plots.lines(series, "block", "perplexity")), f"PPL by block [{protocol}]")
    others: dict[str, list[dict[str, Any]]] = {}
    for evaluation in results.evaluations.values():
        for metric in evaluation["metrics"].keys() - {"ppl"}:
            result = evaluation["metrics"][metric]
            records = [{"checkpoint": evaluation["checkpoint"], **it} for it in _list(result)]
            others.setdefault(metric, []).extend(records)
    for metric, records in sorted(others.items()):
        yield _table(_records(metric, records))


def _training(results: Results) -> Iterator[str]:
    if not results.trainings and not results.curves:
        return
    yield "<h2>Training</h2>"
    rows = [
        [str(it["name"]), *(_cell(it.get(key)) for key in ("parameters", "tokens", "final_loss", "tokens_per_second"))]
        for it in results.trainings.values()
    ]
    if rows:
        yield _table(Table("Runs", ["run", "parameters", "tokens", "final loss", "tokens/s"], rows))
    series = {name: _curve(steps) for name, steps in results.curves.items() if steps}
    if series:
        yield _picture(plots.png(plots.lines(series, "tokens", "loss, nats a token")), "Loss while training, averaged")


def _curve(steps: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Tokens and losses, each point the mean of enough steps that noise does not hide the course."""
    group = max(1, len(steps) // POINTS, min(10, len(steps) // 20))
    groups = [steps[start : start + group] for start in range(0, len(steps), group)]
    losses = [sum(step["loss"] for step in group) / len(group) for group in groups]
    return [group[-1]["tokens"] for group in groups], losses


def _tables(results: Results) -> Iterator[str]:
    """Each table with the picture of the same name; then the pictures that belong to none."""
    pictures = dict(results.pictures)
    if results.tables or pictures:
        yield "<h2>Tables and pictures</h2>"
    for name, table in results.tables.items():
        yield _table(table)
        picture = pictures.pop(re.sub(r"\.md$", ".png", name), None)
        if picture:
            yield _picture(picture, table.title)
    for name, picture in pictures.items():
        yield _picture(picture, name)


def _records(title: str, records: Sequence[dict[str, Any]]) -> Table:
    shown = [{key: value for key, value in record.items() if not isinstance(value, dict)} for record in records]
    columns = list(dict.fromkeys(key for record in shown for key in record))
    return Table(title, columns, [[_cell(record.get(key)) for key in columns] for record in records])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_cell, value[:8])) + (" ..." if len(value) > 8 else "")
    if isinstance(value, float) and 0 < value < 1000:
        return number(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,.0f}"
    return "-" if value is None else str(value)


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table.rows]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    note = f"<figcaption>{html.escape(table.note)}</figcaption>" if table.note else ""
    return (
        f"<figure><table><caption>{html.escape(table.title)}</caption>"
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>{note}</figure>"
    )


def _picture(content: bytes, caption: str) -> str:
    text = html.escape(caption)
    encoded = base64.b64encode(content).decode()
    return f'<figure><img alt="{text}" src="data:image/png;base64,{encoded}"><figcaption>{text}</figcaption></figure>'


def _left_out(results: Results) -> str:
    if not results.left_out:
        return ""
    names = ", ".join(results.left_out[:20]) + (" ..." if len(results.left_out) > 20 else "")
    return f"<footer>Not results this page knows: {html.escape(names)}.</footer>"
