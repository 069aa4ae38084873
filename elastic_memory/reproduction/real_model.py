"""Memories for a pretrained model: every design starts from the same weights and sees the same samples.

    OUT/runs/real-small-proofs-elastic-cells-seed1.json     a record: losses by document and part of the row, and more
    OUT/runs/real-small-proofs-keys.json                    LongPPL's key tokens, the same for all
    OUT/work/real-small-proofs-elastic-cells-seed1/         its run, until it is measured
    OUT/work/MODEL/                                         the untouched model, if it came as a GGUF file

A difference between two designs is taken document by document, which removes most of the noise.
"""

import hashlib
import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastic_memory.common.checksums import write_manifest
from elastic_memory.common.environment import environment, free_memory
from elastic_memory.common.files import sha256, whole_folder, write_json, write_json_once
from elastic_memory.common.locks import locked
from elastic_memory.common.strict import read_json
from elastic_memory.data import samples
from elastic_memory.data.start import StartingModel
from elastic_memory.evaluation.copies import copy_losses
from elastic_memory.evaluation.inputs import Spread
from elastic_memory.evaluation.loading import load_model, model_folder, tokenizer_of
from elastic_memory.evaluation.losses import whole_losses
from elastic_memory.evaluation.sinks import sink_losses
from elastic_memory.evaluation.throughput import decoding_speed
from elastic_memory.model import attach_memory
from elastic_memory.reproduction.real_measures import by_document, find_keys, key_loss, row_losses
from elastic_memory.reproduction.scheduler import Scheduler, Task, running_now
from elastic_memory.reproduction.worker import end_with_scheduler, left_if_in_use
from elastic_memory.training.recipe import RECIPES, load_recipe
from elastic_memory.training.session import Resume, tell, train


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all designs share at a tier. A record is bound to all of it but `execution`."""

    model: str
    length: int  # tokens of a row
    window: int  # tokens that sliding attention sees; a row is measured in parts of this length
    block: int  # tokens that are written to memory at a time
    order: int  # size of the memory
    points: int
    tokens: int  # of training
    rows: int  # of the test split, evenly spread
    key_rows: int  # of these: rows in which LongPPL's key tokens are found
    copy_rows: int  # of these: rows that get copies, for recall by distance
    span: int  # tokens of a copy
    distances: Sequence[int]
    history: int  # tokens read before decoding is timed
    recipe: str  # without its folder
    keys: Mapping[str, Any]  # what differs from the recipe
    execution: Mapping[str, Any]  # the same, of its section execution: how the work fits a device

    @property
    def bound(self) -> dict[str, Any]:
        """All but `execution`, as JSON types: a record of another plan is refused."""
        return json.loads(json.dumps({name: value for name, value in asdict(self).items() if name != "execution"}))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One design on one corpus with one seed."""

    tier: str
    corpus: str
    design: str
    settings: dict[str, Any]  # of `attach_memory`, or {"untrained": "full" or "sinks"}
    seed: int

    @property
    def name(self) -> str:
        """The name of its record and of its folder."""
        return f"real-{self.tier}-{self.corpus}-{self.design}-seed{self.seed}"


