"""Table "Speed comparison" and the appendix's raw throughput: training samples/s, and as a ratio to Transformer++.

One process measures everything, each model interleaved with Transformer++ of its size, because a GPU slows down as it
warms up. Cells that the results file already has are not measured again. `inference` shows the other half of the same
measurements.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import elastic_memory as em
from elastic_memory.common.environment import environment, hardware
from elastic_memory.common.files import write_json
from elastic_memory.common.progress import Bars
from elastic_memory.evaluation.ahead import compile_ahead
from elastic_memory.evaluation.throughput import Throughput, Workload, throughput
from elastic_memory.report.tables import Table

COLUMNS = ("1x", "2x", "4x", "8x", "16x", "200m", "400m")
UNIFORM, EXPONENTIAL = {"sampling": "uniform"}, {"sampling": "exponential"}
# Row: settings, columns it has, the paper's raw training and inference throughput on 8 A800.
ROWS: dict[str, tuple[dict[str, Any], tuple[str, ...], list[float], list[float]]] = {
    "Transformer++": ({"memory": "none"}, ("1x", "200m", "400m"), [14.689, 12.930, 8.500], [6.212, 6.379, 5.913]),
    "Mem. Transformer": (
        {"memory": "memorizing"}, COLUMNS, [15.844, 15.774, 15.677, 15.514, 15.237, 12.531, 8.297],
        [6.608, 6.544, 6.463, 6.523, 6.455, 6.287, 5.873],
    ),
    "Infini-Transformer": (
        {"memory": "infini"}, ("1x", "200m", "400m"), [9.359, 7.572, 5.249], [6.013, 6.146, 5.609],
    ),
    "Elastic, uniform": (
        {"memory": "elastic", **UNIFORM}, COLUMNS, [15.503, 15.420, 15.153, 14.370, 11.673, 12.445, 8.152],
        [6.406, 6.512, 6.457, 6.428, 6.106, 6.322, 5.798],
    ),
    "Elastic, exponential": (
        {"memory": "elastic", **EXPONENTIAL}, COLUMNS, [15.530, 15.471, 15.179, 14.331, 11.663, 12.491, 8.177],
        [6.498, 6.480, 6.444, 6.367, 6.126, 6.338, 5.848],
    ),
    "Melodi": (
        {"memory": "melodi"}, COLUMNS, [8.052, 8.523, 8.518, 8.403, 7.851, 7.777, 5.370],
        [5.552, 5.558, 5.646, 5.738, 5.653, 5.698, 5.078],
    ),
}  # fmt: skip
# A step has 131,072 tokens; pairs of models that do not fit take half, or a quarter.
PLANS: dict[str, dict[str, Any]] = {
    "smoke": {"presets": dict.fromkeys(("1x", "200m", "400m"), "tiny"), "length": 512, "rows": 2, "repeats": 4},
    "small": {"presets": {"1x": "100m"}, "length": 32768, "rows": 4, "repeats": 4},
    "paper": {"presets": {"1x": "100m", "200m": "200m", "400m": "400m"}, "length": 32768, "rows": 4, "repeats": 4},
}


def run(tier: str, out: Path) -> Table:
    """Measure what is missing, write it, and show training throughput."""
    return table(measure(tier, out), "training")


def measure(tier: str, out: Path) -> dict[str, Any]:
    """All cells of the tier; keeps those of an earlier run on this device."""
    plan, path = PLANS[tier], out / f"speed-{tier}.json"
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    cuda = torch.cuda.is_available()
    here = environment() | {"device": hardware()}
    if record.get("environment", {}).get("device") != here.get("device"):
        record = {}
    record = {"table": "speed", "tier": tier, "environment": here, **plan, "cells": record.get("cells", {})}
    missing = [cell for cell in _order(plan) if f"{cell[1]}|{cell[2]}" not in record["cells"]]
    if cuda:
        # Samplings share compiled code.
        distinct = {str(config.to_dict() | {"sampling": None}): config for config in map(_config, missing)}
        compile_ahead(list(distinct.values()), plan["rows"], plan["length"])
    with Bars(transient=True) as progress:
        for name, column, found, rows in _cells(missing, plan, progress):
            own = {"rows": rows, "commit": here["commit"], "date": environment()["date"]}
            record["cells"][f"{name}|{column}"] = dataclasses.asdict(found) | own
            speed = f"{found.training * plan['length']:,.0f} tokens/s ({found.training_ratio:.3f})"
            print(f"{name} {column}: {speed}", flush=True)
            write_json(path, record)
    (out / f"speed-{tier}.md").write_text(table(record, "training").markdown())
    (out / f"inference-{tier}.md").write_text(table(record, "inference").markdown())
    return record


def _cells(
    missing: list[tuple[str, str, str]], plan: dict[str, Any], progress: Bars
) -> Iterator[tuple[str, str, Throughput, int]]:
    """Measure one cell after the other: row, column, speed, and the samples per step that fitted."""
    base: Any = None
    size: str | None = None
    for preset, name, column in progress.track(missing, description="timing models"):
        if preset != size:
            base, size = None, preset  # free the old model first
            base = build(_config((preset, "Transformer++", column)))
        models = {"Transformer++": base}
        if name != "Transformer++":
            models[name] = build(_config((preset, name, column)))
        yield name, column, *timed(models, plan)


def _order(plan: dict[str, Any]) -> list[tuple[str, str, str]]:
    """All cells as (preset, row, column), most important first.

    Both elastic samplings run the same operations, so one of them comes last; models of one size stay together.
    """
    presets = plan["presets"] | dict.fromkeys(("2x", "4x", "8x", "16x"), plan["presets"]["1x"])
    cells = [
        (presets[column], name, column)
        for column in ("1x", "16x", "2x", "4x", "8x", "200m", "400m")
        for name, (_, exists, *_) in ROWS.items()
        if column in exists and column in presets
    ]
    return sorted(cells, key=lambda cell: ROWS[cell[1]][0].get("sampling") == "uniform")


def _config(cell: tuple[str, str, str]) -> em.MemoryLlamaConfig:
    """The model of a cell: as it would be trained, on a GPU with padded heads, and with the memory of its column."""
    preset, name, column = cell
    settings = ROWS[name][0]
    if column.endswith("x") and name not in ("Transformer++", "Infini-Transformer"):  # whose size is fixed
        settings = settings | {"memory_multiple": int(column[:-1])}
    return em.MemoryLlamaConfig.preset(preset, **settings, pad_heads=torch.cuda.is_available())


def build(config: em.MemoryLlamaConfig) -> Any:
    """A model; compiled on a GPU."""
    cuda = torch.cuda.is_available()
    with torch.device("cuda" if cuda else "cpu"):  # initialising a large model is faster on a GPU
        model: Any = em.MemoryLlamaForCausalLM(config)
    if cuda:
        torch.cuda.empty_cache()
        model.compile_blocks()
    return model


def timed(models: dict[str, Any], plan: dict[str, Any]) -> tuple[Throughput, int]:
    """Time the last model, interleaved with Transformer++; and the number of samples per step that fits."""
    rows = plan["rows"]
    while True:
        work = Workload(length=plan["length"], rows=rows, decoded=0, steps=2, repeats=plan["repeats"])
        try:
            return throughput(models, work)[-1], rows
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        rows //= 2
        torch.cuda.empty_cache()


def _measured_at(cells: dict[str, Any]) -> str:
    """The commit; or all commits, each with the rows (and columns) measured at it."""
    at = {key: str(cell.get("commit")) for key, cell in cells.items()}
    if len(set(at.values())) == 1:
        return next(iter(at.values()))
    found: dict[str, list[str]] = {commit: [] for commit in sorted(set(at.values()))}
    for name in ROWS:
        own = {key.split("|")[1]: commit for key, commit in at.items() if key.startswith(f"{name}|")}
        for commit in sorted(set(own.values())):
            columns = [column for column in COLUMNS if own.get(column) == commit]
            found[commit].append(name if len(columns) == len(own) else f"{name} at {' '.join(columns)}")
    return "; ".join(f"{commit} ({', '.join(names)})" for commit, names in found.items())


def table(record: dict[str, Any], kind: str) -> Table:
    """Samples/s, the ratio to Transformer++ of the same size, and the paper's ratio."""
    cells, lines = record["cells"], []
    which = 2 if kind == "training" else 3
    plain = dict(zip(ROWS["Transformer++"][1], ROWS["Transformer++"][which], strict=True))
    for name, row in ROWS.items():
        paper = dict(zip(row[1], row[which], strict=True))
        line = [name]
        for column in COLUMNS:
            cell = cells.get(f"{name}|{column}")
            ours = f"{cell[kind]:.2f} ({cell[f'{kind}_ratio']:.3f})" if cell else "-"
            theirs = f" [{paper[column] / plain.get(column, plain['1x']):.3f}]" if column in paper else ""
            line.append(ours + theirs)
        lines.append(line)
    here = record["environment"]
    where = f"{here.get('device', 'this machine')}, torch {here['torch']}"
    fewer = {key.replace("|", " "): cell["rows"] for key, cell in cells.items() if cell["rows"] < record["rows"]}
    smaller = "".join(f"; {cell}: {rows}" for cell, rows in fewer.items())
    return Table(
        title=f"{kind.capitalize()}, samples/s (ratio to Transformer++ of the same size) [the paper's ratio]",
        columns=["model", *COLUMNS],
        rows=lines,
        note=f"Tier {record['tier']}: samples of {record['length']:,} tokens, {record['rows']} at a time{smaller}, on "
        f"{where}, commit {_measured_at(cells)}; each model interleaved with Transformer++ in one process. "
        "The paper: 8 A800; it divides all its ratios by Transformer++ at 100M. Those at 200m and 400m are recomputed "
        "here from its raw throughput, by Transformer++ of the same size.",
    )
