"""Memories for a pretrained model: every design starts from the same weights and sees the same samples.

    OUT/runs/real-small-proofs-cells-seed1.json     a record: losses by document and part of the row
    OUT/work/real-small-proofs-cells-seed1/         the attached model and its run, until it is measured

A difference between two designs is taken document by document, which removes most of the noise.
"""

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elastic_memory.common.environment import environment
from elastic_memory.common.files import write_json
from elastic_memory.common.strict import read_json
from elastic_memory.data import samples
from elastic_memory.evaluation.attaching import write_attached
from elastic_memory.evaluation.inputs import Spread, batches
from elastic_memory.evaluation.loading import load_model, starting_model
from elastic_memory.evaluation.losses import streamed_losses
from elastic_memory.reproduction.scheduler import Scheduler, Task
from elastic_memory.training.recipe import RECIPES, load_recipe
from elastic_memory.training.session import Resume, tell, train

Documents = dict[str, dict[str, list[float]]]  # sum of losses and number of tokens, by document and part of the row


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all designs share at a tier."""

    model: str
    length: int  # tokens of a row
    window: int  # tokens that sliding attention sees; a row is measured in parts of this length
    block: int  # tokens that are written to memory at a time
    order: int  # size of the memory
    points: int
    tokens: int  # of training
    rows: int  # of the test split, evenly spread
    recipe: str  # without its folder
    keys: Mapping[str, Any]  # what differs from the recipe


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One design on one corpus with one seed."""

    tier: str
    corpus: str
    design: str
    settings: dict[str, Any]  # of `attach_memory`
    seed: int

    @property
    def name(self) -> str:
        """Of its record and of its folder."""
        return f"real-{self.tier}-{self.corpus}-{self.design}-seed{self.seed}"


class Study:
    """The designs of a tier: train, measure, compare."""

    def __init__(self, plan: Setup, out: Path, data: Path, model: str | None):
        self.plan, self.out, self.data, self.model = plan, out, data, model or plan.model

    def record(self, job: Candidate) -> dict[str, Any] | None:
        """What was measured; None if it is still to do."""
        path = self._path(job)
        if not path.exists():
            return None
        found = read_json(path)
        if found.get("job") != asdict(job) or found.get("plan") != json.loads(json.dumps(asdict(self.plan))):
            raise ValueError(f"{path} is the record of another plan or design: move it, or choose another --out")
        return found

    def _path(self, job: Candidate) -> Path:
        return self.out / "runs" / f"{job.name}.json"

    def run(self, jobs: Sequence[Candidate], minutes: float | None, parallel: int) -> bool:
        """Train and measure what is missing, several at a time; False if something failed."""
        missing = [job for job in jobs if self.record(job) is None]
        tell(f"{len(missing)} of {len(jobs)} models to train and measure")
        places = {"out": str(self.out), "data": str(self.data), "model": self.model}
        tasks = [
            Task(job.name, [sys.executable, "-m", __name__, json.dumps([asdict(self.plan), places, asdict(job)])])
            for job in missing
        ]
        scheduler = Scheduler(tasks, parallel, self.out / "work" / "logs", None if minutes is None else 60 * minutes)
        scheduler.run()
        tell(f"{len(scheduler.done)} done, {len(scheduler.failed)} failed, {len(scheduler.left)} left")
        return not scheduler.failed

    def complete(self, job: Candidate) -> None:
        """Attach, fine-tune, measure, write the record, and remove the weights."""
        folder, plan = self.out / "work" / job.name, self.plan
        attached = folder / "attached"
        if not attached.exists():
            write_attached(self.model, attached, "float32", **job.settings)
        keys = {"training.tokens": plan.tokens, "training.length": plan.length, "training.seed": job.seed}
        recipe = load_recipe(RECIPES / "finetune" / plan.recipe).replace(name=job.name, **keys, **plan.keys)
        begun = Resume(allowed=True, or_start=True, new_machine=True)
        result = train(recipe, self.data / job.corpus, folder / "runs", begun, starting_model(str(attached)))
        (run,) = (path.parent for path in (folder / "runs").glob("*/result.json"))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        model = load_model(str(run))
        rows = samples(self.data / job.corpus, "test")
        record = {
            "job": asdict(job),
            "plan": asdict(plan),
            "model": {"name": Path(self.model).name, "sha256": starting_model(str(attached)).sha256},
            "data": {"sha256": rows.fingerprint, "rows": plan.rows},
            "memory": model.memory_report(),
            "result": result,
            "tokens_per_second": float(np.median([line["tokens_per_second"] for line in lines])),
            "documents": measure(model, Spread(rows, plan.rows), plan.window),
            "environment": environment(),
        }
        self._path(job).parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path(job), record)
        shutil.rmtree(folder, ignore_errors=True)


def measure(model: Any, rows: Any, part: int) -> Documents:
    """Losses of a streamed model by document and part of the row."""
    found: Documents = {}
    for indices, ids in batches(rows, 4, ()):
        losses = streamed_losses(model, ids, part).double().numpy()
        for index, row in zip(indices, losses, strict=True):
            parts = np.arange(len(row)) // part
            held = found.setdefault(rows.document(index), {"loss": [], "tokens": []})
            for name, values in (("loss", np.bincount(parts, row)), ("tokens", np.bincount(parts).astype(float))):
                before = np.zeros(len(values)) if not held[name] else np.array(held[name])
                held[name] = (before + values).tolist()
    return found


def ppl_of(documents: Documents, first: int = 0, last: int | None = None) -> float:
    """Of the parts `first` to `last` of all rows."""
    sums = {
        name: math.fsum(x for held in documents.values() for x in held[name][first:last]) for name in ("loss", "tokens")
    }
    return math.exp(sums["loss"] / sums["tokens"])


def difference(these: Sequence[Documents], those: Sequence[Documents], first: int = 1) -> tuple[float, float, float]:
    """How much higher, as a share, the perplexity of `these` runs is than that of `those`, with its 95% interval.

    The bootstrap is over documents; a document's losses are averaged over the runs.
    """
    names = sorted(those[0])
    gap = np.array([_mean_loss(these, name, first) - _mean_loss(those, name, first) for name in names])
    tokens = np.array([sum(those[0][name]["tokens"][first:]) for name in names])
    draws = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), size=2000)
    low, high = np.quantile(np.expm1((draws @ gap) / (draws @ tokens)), [0.025, 0.975])
    return math.expm1(gap.sum() / tokens.sum()), float(low), float(high)


def _mean_loss(runs: Sequence[Documents], name: str, first: int) -> float:
    return float(np.mean([sum(run[name]["loss"][first:]) for run in runs]))


def main(text: str) -> None:
    """One job, in a process of its own."""
    plan, places, job = json.loads(text)
    study = Study(Setup(**plan), Path(places["out"]), Path(places["data"]), places["model"])
    study.complete(Candidate(**job))


if __name__ == "__main__":
    main(sys.argv[1])
