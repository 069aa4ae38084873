"""Not in the paper: how far back a model remembers what it was told, as accuracy by distance."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import elastic_memory as em
from elastic_memory.common.defaults import BLOCK_SIZE
from elastic_memory.common.files import write_json
from elastic_memory.evaluation.recall import DISTANCES, TASKS, VOCABULARY, learn, recall
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
    for task in plan["tasks"]:
        for row, memory in plan["rows"].items():
            model = _model(memory, plan["model"]).to(device)
            learn(model, task, TRAINED, plan["steps"], rows=plan["batch"], learning_rate=3e-3)
            for name in _readings(model, row, memory["memory"]):
                found = recall(model, task, DISTANCES, samples=plan["samples"])
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


def _readings(model: Any, row: str, memory: str) -> Iterator[str]:
    """As trained; and, if order and points can be changed, with both multiplied by `GROWN`."""
    yield row
    if MEMORIES[memory].has_option("points"):
        config = model.config
        model.set_retrieval(order=GROWN * config.memory_order, points=GROWN * config.memory_points)
        yield f"{row}, {GROWN}x at test time"


def _model(memory: dict[str, str], shape: dict[str, Any]) -> Any:
    values = {name: value for name, value in shape.items() if name != "points"}
    if MEMORIES[memory["memory"]].has_option("points"):
        values["memory_points"] = shape["points"]
    torch.manual_seed(0)
    return em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset(**values, **memory, vocab_size=VOCABULARY))
