"""The folder of one run: recipe, metrics, events, checkpoints, result.

RUNS/small-elastic-seed_2-1a2b3c4d5e/      recipe, overrides, a hash of everything that is trained
  recipe.yaml    every key, resolved        run.json       data, machine, versions, commit, order of samples
  metrics.jsonl  one line per step          events.jsonl   starts, resumes, rejected checkpoints, restarts, the end
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
    """The run ended before its last step, and the user must know why; what was saved is intact."""


class Run:
    """A run folder, named after its recipe and a hash of what is trained."""

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
        """Whether training was started here."""
        return (self.folder / "run.json").exists()

    @property
    def finished(self) -> bool:
        """Whether the result is written."""
        return self.result.exists()

    def content(self) -> dict[str, Any]:
        """The content of `result.json`."""
        return read_json(self.result)

    def begin(self, facts: dict[str, Any]) -> None:
        """Write the resolved recipe and the facts about data and machine."""
        recipe = yaml.safe_dump(self.recipe.to_dict(), sort_keys=False)
        write_text(self.folder / "recipe.yaml", recipe)
        write_json(self.folder / "run.json", {"data": self.data, **facts})

    def check(self, step: int) -> None:
        """Refuse to resume after `step` if the events, or the metrics up to there, are damaged."""
        logs.read(self.events)
        measured = logs.read(self.metrics, step)
        for number, line in enumerate(measured, 1):
            if line["step"] != number:
                raise ValueError(
                    f"{self.metrics} line {number} is of step {line['step']}: restore the file from a copy"
                )
        if len(measured) < step:
            raise ValueError(
                f"{self.metrics} ends after step {len(measured)}, but the checkpoint is of step {step}: restore the "
                "metrics from a copy"
            )

    def facts(self) -> dict[str, Any]:
        """What `begin` wrote."""
        return run_facts(self.folder)

    def log(self, line: dict[str, Any]) -> None:
        """Append one step's metrics."""
        logs.append(self.metrics, line)

    def flush(self) -> None:
        """Flush the metrics to disk: they must be there before the checkpoint that they lead to."""
        if self.metrics.exists():
            fsync(self.metrics)

    def rewind(self, step: int) -> None:
        """Drop the metrics after `step`, which will be repeated."""
        logs.cut(self.metrics, step)

    def measured(self) -> list[dict[str, Any]]:
        """The metrics of all steps so far."""
        return logs.read(self.metrics)

    def unwritten(self, what: str, error: Exception) -> StoppedError:
        """The error when something cannot be written: why, and which checkpoint is intact."""
        last = checkpoints.steps(self.checkpoints)
        stands = f"The checkpoint of step {last[-1]} is intact" if last else "There is no earlier checkpoint"
        cause = str(error).strip().split("\n")[0][:200]
        # torch reports a full disk as an "unexpected pos" in its file
        full = isinstance(error, OSError | SafetensorError) or "unexpected pos" in cause
        why = f"the disk may be full ({cause}). {stands}; make room and" if full else f"{cause}. {stands};"
        return StoppedError(f"{what} could not be written: {why} add --resume")

    def event(self, event: str, **details: Any) -> None:
        """Append to the history of the run, and flush it to disk."""
        logs.append(self.events, {"event": event, "time": now(), **details})
        fsync(self.events)

    def history(self, event: str) -> list[dict[str, Any]]:
        """All events of one kind, oldest first."""
        return [line for line in logs.read(self.events) if line["event"] == event]


def run_facts(folder: Path) -> dict[str, Any]:
    """The content of a run's run.json."""
    facts = read_json(folder / "run.json")
    if not isinstance(facts, dict) or not isinstance(facts.get("machine"), dict):
        raise ValueError(f"{folder / 'run.json'} is not the record of a run: restore it from a copy")
    return facts


def machine(recipe: Recipe) -> dict[str, Any]:
    """Everything that affects rounding, and nothing else."""
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
    """The current time, to the second."""
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
