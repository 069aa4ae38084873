"""A model, the conditions it is evaluated under, and every metric by its name."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from elastic_memory.common.names import suggest
from elastic_memory.data.tokenizers import Tokenizer
from elastic_memory.evaluation.corruption import corrupted
from elastic_memory.evaluation.longppl import REFERENCE, Settings, longppl, reference_for, transformers_tokenizer
from elastic_memory.evaluation.losses import Model, Streamed, has_blocks
from elastic_memory.evaluation.perplexity import PROTOCOLS, perplexity
from elastic_memory.evaluation.recall import TASKS, learn, recall
from elastic_memory.evaluation.reconstruction import reconstruction, spectrum
from elastic_memory.evaluation.rows import Advance, Journal
from elastic_memory.streaming.fingerprint import fingerprint

DISTANCES = (1, 2, 4, 8, 16, 32, 64)  # blocks between what is said and what is asked in recall


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What differs from the model as it was trained: how memory is read, and what becomes of the local context."""

    sampling: str | None = None
    points: int | None = None
    order: int | None = None
    corrupt: float = 0.0
    corrupt_layers: str = "memory"
    seed: int = 0

    def apply(self, model: Model) -> AbstractContextManager[None]:
        """Set the retrieval for good; the corruption lasts as long as the context that is returned."""
        changes = {name: getattr(self, name) for name in ("sampling", "points", "order")}
        changes = {name: value for name, value in changes.items() if value is not None}
        if changes and not has_blocks(model):
            raise ValueError(f"{type(model).__name__} has no memory: {', '.join(changes)} cannot be changed")
        if changes:
            model.set_retrieval(**changes)
        return corrupted(model, self.corrupt, self.corrupt_layers, self.seed) if self.corrupt else nullcontext()

    def describe(self) -> list[str]:
        """For the protocol string: only what is not as trained."""
        words = [f"{name}={getattr(self, name)}" for name in ("sampling", "points", "order") if getattr(self, name)]
        return words + ([f"corrupt={self.corrupt:g} in {self.corrupt_layers} layers"] if self.corrupt else [])


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything the metrics of one evaluation need."""

    model: Model
    rows: Sequence[Any]
    tokenizer: Tokenizer | None = None
    conditions: Conditions = field(default_factory=Conditions)
    protocols: Sequence[str] = ("P0",)
    stride: int | None = None
    batch_size: int = 1
    reference: str = REFERENCE
    settings: Settings = field(default_factory=Settings)
    keys: Path | None = None
    orders: Sequence[int] = ()
    recall_steps: int = 0
    partial: Path | None = None
    identity: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def streamed(self) -> Streamed:
        """Losses under the task's conditions, shared by its metrics."""
        return Streamed(self.model)

    def journal(self, metric: str) -> Journal:
        """Where finished rows of a metric are kept: in a file that only the same evaluation will find."""
        same = {"model": fingerprint(self.model), "conditions": asdict(self.conditions), "rows": len(self.rows)}
        return Journal(self.partial, metric=metric, **same, **self.identity)

    def label(self, result: Any) -> Any:
        """The result with the conditions in its protocol string."""
        return replace(result, protocol=", ".join([result.protocol, *self.conditions.describe()]))


def _ppl(task: Task, advance: Advance) -> dict[str, Any]:
    results = {}
    for protocol in task.protocols:
        result = perplexity(
            task.model,
            task.rows,
            protocol,
            stride=task.stride,
            batch_size=task.batch_size,
            journal=task.journal(f"ppl {protocol} {task.stride}"),
            advance=advance,
            streamed=task.streamed,
        )
        results[protocol] = task.label(result)
    return results


def _longppl(task: Task, advance: Advance) -> Any:
    reference, own = reference_for(task.reference, task.tokenizer)
    settings = asdict(task.settings)
    result = longppl(
        task.model,
        transformers_tokenizer(task.tokenizer),
        task.rows,
        reference,
        own,
        **settings,
        cache=task.keys,
        journal=task.journal(f"longppl {fingerprint(reference)} {settings}"),
        advance=advance,
        streamed=task.streamed,
    )
    return task.label(result)


def _reconstruction(task: Task, advance: Advance) -> Any:
    return reconstruction(task.model, _counted(task.rows, advance), task.orders or _orders(task.model))


def _spectrum(task: Task, advance: Advance) -> Any:
    return spectrum(task.model, _counted(task.rows, advance))


def _counted(rows: Sequence[Any], advance: Advance) -> Any:
    for row in rows:
        yield row
        advance(1)


def _recall(task: Task, advance: Advance) -> Any:
    weights = {name: value.detach().clone() for name, value in task.model.state_dict().items()}
    found = []
    for name in TASKS:
        if task.recall_steps:
            task.model.load_state_dict(weights)
            learn(task.model, name, steps=task.recall_steps, report=lambda step, loss: advance(1))
        for distance in DISTANCES:
            found += recall(task.model, name, [distance])
            advance(1)
    task.model.load_state_dict(weights)
    return found


def work(task: Task, metric: str) -> int:
    """How many times a metric calls `advance`, each time by one."""
    if metric == "recall":
        return len(TASKS) * (task.recall_steps + len(DISTANCES))
    return len(task.rows) * (len(task.protocols) if metric == "ppl" else 1)


METRICS: dict[str, Callable[[Task, Advance], Any]] = {
    "ppl": _ppl,
    "longppl": _longppl,
    "reconstruction": _reconstruction,
    "spectrum": _spectrum,
    "recall": _recall,
}


def evaluate(task: Task, metrics: Sequence[str], advance: Callable[[str, int], None] = lambda name, n: None) -> dict:
    """Each metric's result by name, under the task's conditions."""
    for what, names, known in (("metric", metrics, METRICS), ("protocol", task.protocols, PROTOCOLS)):
        for name in names:
            if name not in known:
                raise ValueError(f"{what} {name!r}: {suggest(name, known)}")
    device = next(task.model.parameters()).device.type
    with task.conditions.apply(task.model), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return {name: METRICS[name](task, partial(advance, name)) for name in metrics}


def _orders(model: Model) -> Sequence[int]:
    own = getattr(model.config, "memory_order", None)
    if own is None:
        raise ValueError(f"{type(model).__name__} has no memory order of its own: say which orders to reconstruct from")
    return [own]
