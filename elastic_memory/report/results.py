"""Find the results in a file or a folder: tables, pictures, evaluations, training, recall.

Other files are listed as left out, and a broken file is an error.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from elastic_memory.common.strict import parse_json, read_json
from elastic_memory.report.tables import Table

# a folder with one of these files is a run or a prepared corpus, and is not searched further
CLOSED = {"run.json": "run", "manifest.json": "corpus"}
DEEPEST = 100

# What the page uses of each kind of file; there may be more.
_Pair = Annotated[list[int | float], Field(min_length=2, max_length=2)]


class _Evaluation(TypedDict):
    checkpoint: str
    metrics: dict[str, dict[str, Any] | list[dict[str, Any]]]
    machine: NotRequired[dict[str, Any] | None]


class _Training(TypedDict):
    name: str
    tokens: int | float
    steps: NotRequired[int | float | None]
    curve: NotRequired[list[_Pair]]
    recipe: NotRequired[dict[str, Any] | None]
    machine: NotRequired[dict[str, Any] | None]


class _Conditioned(TypedDict):
    metrics: NotRequired[dict[str, Any]]
    conditions: NotRequired[dict[str, Any]]


class _Record(TypedDict):
    trained: _Training | None
    measured: list[_Conditioned]


class _TableCell(TypedDict):
    row: str
    column: str
    values: dict[str, Any]


class _Measured(TypedDict):
    title: str
    cells: list[_TableCell]


@dataclass
class Results:
    """Results by kind; each with the path it came from, relative to the folder."""

    tables: dict[str, Table] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainings: dict[str, dict[str, Any]] = field(default_factory=dict)
    curves: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)  # cells of the paper's tables, theirs beside ours
    recall: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(
            (self.tables, self.pictures, self.evaluations, self.trainings, self.curves, self.measured, self.recall)
        )


def collect(path: Path) -> Results:
    """The results in a folder and all folders below it; or in one file and those of the same name beside it."""
    if path.is_file():
        files = sorted(it for it in path.parent.glob(f"{escape(path.stem)}.*") if it.suffix in (".md", ".json", ".png"))
        folder, files = path.parent, [path, *(it for it in files if it != path)]
    elif path.is_dir():
        folder, files = path, list(_files(path))
    else:
        raise FileNotFoundError(
            f"no folder or file {path}: give a run, or --out of `elastic evaluate` or `elastic reproduce`"
        )
    found = Results()
    for file in files:
        _add(file, file.relative_to(folder).as_posix(), found)
    if not found:
        raise ValueError(
            f"{path} holds no results: expected tables of `elastic reproduce`, JSON of `elastic evaluate --out`, "
            "or runs of `elastic train`"
        )
    return found


def _files(folder: Path) -> Iterator[Path]:
    """All files but hidden ones, sorted; of a run only its metrics and its result, of a prepared corpus none."""
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
        elif path.is_file():  # opening a pipe would block
            yield path


def _add_record(content: dict[str, Any], path: Path, name: str, found: Results) -> None:
    """Add a record of `elastic reproduce`: training, and measurements without corruption or another sampling."""
    _check(_Record, content, path, "a run's record as `elastic reproduce` writes it")
    trained = content["trained"]
    if trained:
        found.trainings[name] = trained
        each = trained["tokens"] / trained["steps"] if trained.get("steps") else 1
        found.curves[trained["name"]] = [
            {"tokens": step * each, "loss": loss} for step, loss in trained.get("curve", [])
        ]
    for entry in content["measured"]:
        conditions = entry.get("conditions", {})
        if "ppl" in entry.get("metrics", {}) and not conditions.get("corrupt") and not conditions.get("sampling"):
            _check_evaluation(entry, path)
            found.evaluations[name] = entry


def _add(path: Path, name: str, found: Results) -> None:
    content = read_json(path) if path.suffix == ".json" else None
    _check_depth(content, path)
    table = _markdown_table(path) if path.suffix == ".md" else None
    if table:
        found.tables[name] = table
    elif path.suffix == ".png":
        found.pictures[name] = _png(path)
    elif path.name == "metrics.jsonl":
        found.curves[path.parent.name] = _steps(path)
    elif isinstance(content, dict):
        _add_json(content, path, name, found)
    elif not path.with_suffix(".md").exists():
        found.left_out.append(name)


def _add_json(content: dict[str, Any], path: Path, name: str, found: Results) -> None:
    keys = content.keys()
    if {"trained", "measured", "tier"} <= keys:
        _add_record(content, path, name, found)
    elif isinstance(content.get("metrics"), dict):
        _check_evaluation(content, path)
        found.evaluations[name] = content
        for entry in _list(content["metrics"].get("recall", [])):
            _add_recall({"row": content["checkpoint"], **entry}, path, found)
    elif {"final_loss", "tokens", "name"} <= keys:
        _check(_Training, content, path, "the result of a run as `elastic train` writes it")
        found.trainings[name] = content
    elif {"table", "title", "cells"} <= keys:
        _check(_Measured, content, path, "a table as `elastic reproduce` writes it")
        found.measured[name] = content
    elif content.get("table") == "recall":
        for entry in _list(content.get("rows")):
            _add_recall(entry, path, found)
    elif not path.with_suffix(".md").exists():  # a table's own data says nothing that the table does not
        found.left_out.append(name)


def _add_recall(entry: dict[str, Any], path: Path, found: Results) -> None:
    known = entry if isinstance(entry, dict) else {}
    numbers = [known.get("distance"), known.get("accuracy")]
    if not {"row", "task"} <= known.keys() or not all(isinstance(number, int | float) for number in numbers):
        raise ValueError(f"{path}: recall has row, task, and the numbers distance and accuracy, not {str(entry)[:80]}")
    found.recall.setdefault(f"{entry['task']}: {entry['row']}", []).append(entry)


def _markdown_table(path: Path) -> Table | None:
    """The table in a file written by `Table.markdown`; None for any other file."""
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
    """The steps of a run, without a last line that is still being written."""
    *whole, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    steps = [parse_json(line, f"{path} line {index}") for index, line in enumerate(whole, 1)]
    for index, step in enumerate(steps, 1):
        try:
            step |= {"tokens": int(step["tokens"]), "loss": float(step["loss"])}
        except (TypeError, LookupError, ValueError):
            raise ValueError(f"{path} line {index}: a step has `tokens` and `loss`, this is {str(step)[:80]}") from None
    return steps


def _check_evaluation(content: dict[str, Any], path: Path) -> None:
    """Raise, before anything is drawn, unless `elastic evaluate` can have written this."""
    metrics = content["metrics"]
    _check(_Evaluation, content, path, "an evaluation as `elastic evaluate` writes it")
    for protocol, result in metrics.get("ppl", {}).items():
        sound = isinstance(result, dict) and isinstance(result.get("protocol"), str)
        sound = sound and isinstance(result.get("by_block"), list)
        sound = sound and isinstance(result.get("by_position") or [], list)
        numbers = [result.get("ppl"), *result["by_block"], *(result.get("by_position") or [])] if sound else []
        if not sound or not all(isinstance(it, int | float) for it in numbers):
            raise ValueError(
                f"{path}: the perplexity by {protocol} lacks `protocol` or `by_block`, or has a value that is no number"
            )


def _check(kind: Any, content: dict[str, Any], path: Path, what: str) -> None:
    """Raise unless the content fits the type `kind`; the error names the first place that does not."""
    try:
        TypeAdapter(kind).validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(key)[:40] for key in first["loc"])
        raise ValueError(f"{path}: not {what} ({place}: {first['msg'].lower()})") from None


def _check_depth(content: Any, path: Path) -> None:
    """Raise if the content is nested so deeply that recursive code would fail."""
    level, depth = [content], 0
    while level := [it for part in level for it in _parts(part)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"{path}: nested deeper than {DEEPEST}")


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
