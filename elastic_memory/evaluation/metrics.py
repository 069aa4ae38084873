"""An evaluation: model, rows, conditions, and the metrics by name."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from elastic_memory.common.defaults import LONGPPL_REFERENCE, RULER_LENGTHS
from elastic_memory.common.names import suggest
from elastic_memory.data.tokenizers import Tokenizer
from elastic_memory.evaluation import mqar, ruler
from elastic_memory.evaluation.corruption import corrupted
from elastic_memory.evaluation.journal import Advance, Journal
from elastic_memory.evaluation.longppl import FoundKeys, Reference, Settings, longppl, transformers_tokenizer
from elastic_memory.evaluation.losses import Model, Streamed, has_blocks
from elastic_memory.evaluation.perplexity import PROTOCOLS, perplexity
from elastic_memory.evaluation.recall import DISTANCES, TASKS, fit, learn, recall
from elastic_memory.evaluation.reconstruction import reconstruction, spectrum
from elastic_memory.streaming.fingerprint import fingerprint


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What differs from the model as trained: how memory is read, and how local context is corrupted."""

    sampling: str | None = None
    points: int | None = None
    order: int | None = None
    corrupt: float = 0.0
    corrupt_layers: str = "memory"
    seed: int = 0

    def apply(self, model: Model) -> AbstractContextManager[None]:
        """Set the retrieval permanently; corruption lasts as long as the returned context."""
        changes = {name: getattr(self, name) for name in ("sampling", "points", "order")}
        changes = {name: value for name, value in changes.items() if value is not None}
        if changes and not has_blocks(model):
            raise ValueError(f"{type(model).__name__} has no memory: {', '.join(changes)} cannot be changed")
        if changes:
            model.set_retrieval(**changes)
        return corrupted(model, self.corrupt, self.corrupt_layers, self.seed) if self.corrupt else nullcontext()

    def describe(self) -> list[str]:
        """For the protocol string: only what differs from training."""
        words = [f"{name}={getattr(self, name)}" for name in ("sampling", "points", "order") if getattr(self, name)]
        return words + ([f"corrupt={self.corrupt:g} in {self.corrupt_layers} layers"] if self.corrupt else [])


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A model, rows, conditions, and the options of all metrics."""

    model: Model
    rows: Sequence[Any]
    tokenizer: Tokenizer | None = None
    conditions: Conditions = field(default_factory=Conditions)
    protocols: Sequence[str] = ("P0",)
    stride: int | None = None  # of protocol P1
    batch_size: int = 1
    reference: str = LONGPPL_REFERENCE
    settings: Settings = field(default_factory=Settings)
    keys: Path | None = None  # folder that caches LongPPL's key tokens
    known_keys: FoundKeys | None = None
    orders: Sequence[int] = ()  # of reconstruction; empty: the memory's own
    recall_steps: int = 0  # of training before recall and MQAR
    ruler_lengths: Sequence[int] | None = None  # None: RULER_LENGTHS
    partial: Path | None = None  # folder of journals, which make the evaluation resumable
    identity: dict[str, Any] = field(default_factory=dict)  # what a journal must agree with, besides model and rows

    @cached_property
    def streamed(self) -> Streamed:
        """Losses under its conditions, shared by its metrics."""
        return Streamed(self.model)

    def journal(self, metric: str) -> Journal:
        """The journal of a metric, in a file that only the same evaluation finds."""
        same = {"model": fingerprint(self.model), "conditions": asdict(self.conditions), "rows": len(self.rows)}
        return Journal(self.partial, metric=metric, **same, **self.identity)

    def label(self, result: Any) -> Any:
        """The result with the conditions in its protocol string."""
        return replace(result, protocol=", ".join([result.protocol, *self.conditions.describe()]))


def _ppl(evaluation: Evaluation, advance: Advance) -> dict[str, Any]:
    results = {}
    for protocol in evaluation.protocols:
        result = perplexity(
            evaluation.model,
            evaluation.rows,
            protocol,
            stride=evaluation.stride,
            batch_size=evaluation.batch_size,
            journal=evaluation.journal(f"ppl {protocol} {evaluation.stride}"),
            advance=advance,
            streamed=evaluation.streamed,
        )
        results[protocol] = evaluation.label(result)
    return results


def _longppl(evaluation: Evaluation, advance: Advance) -> Any:
    known = evaluation.known_keys
    if known:
        reference = Reference.from_keys(known, evaluation.reference, evaluation.tokenizer)
    else:
        reference = Reference.from_path(evaluation.reference, evaluation.tokenizer, evaluation.keys)
    settings = asdict(evaluation.settings)
    result = longppl(
        evaluation.model,
        transformers_tokenizer(evaluation.tokenizer),
        evaluation.rows,
        reference,
        **settings,
        cache=evaluation.keys,
        known=known,
        journal=evaluation.journal(f"longppl {reference.identity} {settings}"),
        advance=advance,
        streamed=evaluation.streamed,
    )
    return evaluation.label(result)


def _reconstruction(evaluation: Evaluation, advance: Advance) -> Any:
    return reconstruction(
        evaluation.model, _counted(evaluation.rows, advance), evaluation.orders or _orders(evaluation.model)
    )


def _spectrum(evaluation: Evaluation, advance: Advance) -> Any:
    return spectrum(evaluation.model, _counted(evaluation.rows, advance))


def _counted(rows: Sequence[Any], advance: Advance) -> Any:
    for row in rows:
        yield row
        advance(1)


@contextmanager
def _restored(model: Model) -> Iterator[Callable[[], None]]:
    """Restore the model's weights after this context, which may train it; yields a function that resets them sooner."""
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    training = model.training
    try:
        yield lambda: model.load_state_dict(weights)
    finally:
        model.load_state_dict(weights)
        model.zero_grad()
        model.train(training)


