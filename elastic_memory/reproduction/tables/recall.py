"""Not in the paper: how far back a model remembers what it was told, as accuracy by distance."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import TaskID

import elastic_memory as em
from elastic_memory.common.defaults import BLOCK_SIZE
from elastic_memory.common.files import write_json
from elastic_memory.common.progress import Bars
from elastic_memory.evaluation.recall import DISTANCES, TASKS, VOCABULARY, Recall, learn, recall
from elastic_memory.memory import MEMORIES
from elastic_memory.report.tables import Table

GROWN = 8
TRAINED = 9  # blocks, a distance of 8: nearly half of the tested distances are longer
TWO_MODELS = {"Transformer++": {"memory": "none"}, "Elastic, uniform": {"memory": "elastic", "sampling": "uniform"}}
ALL_MODELS = TWO_MODELS | {
    "Elastic, exponential": {"memory": "elastic", "sampling": "exponential"},
    **{name.capitalize(): {"memory": name} for name in MEMORIES if name not in ("none", "elastic")},
}
PLANS: dict[str, dict[str, Any]] = {
    "smoke": {
        "rows": TWO_MODELS, "tasks": ["passkey"], "steps": 400, "batch": 32, "samples": 256,
        "model": {"name": "tiny", "memory_multiple": 2, "block_size": 16, "points": 64},
    },
    "small": {
        "rows": ALL_MODELS, "tasks": list(TASKS), "steps": 2000, "batch": 64, "samples": 256,
        "model": {"name": "tiny", "memory_multiple": 1, "block_size": 64, "points": 192, "hidden_size": 256,
                  "intermediate_size": 512, "num_hidden_layers": 6},
    },
    "paper": {
        "rows": ALL_MODELS, "tasks": list(TASKS), "steps": 1000, "batch": 16, "samples": 64,
        "model": {"name": "100m", "memory_multiple": 1, "block_size": BLOCK_SIZE, "points": 512},
    },
}  # fmt: skip


def run(tier: str, out: Path) -> Table:
    """Train a model for every row and task, and test it at up to eight times the distances of training."""
    plan, device = PLANS[tier], "cuda" if torch.cuda.is_available() else "cpu"
    records, lines = [], []
    with Bars() as progress:
        every = [(task, row) for task in plan["tasks"] for row in plan["rows"]]
        whole, current = progress.add_task("recall: models"), progress.add_task("")
        for task, row in progress.track(every, task_id=whole):
            for name, found in _answers(plan, task, row, device, progress, current):
                records += [{"row": name, **dataclasses.asdict(result)} for result in found]
                cells = [f"{result.accuracy:.0%}" for result in found]
                lines.append([f"{task}: {name}", f"{found[0].chance:.1%}", *cells])
    table = Table(
        title="Recall: share of right answers by distance in blocks",
        columns=["task: model", "chance", *map(str, DISTANCES)],
        rows=lines,
        note=f"Tier {tier}: each model trained for its task, {plan['steps']} steps on rows of up to {TRAINED} blocks; "
        f"{plan['samples']} questions a cell, in rows just long enough for the distance.",
    )
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "recall.json", {"table": "recall", "tier": tier, "device": device, "plan": plan, "rows": records})
    (out / "recall.md").write_text(table.markdown())
    return table


def _answers(
    plan: dict[str, Any], task: str, row: str, device: str, progress: Bars, bar: TaskID
) -> Iterator[tuple[str, list[Recall]]]:
    """Train the model of a row for a task, and ask it at every distance, in each of its readings."""
    memory = plan["rows"][row]
    model = build(memory, plan["model"]).to(device)
    progress.reset(bar, description=f"training {task}: {row}", total=plan["steps"], unit="steps")
    learn(
        model, task, TRAINED, plan["steps"], rows=plan["batch"], learning_rate=3e-3,
        report=lambda step, loss: progress.advance(bar),
    )  # fmt: skip
    for name in _readings(model, row, memory["memory"]):
        progress.reset(bar, description=f"asking {task}: {name}", unit="distances")
        asked = progress.track(DISTANCES, task_id=bar)
        yield name, [recall(model, task, [distance], samples=plan["samples"])[0] for distance in asked]


def _readings(model: Any, row: str, memory: str) -> Iterator[str]:
    """As trained; and, if order and points can be changed, with both multiplied by `GROWN`."""
    yield row
    if MEMORIES[memory].has_option("points"):
        config = model.config
        model.set_retrieval(order=GROWN * config.memory_order, points=GROWN * config.memory_points)
        yield f"{row}, {GROWN}x at test time"


def build(memory: dict[str, str], shape: dict[str, Any], seed: int = 0) -> Any:
    """A model of this shape with this memory, not trained yet."""
    values = {name: value for name, value in shape.items() if name != "points"}
    if MEMORIES[memory["memory"]].has_option("points"):
        values["memory_points"] = shape["points"]
    torch.manual_seed(seed)
    return em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset(**values, **memory, vocab_size=VOCABULARY))
