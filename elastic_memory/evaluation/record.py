"""Run an evaluation with progress bars, and record everything that its numbers depend on."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from elastic_memory.common.environment import environment
from elastic_memory.common.files import write_json
from elastic_memory.common.progress import Bars
from elastic_memory.data import Samples
from elastic_memory.evaluation.metrics import METRICS, Evaluation, evaluate, progress_total
from elastic_memory.model.parameters import parameters_of


def with_progress(evaluation: Evaluation, metrics: Sequence[str]) -> dict[str, Any]:
    """Each metric's result by name; shows a bar per metric."""
    totals = {name: progress_total(evaluation, name) for name in metrics if name in METRICS}
    with Bars() as progress:
        bars = {name: progress.add_task(name, total=total) for name, total in totals.items()}
        return evaluate(evaluation, metrics, lambda name, count: progress.advance(bars[name], count))


def write_record(
    out: Path, checkpoint: str, evaluation: Evaluation, rows: Samples | None, results: dict[str, Any]
) -> None:
    """Write the results as JSON."""
    out.parent.mkdir(parents=True, exist_ok=True)
    name = Path(checkpoint).name if Path(checkpoint).exists() else checkpoint
    write_json(out, describe(name, evaluation, rows, results))


def describe(checkpoint: str, evaluation: Evaluation, rows: Samples | None, results: dict[str, Any]) -> dict[str, Any]:
    """The results with all that they depend on: hashes, precision, versions, date and commit."""
    device = next(evaluation.model.parameters()).device
    return {
        "checkpoint": checkpoint,
        "memory": evaluation.model.memory_report() if hasattr(evaluation.model, "memory_report") else [],
        "parameters": parameters_of(evaluation.model),
        "data": rows and {
            "split": rows.split,
            "sha256": rows.fingerprint,
            "tokenizer": rows.manifest["tokenizer"]["sha256"],
            "length": rows.length,
            "rows": len(evaluation.rows),
        },
        "conditions": dataclasses.asdict(evaluation.conditions),
        "precision": "bfloat16 autocast" if device.type == "cuda" else str(next(evaluation.model.parameters()).dtype),
        "log_softmax": "float32",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "transformers": transformers.__version__,
        **environment(),
        "metrics": {name: _plain(result) for name, result in results.items()},
    }  # fmt: skip


def _plain(result: Any) -> Any:
    if isinstance(result, dict):
        return {key: _plain(value) for key, value in result.items()}
    if isinstance(result, list):
        return [_plain(value) for value in result]
    # Positions of key tokens are in the folder of keys.
    return {key: value for key, value in dataclasses.asdict(result).items() if key != "keys"}