def _recall(evaluation: Evaluation, advance: Advance) -> Any:
    found = []
    with _restored(evaluation.model) as reset:
        for name in TASKS:
            if evaluation.recall_steps:
                reset()
                learn(evaluation.model, name, steps=evaluation.recall_steps, report=lambda step, loss: advance(1))
            for distance in DISTANCES:
                found += recall(evaluation.model, name, [distance])
                advance(1)
    return found


def _mqar(evaluation: Evaluation, advance: Advance) -> Any:
    found = []
    with _restored(evaluation.model):
        fit(
            evaluation.model,
            mqar.batches(evaluation.model, evaluation.recall_steps),
            report=lambda step, loss: advance(1),
        )
        for pairs in mqar.sizes(evaluation.model)[2]:
            found.append(mqar.mqar(evaluation.model, pairs))
            advance(1)
    return found


def _ruler(task: str, evaluation: Evaluation, advance: Advance) -> Any:
    if evaluation.tokenizer is None:
        raise ValueError("RULER's tasks are text: the model has no tokenizer beside it; give --data of its tokenizer")
    return [
        ruler.ruler(evaluation.model, evaluation.tokenizer, task, length, advance=advance)
        for length in evaluation.ruler_lengths or RULER_LENGTHS
    ]


def progress_total(evaluation: Evaluation, metric: str) -> int:
    """The total that a metric's progress bar counts to: the sum of all its calls of `advance`."""
    if metric == "recall":
        return len(TASKS) * (evaluation.recall_steps + len(DISTANCES))
    if metric == "mqar":
        return evaluation.recall_steps + len(mqar.sizes(evaluation.model)[2])
    if metric.startswith("ruler-"):
        return len(evaluation.ruler_lengths or RULER_LENGTHS) * ruler.SAMPLES
    return len(evaluation.rows) * (len(evaluation.protocols) if metric == "ppl" else 1)


METRICS: dict[str, Callable[[Evaluation, Advance], Any]] = {
    "ppl": _ppl,
    "longppl": _longppl,
    "reconstruction": _reconstruction,
    "spectrum": _spectrum,
    "recall": _recall,
    "mqar": _mqar,
    **{f"ruler-{task}": partial(_ruler, task) for task in ruler.TASKS},
}
OWN_ROWS = {"recall", "mqar", *(f"ruler-{task}" for task in ruler.TASKS)}  # metrics that need no data


def evaluate(
    evaluation: Evaluation, metrics: Sequence[str], advance: Callable[[str, int], None] = lambda name, n: None
) -> dict:
    """Each metric's result by name, under its conditions."""
    for what, names, known in (("metric", metrics, METRICS), ("protocol", evaluation.protocols, PROTOCOLS)):
        for name in names:
            if name not in known:
                raise ValueError(f"{what} {name!r}: {suggest(name, known)}")
    device = next(evaluation.model.parameters()).device.type
    with (
        evaluation.conditions.apply(evaluation.model),
        torch.autocast(device, torch.bfloat16, enabled=device == "cuda"),
    ):
        return {name: METRICS[name](evaluation, partial(advance, name)) for name in metrics}


def _orders(model: Model) -> Sequence[int]:
    own = getattr(model.config, "memory_order", None)
    if own is None:
        raise ValueError(f"{type(model).__name__} has no memory order: give the orders to reconstruct (--reconstruct)")
    return [own]
