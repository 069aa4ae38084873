"""Not in the paper: how far back each memory remembers what it was told, as accuracy by distance.

    OUT/runs/recall-small-passkey-elastic-uniform-seed1.json    a record: one model, trained and asked

All memories hold the same number of floats, and all models see the same samples.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import elastic_memory as em
from elastic_memory.common.defaults import BLOCK_SIZE
from elastic_memory.common.environment import environment, hardware
from elastic_memory.common.files import write_json, write_text
from elastic_memory.common.progress import Bars
from elastic_memory.common.strict import read_json
from elastic_memory.evaluation.recall import DISTANCES, TASKS, VOCABULARY, learn, recall
from elastic_memory.memory import MEMORIES
from elastic_memory.report.tables import Table
from elastic_memory.reproduction.scheduler import Scheduler, Task
from elastic_memory.reproduction.worker import end_with_scheduler
from elastic_memory.training.session import tell

USES = ("minutes", "parallel", "seeds")
GROWN = 8
TRAINED = 9  # blocks, a distance of 8: nearly half of the tested distances are longer
TWO_MODELS = {"Transformer++": {"memory": "none"}, "Elastic, uniform": {"memory": "elastic", "sampling": "uniform"}}
ALL_MODELS = {
    "Full attention": {"memory": "none", "local_attention": "full"},
    **TWO_MODELS,
    "Elastic, exponential": {"memory": "elastic", "sampling": "exponential"},
    **{
        name.replace("_", " ").capitalize(): {"memory": name}
        for name in MEMORIES
        if name not in ("none", "elastic", "infini")
    },
    "Infini": {"memory": "infini", "memory_multiple": 1},  # as large as its heads: there is no other size
}
TINY = {"name": "tiny", "memory_multiple": 2, "block_size": 16, "points": 64}
PLANS: dict[str, dict[str, Any]] = {
    "smoke": {
        "rows": TWO_MODELS, "tasks": ["passkey"], "seeds": 1, "steps": 400, "batch": 32, "samples": 256, "model": TINY,
    },
    "small": {
        "rows": ALL_MODELS, "tasks": ["passkey"], "seeds": 3, "steps": 1200, "batch": 32, "samples": 128,
        "model": TINY,
    },
    "paper": {
        "rows": ALL_MODELS, "tasks": list(TASKS), "seeds": 1, "steps": 1000, "batch": 16, "samples": 64,
        "model": {"name": "100m", "memory_multiple": 1, "block_size": BLOCK_SIZE, "points": 512},
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RecallRun:
    """One model for one task with one seed."""

    tier: str
    task: str
    row: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its record."""
        row = self.row.lower().replace(", ", "-").replace(" ", "-")
        return f"recall-{self.tier}-{self.task}-{row}-seed{self.seed}"

    def facts(self) -> dict[str, Any]:
        """What a record must agree with."""
        plan = {key: value for key, value in PLANS[self.tier].items() if key not in ("rows", "tasks", "seeds")}
        return {"job": asdict(self), "memory": PLANS[self.tier]["rows"][self.row], "plan": plan}


def run(
    tier: str, out: Path, minutes: float | None = None, parallel: int | None = None, seeds: int | None = None
) -> Table:
    """Train and ask what is missing, within the minutes given, and make the table from all records."""
    plan, done = PLANS[tier], True
    jobs = [
        RecallRun(tier=tier, task=task, row=row, seed=seed)
        for seed in range(1, plan["seeds"] + 1)
        for task in plan["tasks"]
        for row in plan["rows"]
    ]
    missing = [job for job in jobs if job.seed <= (seeds or job.seed) and read(out, job) is None]
    if missing and minutes != 0:
        done = _complete_all(missing, out, minutes, parallel or 1)
    records = [record for job in jobs if (record := read(out, job)) is not None]
    table, rows = make(tier, records)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"recall-{tier}.json", {"table": "recall", "tier": tier, "rows": rows})
    write_text(out / f"recall-{tier}.md", table.markdown())
    if not done:
        raise ValueError(f"a model failed: see {out / 'work' / 'logs'}; what is finished is in {out}")
    return table


def read(out: Path, job: RecallRun) -> dict[str, Any] | None:
    """The record of a run; None if it was not made yet."""
    path = out / "runs" / f"{job.name}.json"
    if not path.exists():
        return None
    found = read_json(path)
    if any(found.get(key) != value for key, value in job.facts().items()):
        raise ValueError(f"{path} is the record of another plan: move it, or choose another --out")
    return found


def _complete_all(jobs: Sequence[RecallRun], out: Path, minutes: float | None, parallel: int) -> bool:
    """One after another, or in processes of their own; False if something failed."""
    if minutes is None and parallel == 1:
        for number, job in enumerate(jobs, 1):
            tell(f"model {number} of {len(jobs)}: {job.name}")
            complete(job, out)
        return True
    tasks = [Task(job.name, [sys.executable, "-m", __name__, json.dumps([asdict(job), str(out)])]) for job in jobs]
    scheduler = Scheduler(tasks, parallel, out / "work" / "logs", None if minutes is None else 60 * minutes)
    scheduler.run()
    return not scheduler.failed