class Study:
    """Trains and measures the designs of a tier; one record per design, corpus and seed."""

    def __init__(self, plan: Setup, out: Path, data: Path, model: str | None, keep_weights: bool = False):
        self.plan, self.out, self.data, self.keep_weights = plan, out, data, keep_weights
        self.model = model or plan.model

    def record(self, job: Candidate) -> dict[str, Any] | None:
        """The record of a candidate; None if it was not measured yet."""
        path = self._path(job.name)
        if not path.exists():
            return None
        found = read_json(path)
        if found.get("job") != asdict(job) or found.get("plan") != self.plan.bound:
            raise ValueError(f"{path} is the record of another plan or design: move it, or choose another --out")
        return found

    @property
    def _name(self) -> str:
        """The name of the pretrained model."""
        return Path(self.model).name.removesuffix(".gguf")

    def _path(self, name: str) -> Path:
        return self.out / "runs" / f"{name}.json"

    # -- in the main process

    def run(self, jobs: Sequence[Candidate], minutes: float | None, parallel: int, seconds: float | None) -> bool:
        """Train and measure what is missing, several at a time; False if something failed.

        `seconds`: the expected time of a design alone on a GPU, used until one was measured.
        """
        missing = []
        for job in jobs:
            record = self.record(job)
            if record is None:
                missing.append(job)
            elif record["model"]["name"] != self._name:
                other = record["model"]["name"]
                raise ValueError(f"{self.out} has records of {other}, not of {self._name}: choose another --out")
        tell(f"{len(missing)} of {len(jobs)} models to train and measure")
        limit = None if minutes is None else time.monotonic() + 60 * minutes
        if missing:
            self.unpack()
            self._check_comparable(jobs)
        given = {"out": str(self.out), "data": str(self.data), "model": self.model, "keep_weights": self.keep_weights}
        expected = self.expected_seconds(jobs, seconds)
        tasks = [
            Task(
                job.name,
                [sys.executable, "-m", __name__, json.dumps([asdict(self.plan), given, asdict(job)])],
                expected and (expected / 2 if "untrained" in job.settings else expected),
            )
            for job in missing
        ]
        left = None if limit is None else max(limit - time.monotonic(), 0.0)
        scheduler = Scheduler(tasks, parallel, self.out / "work" / "logs", left)
        scheduler.run()
        return not scheduler.failed

    def _check_comparable(self, jobs: Sequence[Candidate]) -> None:
        """Refuse records of other weights or other text, before hours of work."""
        weights = self.weights_hash()
        for job in jobs:
            record = self.record(job)
            if record is None:
                continue
            data = samples(self.data / job.corpus, "test").fingerprint
            for what, held, now in (
                ("weights", record["model"]["sha256"], weights),
                ("text", record["data"]["sha256"], data),
            ):
                if held != now:
                    raise ValueError(f"{self._path(job.name)} was measured with other {what}: choose another --out")

    def expected_seconds(self, jobs: Sequence[Candidate], first: float | None) -> float | None:
        """Seconds of a design alone on the device: the median of those measured, or `first`."""
        records = [self.record(job) for job in jobs if "untrained" not in job.settings]
        known = [sum(record["seconds"].values()) / record["sharing"] for record in records if record]
        return statistics.median(known) if known else first

    def unpack(self) -> None:
        """Write the weights of a GGUF file as numbers, once for all designs: reading it takes a minute."""
        if not self.model.endswith(".gguf"):
            return
        folder = self.out / "work" / Path(self.model).stem
        if not folder.exists():
            tell(f"unpacking {Path(self.model).name}")
            tokenizer = tokenizer_of(self.model)
            assert tokenizer is not None  # a GGUF file has one
            with whole_folder(folder) as staged:
                tokenizer.save(staged)
                load_model(self.model).float().save_pretrained(staged)
                write_manifest(staged, f"unpacked from {Path(self.model).name}", 0)
        self.model = str(folder)

    # -- in a worker process

    def complete(self, job: Candidate) -> None:
        """Train and measure a candidate, unless another call has done so meanwhile."""
        with locked(self.out / "work" / "locks" / job.name):
            if self.record(job) is None:
                self._complete(job)

    def _complete(self, job: Candidate) -> None:
        """Attach, fine-tune, measure, write the record, and remove the weights."""
        plan, begun, folder = self.plan, time.monotonic(), self.out / "work" / job.name
        rows = samples(self.data / job.corpus, "test")
        weights = self.weights_hash()
        record: dict[str, Any] = {
            "job": asdict(job),
            "plan": plan.bound,
            "model": {"name": self._name, "sha256": weights},
            "data": {"sha256": rows.fingerprint, "rows": plan.rows},
            "memory": [],
            "environment": environment(),
            "sharing": running_now(self.out / "work" / "logs"),
        }
        if "untrained" in job.settings:
            model = load_model(self.model)
        else:
            record["result"] = self._train(job, folder, weights)
            model = load_model(str(folder / "runs" / record["result"]["name"]))
            record["memory"] = model.memory_report()
        trained = time.monotonic()
        record |= self._measure(job, Spread(rows, plan.rows), model)
        record["seconds"] = {"training": trained - begun, "measuring": time.monotonic() - trained}
        record["sharing"] = (record["sharing"] + running_now(self.out / "work" / "logs")) / 2
        self._path(job.name).parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path(job.name), record)
        self._remove(folder)

    def _train(self, job: Candidate, folder: Path, weights: str) -> dict[str, Any]:
        plan = self.plan
        keys: dict[str, Any] = {f"execution.{name}": value for name, value in plan.execution.items()}
        keys |= {"training.tokens": plan.tokens, "training.length": plan.length, "training.seed": job.seed}
        recipe = load_recipe(RECIPES / "finetune" / plan.recipe).replace(name=job.name, **keys, **plan.keys)
        resume = Resume(allowed=True, or_start=True, new_machine=True)
        start = self._start(job, weights)
        result = train(recipe, self.data / job.corpus, folder / "runs", resume, start)
        free_memory()  # its neighbours may need it
        return result

    def _start(self, job: Candidate, weights: str) -> StartingModel:
        """The pretrained model with the memory of a design, to be fine-tuned."""

        def load() -> Any:
            return attach_memory(load_model(self.model).float(), **job.settings)

        both = json.dumps([weights, job.settings], sort_keys=True)
        return StartingModel(
            path=self._name,
            sha256=hashlib.sha256(both.encode()).hexdigest(),
            config=load().config,
            tokenizer=tokenizer_of(self.model),
            load=load,
        )

    def weights_hash(self) -> str:
        """A hash of the pretrained model's weight files, or of its name if it is on the hub."""
        folder = Path(model_folder(self.model))
        sums = [f"{file.name} {sha256(file)}" for file in sorted(folder.glob("*.safetensors"))]
        return hashlib.sha256(" ".join(sums or [self.model]).encode()).hexdigest()

    def _measure(self, job: Candidate, rows: Spread, model: Any) -> dict[str, Any]:
        """Everything that tables may need: the weights are removed afterwards."""
        plan, device = self.plan, next(model.parameters()).device.type
        sinks = job.settings.get("untrained") == "sinks"
        read = partial(sink_losses, model, window=plan.window) if sinks else partial(whole_losses, model)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            losses = row_losses(read, rows)
            some = Spread(rows, plan.copy_rows)
            return {
                "documents": by_document(rows, losses, plan.window),
                "longppl": key_loss(losses, self._keys(job, rows)),
                "recall": {str(d): copy_losses(read, some, d, plan.span) for d in plan.distances},
                "decoding": None if sinks else decoding_speed(model, plan.history, 64),
            }

    def _keys(self, job: Candidate, rows: Spread) -> dict[str, list[int]]:
        """LongPPL's key tokens, the same for all designs: the first worker that needs them writes them to a file."""
        path = self._path(f"real-{job.tier}-{job.corpus}-keys")
        plan = self.plan.bound
        if not path.exists():
            found = find_keys(load_model(self.model), rows, self.plan.key_rows, self.plan.window)
            path.parent.mkdir(parents=True, exist_ok=True)
            facts = {"plan": plan, "model": self._name, "rows": rows.rows.fingerprint, "environment": environment()}
            write_json_once(path, facts | {"keys": found})
        held = read_json(path)
        if (held["plan"], held["model"], held["rows"]) != (plan, self._name, rows.rows.fingerprint):
            raise ValueError(f"{path} has the key tokens of another plan, model or text: choose another --out")
        return held["keys"]

    def _remove(self, folder: Path) -> None:
        """Remove the run, or with `keep_weights` only its checkpoints."""
        for doomed in folder.glob("runs/*/checkpoints") if self.keep_weights else [folder]:
            shutil.rmtree(doomed, ignore_errors=True)


def main(text: str) -> None:
    """Complete one candidate, given as JSON on the command line of a worker process."""
    end_with_scheduler()
    plan, given, job = json.loads(text)
    out, data = Path(given["out"]), Path(given["data"])
    study = Study(Setup(**plan), out, data, given["model"], given["keep_weights"])
    with left_if_in_use():
        study.complete(Candidate(**job))


if __name__ == "__main__":
    main(sys.argv[1])
