"""The folder of one run: what is trained, what was measured, what happened.

RUNS/small-elastic-seed_2-1a2b3c4d5e/      recipe, what differs from it, a hash of all that is trained
  recipe.yaml    every key, resolved        run.json       data, machine, versions, commit, order of samples
  metrics.jsonl  one line a step            events.jsonl   starts, resumes, fallbacks, restarts, the end
  checkpoints/   step-00000200 ...          model/         the result, with its card
  result.json    the run in one small file
"""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from safetensors import SafetensorError

from elastic_memory.common.files import fsync, write_json, write_text
from elastic_memory.common.strict import read_json
from elastic_memory.training import checkpoints, logs
from elastic_memory.training.recipe import Recipe


class StoppedError(RuntimeError):
    """The run ended before its last step for a reason its user must know; what was saved is intact."""


class Run:
    """A run folder, named by what is trained."""

    def __init__(self, out: Path, recipe: Recipe, data: str) -> None:
        self.recipe, self.data = recipe, data
        self.digest = recipe.digest(data)
        self.folder = out / "-".join(filter(None, (recipe.name, recipe.variant, self.digest)))
        self.checkpoints = self.folder / "checkpoints"
        self.metrics = self.folder / "metrics.jsonl"
        self.events = self.folder / "events.jsonl"
        self.result = self.folder / "result.json"
        self.model = self.folder / "model"

    @property
    def exists(self) -> bool:
        """Whether training ever began here."""
        return (self.folder / "run.json").exists()

    @property
    def finished(self) -> bool:
        """Whether the result is written."""
        return self.result.exists()

    def content(self) -> dict[str, Any]:
        """What `result.json` says."""
        return read_json(self.result)

    def begin(self, facts: dict[str, Any]) -> None:
        """Record the resolved recipe and the facts of the machine."""
        recipe = yaml.safe_dump(self.recipe.to_dict(), sort_keys=False)
        write_text(self.folder / "recipe.yaml", recipe)
        write_json(self.folder / "run.json", {"data": self.data, **facts})

    def check(self, step: int) -> None:
        """Refuse to go on after `step` unless the events, and the metrics up to there, are all as they were written."""
        logs.read(self.events)
        measured = logs.read(self.metrics, step)
        for number, line in enumerate(measured, 1):
            if line["step"] != number:
                raise ValueError(f"{self.metrics} line {number} is of step {line['step']}: put the file back as it was")
        if len(measured) < step:
            raise ValueError(f"{self.metrics} ends after step {len(measured)}, the checkpoint is of step {step}")

    def facts(self) -> dict[str, Any]:
        """What `begin` recorded."""
        return run_facts(self.folder)

    def log(self, line: dict[str, Any]) -> None:
        """Append one step's metrics."""
        logs.append(self.metrics, line)

    def flush(self) -> None:
        """Force the metrics to the disk: a checkpoint must not be there before the metrics that led to it."""
        if self.metrics.exists():
            fsync(self.metrics)

    def rewind(self, step: int) -> None:
        """Drop the metrics after `step`: these steps will be taken again."""
        logs.cut(self.metrics, step)

    def measured(self) -> list[dict[str, Any]]:
        """The metrics of all steps so far."""
        return logs.read(self.metrics)

    def unwritten(self, what: str, error: Exception) -> StoppedError:
        """Why the run ends when something of it cannot be written, and where it then stands."""
        last = checkpoints.steps(self.checkpoints)
        stands = f"The checkpoint of step {last[-1]} is intact" if last else "There was no checkpoint before"
        cause = str(error).strip().split("\n")[0][:200]
        # torch reports a full disk as a wrong position in its file: the cause alone would not be understood
        full = isinstance(error, OSError | SafetensorError) or "unexpected pos" in cause
        why = f"the disk may be full ({cause}). {stands}; make room and" if full else f"{cause}. {stands};"
        return StoppedError(f"{what} could not be written: {why} add --resume")

    def event(self, event: str, **details: Any) -> None:
        """Append to the history of the run, and force it to the disk."""
        logs.append(self.events, {"event": event, "time": now(), **details})
        fsync(self.events)

    def history(self, event: str) -> list[dict[str, Any]]:
        """All events of one kind, oldest first."""
        return [line for line in logs.read(self.events) if line["event"] == event]


def run_facts(folder: Path) -> dict[str, Any]:
    """The content of a run's run.json, which is a mapping that names a machine."""
    facts = read_json(folder / "run.json")
    if not isinstance(facts, dict) or not isinstance(facts.get("machine"), dict):
        raise ValueError(f"{folder / 'run.json'} is not the record of a run: put it back as it was")
    return facts


def machine(recipe: Recipe) -> dict[str, Any]:
    """Everything that changes how sums are rounded, and nothing else."""
    execution = recipe.execution
    cuda = torch.cuda.is_available() and execution.device != "cpu"
    return {
        "device": torch.cuda.get_device_name(0) if cuda else "cpu",
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": None if cuda else torch.get_num_threads(),
        "instructions": None if cuda else torch.backends.cpu.get_cpu_capability(),
        "micro_batch": execution.micro_batch,
        "compile": execution.compile,
        "gradient_checkpointing": execution.gradient_checkpointing,
        "deterministic": execution.deterministic,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def now() -> str:
    """The time, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def differences(before: dict[str, Any], after: dict[str, Any], path: str = "") -> list[str]:
    """`key: old -> new` for every leaf in which two nested dictionaries differ."""
    lines = []
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{path}{key}.")
        elif old != new:
            lines.append(f"{path}{key}: {old} -> {new}")
    return lines