def complete(job: RecallRun, out: Path) -> None:
    """Train a model, measure its recall at every distance, with the memory enlarged too, and write the record."""
    plan, begun, device = PLANS[job.tier], time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
    memory, losses, answers = plan["rows"][job.row], [], []
    model = build(memory, plan["model"], job.seed).to(device)
    with Bars() as progress:
        bar = progress.add_task(f"training {job.task}: {job.row}", total=plan["steps"], unit="steps")

        def report(step: int, loss: float) -> None:
            losses.append(loss)
            progress.advance(bar)

        learn(
            model, job.task, TRAINED, plan["steps"], rows=plan["batch"], learning_rate=3e-3, seed=job.seed,
            report=report,
        )  # fmt: skip
        for name in _memory_sizes(model, job.row, memory["memory"]):
            progress.reset(bar, description=f"asking {job.task}: {name}", unit="distances")
            for distance in progress.track(DISTANCES, task_id=bar):
                (result,) = recall(model, job.task, [distance], samples=plan["samples"])
                answers.append({"row": name, "floats": _floats(model), **asdict(result)})
    record = {
        **job.facts(),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "loss": statistics.fmean(losses[-50:]),
        "answers": answers,
        "seconds": round(time.monotonic() - begun, 1),
        "environment": environment() | {"device": hardware()},
    }
    (out / "runs").mkdir(parents=True, exist_ok=True)
    write_json(out / "runs" / f"{job.name}.json", record)


def _memory_sizes(model: Any, row: str, memory: str) -> Iterator[str]:
    """Set the model's memory to each size and yield its name: as trained and, if it can be changed, `GROWN` times."""
    yield row
    if MEMORIES[memory].has_option("points"):
        try:
            model.set_retrieval(order=GROWN * model.config.memory_order, points=GROWN * model.config.memory_points)
        except ValueError:  # some memories fix their order when they are built
            return
        yield f"{row}, {GROWN}x at test time"


def _floats(model: Any) -> int | None:
    """Floats of state for one text; None if the state grows with the text."""
    if model.config.local_attention == "full":
        return None
    return sum(layer["state_floats"] for layer in model.memory_report())


def build(memory: dict[str, Any], shape: dict[str, Any], seed: int = 0) -> Any:
    """A model of this shape with this memory, not trained yet."""
    values = {name: value for name, value in shape.items() if name != "points"} | memory
    if MEMORIES[memory["memory"]].has_option("points"):
        values["memory_points"] = shape["points"]
    torch.manual_seed(seed)
    return em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset(**values, vocab_size=VOCABULARY))


def make(tier: str, records: Sequence[dict[str, Any]]) -> tuple[Table, list[dict[str, Any]]]:
    """The table of what is recorded so far, and its numbers: accuracies are means over seeds."""
    held: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        for answer in record["answers"]:
            held.setdefault((answer["task"], answer["row"]), []).append(answer | {"loss": record["loss"]})
    rows: list[dict[str, Any]] = []
    lines = []
    for (task, row), answers in held.items():
        seeds = [[one["accuracy"] for one in answers if one["distance"] == distance] for distance in DISTANCES]
        rows += [
            {"task": task, "row": row, "distance": distance, "accuracy": statistics.fmean(found), "seeds": found}
            for distance, found in zip(DISTANCES, seeds, strict=True)
        ]
        floats, loss = answers[0]["floats"], statistics.fmean(one["loss"] for one in answers)
        size = "grows" if floats is None else f"{floats:,}"
        lines.append([f"{task}: {row}", size, f"{loss:.2f}", *map(_cell, seeds)])
    return Table(
        title="Recall: share of right answers by distance in blocks",
        columns=["task: model", "floats", "training loss", *map(str, DISTANCES)],
        rows=lines,
        note=_note(tier, records),
    ), rows


def _cell(seeds: Sequence[float]) -> str:
    """The mean, and the standard deviation over seeds in points."""
    spread = f" ± {100 * statistics.stdev(seeds):.0f}" if len(seeds) > 1 else ""
    return f"{statistics.fmean(seeds):.0%}{spread}"


def _note(tier: str, records: Sequence[dict[str, Any]]) -> str:
    """How the numbers were made."""
    plan = PLANS[tier]
    places = {(one["environment"]["device"], one["environment"]["torch"]) for one in records}
    commits = ", ".join(sorted({str(one["environment"]["commit"]) for one in records}))
    missing = plan["seeds"] * len(plan["tasks"]) * len(plan["rows"]) - len(records)
    several = " and standard deviation over seeds" if plan["seeds"] > 1 else ""
    chances = {answer["task"]: answer["chance"] for one in records for answer in one["answers"]}
    guessing = ", ".join(f"{task} {chance:.1%}" for task, chance in chances.items())
    return (
        f"Tier {tier}: each model trained for its task, {plan['steps']} steps on rows of up to {TRAINED} blocks of "
        f"{plan['model']['block_size']} tokens; {plan['samples']} questions a cell and seed, in rows just long enough "
        f"for the distance; mean{several}. Training loss: on the answers, at the end of training; high where a "
        f"model has not learned the task. Accuracy of guessing: {guessing}. "
        + "".join(f"Measured on {device}, torch {torch_version}. " for device, torch_version in sorted(places))
        + f"Commits: {commits}."
        + (f" {missing} runs are still to come." if missing else "")
    )


if __name__ == "__main__":
    end_with_scheduler()
    given, folder = json.loads(sys.argv[1])
    complete(RecallRun(**given), Path(folder))
