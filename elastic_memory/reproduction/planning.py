"""What is still to do for the tables, in which order, and how long it takes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic_memory.reproduction.experiment import CORPUS_ORDER, Experiment
from elastic_memory.reproduction.lab import Lab, Trained
from elastic_memory.reproduction.scheduler import Task
from elastic_memory.reproduction.tables import experiments, wanted
from elastic_memory.reproduction.worker import Job
from elastic_memory.training.plan import Measured, make_plan, measurements

MEASURING = 60.0  # seconds allowed for starting a process and for measuring its model


@dataclass(frozen=True)
class Todo:
    """A model that is not trained or not fully measured, and the `seconds` that it takes alone on a device."""

    model: Trained
    name: str
    seconds: float | None


def to_do(
    lab: Lab, tables: Sequence[Experiment], seeds: int | None = None, speeds: Sequence[Measured] | None = None
) -> list[Todo]:
    """The models of some tables whose records are incomplete, most important first.

    They come in the order of the tables, but further seeds on other corpora than the first come last. `speeds` are
    those of finished runs, read from the records if not given.
    """
    models = list(dict.fromkeys(model for experiment in tables for model in experiment.models(lab, seeds)))
    models.sort(key=lambda model: model.seed != lab.tier.seeds[0] and model.corpus != CORPUS_ORDER[0])
    speeds = measurements(lab.out / "runs") if speeds is None else speeds
    found = []
    for model in models:
        record = lab.record(model)
        if record.trained is None or lab.missing(model, wanted(model)):
            hours = make_plan(lab.recipe(model), speeds, devices=1, price=0.0).hours
            found.append(Todo(model, record.content["name"], None if hours is None else 3600 * hours))
    return found


def tasks(lab: Lab, todo: Sequence[Todo], parallel: int, keep_weights: bool) -> list[Task]:
    """The processes to run: one per model, and before a corpus's first model one that finds its key tokens."""
    common: dict[str, Any] = {"tier": lab.name, "out": str(lab.out), "reference": lab.reference}
    common["data"] = str(lab.data) if lab.data else None
    missing = {
        one.model.corpus for one in todo if any(m == "longppl" for m, _ in lab.missing(one.model, wanted(one.model)))
    }
    found = []
    for one in todo:
        if one.model.corpus in missing:
            missing.remove(one.model.corpus)
            if lab.known_keys(one.model.corpus) is None:
                job = Job(**common, keys=one.model.corpus)
                found.append(Task(f"{lab.name}-{one.model.corpus}-keys", job.command()))
        job = Job(**common, model=asdict(one.model), keep_weights=keep_weights, sharing=parallel)
        found.append(Task(one.name, job.command(), one.seconds, MEASURING))
    return found


def status(lab: Lab) -> tuple[list[list[str]], str]:
    """A row per table (numbers, missing ones, runs for a first seed, for further seeds, GPU minutes), and a note."""
    rows, counted, unknown, speeds = [], set(), False, measurements(lab.out / "runs")
    for experiment in (one for one in experiments().values() if lab.name in one.tiers):
        cells = [cell for *_, cell, _ in experiment.cells() if cell.measurements]
        numbers = sum(len(cell.measurements) for cell in cells)
        missing = sum(
            all(lab.record(cell.model(seed)).find(metric, asdict(conditions)) is None for seed in lab.tier.seeds)
            for cell in cells
            for metric, conditions in cell.measurements
        )
        first = [one for one in to_do(lab, [experiment], 1, speeds) if one.name not in counted]
        more = [one for one in to_do(lab, [experiment], None, speeds) if one.name not in counted and one not in first]
        counted |= {one.name for one in (*first, *more)}
        seconds = [one.seconds for one in (*first, *more)]
        unknown = unknown or None in seconds
        minutes = sum(value or 0.0 for value in seconds) / 60
        mark = "+" if None in seconds else ""
        rows.append(
            [experiment.name, str(numbers), str(missing), str(len(first)), str(len(more)), f"{minutes:.0f}{mark}"]
        )
    note = (
        "A run that several tables need is counted in the first of them. GPU minutes: training, estimated from "
        "measured runs; starting and measuring take about a minute more a run, while others use the GPU."
    )
    return rows, note + (" +: and runs of a kind that was never measured." if unknown else "")
