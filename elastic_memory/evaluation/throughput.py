"""Speed, as the paper defines it: samples per second in training and in evaluation, as a ratio to Transformer++.

All models run in one process, in interleaved rounds, so that thermal drift does not change ratios. A GPU slows down
over its first seconds of work: these are not counted. The order of models alternates between rounds, and a ratio is
taken within a round.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from elastic_memory.common.speedups import find
from elastic_memory.evaluation.losses import Model, empty_cache, evaluating, has_blocks
from elastic_memory.shapes import Float, Int, Tensor

capture = find("cuda_graph")

WARM_SECONDS = 3.0  # of a GPU, not counted


@dataclass(frozen=True)
class Workload:
    """What is timed: rows of `length` tokens, `rows` at a time; decoding one token at a time after `history` tokens.

    Training is timed over `steps` steps, to avoid a GPU synchronisation after each. Nothing is decoded if `decoded` is
    0. An odd number of `repeats` is rounded up, so that both orders of models are timed equally often.
    """

    length: int
    rows: int = 1
    history: int = 4096
    decoded: int = 32
    steps: int = 3
    repeats: int = 4

    @property
    def rounds(self) -> int:
        """How often everything is timed: both orders equally often."""
        return self.repeats + self.repeats % 2


@dataclass(frozen=True)
class Throughput:
    """Medians over rounds; ratios are to the first model; peak memory in bytes, on a GPU only."""

    name: str
    training: float
    inference: float
    training_ratio: float
    inference_ratio: float
    peak_memory: int | None
    decoding: float | None = None
    decoding_ratio: float | None = None


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Allow tf32 for float32 products, as bfloat16 training does: memories have some."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# Many models in one process need more than the default number of recompilations.
@tensor_cores()
@torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=1024)
def throughput(
    models: Mapping[str, Model], work: Workload, advance: Callable[[int], None] = lambda rounds: None
) -> list[Throughput]:
    """Samples per second of training steps and of evaluation, tokens per second of decoding.

    A training step is forward, backward, clipping and AdamW on `work.rows` samples; on a GPU in bfloat16, and as a CUDA
    graph where training uses one. Peak memory is that of a step without a CUDA graph.
    """
    if not models:
        raise ValueError("no models to time: give at least one; ratios are to the first")
    if work.repeats < 1:
        raise ValueError(f"repeats={work.repeats}: give 1 or more")
    ids = {name: _random_ids(model, work) for name, model in models.items()}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=0.0, fused=_device(model).type == "cuda")
        for name, model in models.items()
    }
    steps: dict[str, Callable[..., Tensor]] = {name: partial(train_once, model) for name, model in models.items()}
    peaks = {
        name: _peak(model, partial(_train, model, steps[name], ids[name], optimizers[name], 1), optimizers[name])
        for name, model in models.items()
    }
    for name, model in models.items():
        if capture is not None and capture.gains(model):
            _check_room(peaks[name] or 0, _room(models))
            steps[name] = capture.Captured(steps[name], model.parameters())
    crowded = sum(peak or 0 for peak in peaks.values()) > _room(models)
    kinds: dict[str, dict[str, Callable[[], float]]] = {
        name: {
            "training": partial(_timed_training, model, steps[name], ids[name], optimizers[name], work.steps, crowded),
            "inference": partial(_timed, model, partial(evaluate_once, model, ids[name])),
            "decoding": partial(_decode, model, work),
        }
        for name, model in models.items()
    }
    if not work.decoded:
        for own in kinds.values():
            del own["decoding"]
    amount = {"training": work.rows * work.steps, "inference": work.rows, "decoding": work.rows * work.decoded}
    seconds = _interleaved(models, kinds, work.rounds, advance)
    base = next(iter(seconds.values()))
    return [
        Throughput(
            name,
            **{kind: amount[kind] / statistics.median(times) for kind, times in own.items()},
            **{f"{kind}_ratio": _ratio(base[kind], times) for kind, times in own.items()},
            peak_memory=peaks[name],
        )
        for name, own in seconds.items()
    ]


def _interleaved(
    models: Mapping[str, Model],
    kinds: dict[str, dict[str, Callable[[], float]]],
    rounds: int,
    advance: Callable[[int], None],
) -> dict[str, dict[str, list[float]]]:
    """Seconds of every kind of work of every model, in rounds of alternating order, after warm-up."""
    seconds: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in own} for name, own in kinds.items()}
    order = list(models)
    warm: float | None = None  # when everything was compiled
    while len(seconds[order[0]]["training"]) < rounds:
        counts = warm is not None and time.perf_counter() - warm >= _warm_seconds(models[order[0]])
        for name in order:
            for kind, run in kinds[name].items():
                taken = run()
                if counts:
                    seconds[name][kind].append(taken)
        warm, order = time.perf_counter() if warm is None else warm, order[::-1]
        advance(int(counts))
    return seconds


def _warm_seconds(model: Model) -> float:
    return WARM_SECONDS if _device(model).type == "cuda" else 0.0


def _ratio(base: list[float], own: list[float]) -> float:
    """Speed relative to the base: the median over rounds."""
    return statistics.median(theirs / ours for theirs, ours in zip(base, own, strict=True))


def train_once(model: Model, ids: Int[Tensor, "row token"]) -> Float[Tensor, ""]:
    """Forward and backward."""
    with _autocast(model):
        loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def _train(
    model: Model,
    step: Callable[..., Tensor],
    ids: Int[Tensor, "row token"],
    optimizer: torch.optim.Optimizer,
    steps: int,
) -> None:
    model.train()
    for _ in range(steps):
        step(ids=ids)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _timed_training(
    model: Model,
    step: Callable[..., Tensor],
    ids: Int[Tensor, "row token"],
    optimizer: torch.optim.Optimizer,
    steps: int,
    crowded: bool,
) -> float:
    """Seconds of `steps` training steps.

    A CUDA graph keeps its memory. If other models need that memory (`crowded`), the graph is captured again in each
    round, and the GPU warms up again.
    """
    run = partial(_train, model, step, ids, optimizer)
    if capture is None or not isinstance(step, capture.Captured):
        return _timed(model, partial(run, steps))
    if step.graph is None:
        run(2)
        warm = time.perf_counter() + _warm_seconds(model) / 3
        while time.perf_counter() < warm:
            _timed(model, partial(run, 1))
    taken = _timed(model, partial(run, steps))
    if crowded:
        optimizer.zero_grad()
        step.release()
        torch.cuda.empty_cache()
    return taken


def evaluate_once(model: Model, ids: Int[Tensor, "row token"]) -> None:
    """Forward without gradients; our models return the loss alone, without logits."""
    kept = {"logits_to_keep": 1} if has_blocks(model) else {}
    with evaluating(model), _autocast(model):
        model(ids, labels=ids, **kept)


def decoding_speed(model: Model, history: int, tokens: int) -> float:
    """Tokens per second when decoding one row after `history` tokens; the first of two runs compiles."""
    work = Workload(length=history, history=history, decoded=tokens)
    _decode(model, work)
    return tokens / _decode(model, work)


def _decode(model: Model, work: Workload) -> float:
    device = _device(model)
    prompt = torch.randint(model.config.vocab_size, (work.rows, work.history), device=device)
    with evaluating(model), _autocast(model):
        output = model(prompt, past_key_values=empty_cache(model), use_cache=True, logits_to_keep=1)
        cache = output.past_key_values

        def run() -> None:
            for _ in range(work.decoded):
                model(prompt[:, :1], past_key_values=cache, use_cache=True)

        return _timed(model, run)


def _timed(model: Model, run: Callable[[], None]) -> float:
    cuda = _device(model).type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _peak(model: Model, step: Callable[[], object], optimizer: torch.optim.Optimizer) -> int | None:
    """Bytes that a training step needs, without those of other models on the GPU."""
    if _device(model).type != "cuda":
        return None
    step()
    held = [*model.parameters(), *model.buffers()]
    held += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    own = sum(tensor.numel() * tensor.element_size() for tensor in held)
    return torch.cuda.max_memory_allocated() - before + own


def _room(models: Mapping[str, Model]) -> float:
    """Bytes of a GPU that models may fill; the rest is lost to fragmentation."""
    device = _device(next(iter(models.values())))
    return 0.95 * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else float("inf")


def _check_room(peak: int, room: float) -> None:
    """Refuse a capture that would run out of memory, which would break the device."""
    needed = torch.cuda.memory_allocated() + peak
    if needed > room:
        raise torch.OutOfMemoryError(
            f"a captured step needs {needed / 2**30:.0f} GiB, {room / 2**30:.0f} fit: time fewer models or shorter rows"
        )


def _autocast(model: Model) -> torch.autocast:
    device = _device(model).type
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def _random_ids(model: Model, work: Workload) -> Int[Tensor, "row token"]:
    return torch.randint(model.config.vocab_size, (work.rows, work.length), device=_device(model))


def _device(model: Model) -> torch.device:
    return next(model.parameters()).device
