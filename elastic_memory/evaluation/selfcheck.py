"""Checks that fast and plain computation agree on this machine: `elastic selfcheck` and its tests."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from elastic_memory import hippo
from elastic_memory.common.defaults import BLOCK_SIZE, ORDER, POINTS
from elastic_memory.memory import MEMORIES
from elastic_memory.model import MemoryCache, MemoryLlamaConfig, MemoryLlamaForCausalLM
from elastic_memory.operators import Bank

OPERATOR_CHECKS = 5


def count(compiled: bool) -> int:
    """How many checks there are."""
    own = sum(len(MODEL_CHECKS) + kind.has_option("algorithm") + compiled for kind in MEMORIES.values())
    return OPERATOR_CHECKS + own


def checks(device: str, compiled: bool = False) -> Iterator[tuple[str, float, float]]:
    """Name, largest error and bound of each check."""
    yield from operator_checks(device)
    for memory in MEMORIES:
        model, ids = _model(memory, device), _ids(device)
        for name, check in MODEL_CHECKS.items():
            yield f"{memory}: {name}", check(model, ids), 1e-4
        if any(MEMORIES[memory].has_option("algorithm") for _ in model.memories):
            yield f"{memory}: direct algorithm = recurrent, gradients too", _algorithms(model, ids), 1e-4
        if compiled:
            yield f"{memory}: compiled = eager", _compiled(model, ids), 1e-4


def operator_checks(device: str) -> Iterator[tuple[str, float, float]]:
    """The mathematics: closed forms against their defining properties, and streaming against the direct algorithm."""
    there = torch.device(device)
    order, size, blocks = ORDER, BLOCK_SIZE, 16
    first, second = hippo.transition(order, 8, 10, device=there), hippo.transition(order, 9, 9, device=there)
    whole = first @ hippo.transition(order, 6, 8, device=there)
    yield "transition composes", float((whole - hippo.transition(order, 6, 10, device=there)).abs().max()), 1e-10
    yield "transition of no time is the identity", float((second - torch.eye(order, device=there)).abs().max()), 1e-12
    norm = float(torch.linalg.matrix_norm(first, 2))
    yield "transition has norm sqrt(start / end)", abs(norm - (8 / 10) ** 0.5), 1e-9

    parts = [torch.randn(n, 2, device=there, generator=torch.Generator(there).manual_seed(n)) for n in (1500, 2500)]
    one, other = (hippo.compress(part, order) for part in parts)
    joined = hippo.join(one, other, 1500, 2500)
    yield "joined states = state of both", float((joined - hippo.compress(torch.cat(parts), order)).abs().max()), 1e-10

    bank = Bank(order, POINTS, "exponential")
    signal = torch.randn(size * blocks, 8, device=there, generator=torch.Generator(there).manual_seed(0))
    state = torch.zeros(order, 8, device=there)
    for block in range(blocks):
        step = bank.step(block * size, (block + 1) * size, there)
        state = step.transition @ state + step.projection @ signal[block * size : (block + 1) * size]
    streamed = bank.reconstruction(size * blocks, there) @ state
    direct = bank.direct(size * blocks, there, torch.float32) @ signal
    yield "streamed state = direct operator, 32,768 tokens", float((streamed - direct).norm() / direct.norm()), 1e-4


def _model(memory: str, device: str) -> Any:
    torch.manual_seed(0)
    config = MemoryLlamaConfig.preset("tiny", memory=memory, block_size=16, initializer_range=0.1)
    return MemoryLlamaForCausalLM(config).eval().to(device)


def _ids(device: str) -> Any:
    return torch.randint(1, 512, (3, 101), generator=torch.Generator().manual_seed(0)).to(device)


def _stream(model: Any, ids: Any, sizes: list[int], between: Callable = lambda cache: cache, **options: Any) -> Any:
    cache, logits = MemoryCache(model), []
    with torch.no_grad():
        for piece in ids.split(sizes, dim=1):
            logits.append(model(piece, past_key_values=cache, **options).logits)
            cache = between(cache)
    return torch.cat(logits, dim=1)


def _once(model: Any, ids: Any) -> Any:
    with torch.no_grad():
        return model(ids).logits


def _streamed(model: Any, ids: Any) -> float:
    return float((_stream(model, ids, [1, 1, 30, 16, 2, 51]) - _once(model, ids)).abs().max())


def _padded(model: Any, ids: Any) -> float:
    """Rows of 101, 64 and 17 tokens, padded on the left, with and without a cache, against each row alone."""
    mask, errors = torch.ones_like(ids), []
    for row, start in enumerate((0, 37, 84)):
        mask[row, :start] = 0
    with torch.no_grad():
        for cache in (None, MemoryCache(model)):
            logits = model(ids, attention_mask=mask, past_key_values=cache).logits
            for row, start in enumerate((0, 37, 84)):
                errors.append(float((logits[row, start:] - _once(model, ids[row : row + 1, start:])[0]).abs().max()))
    return max(errors)


def _saved(model: Any, ids: Any) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.safetensors"

        def through_a_file(cache: Any) -> Any:
            cache.save(path)
            return MemoryCache.load(path, model)

        logits = _stream(model, ids, [40, 20, 41], through_a_file)
    return float((logits - _once(model, ids)).abs().max())


def _side_by_side(model: Any, ids: Any) -> float:
    cache = MemoryCache(model)
    cache.read(ids[:, :90])
    with torch.no_grad():
        return float((model(ids[:, 90:], past_key_values=cache).logits - _once(model, ids)[:, 90:]).abs().max())


def _causal(model: Any, ids: Any) -> float:
    changed = ids.clone()
    changed[:, 60:] = 511 - changed[:, 60:]
    return float((_once(model, ids)[:, :60] - _once(model, changed)[:, :60]).abs().max())


def _gradients(model: Any, ids: Any) -> list[Any]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def _checkpointed(model: Any, ids: Any) -> float:
    model.train()
    plain = _gradients(model, ids)
    model.gradient_checkpointing_enable()
    again = _gradients(model, ids)
    model.gradient_checkpointing_disable()
    model.eval()
    return max(float((a - b).abs().max()) for a, b in zip(plain, again, strict=True))


def _algorithms(model: Any, ids: Any) -> float:
    found = []
    for algorithm in ("direct", "recurrent"):
        for memory in model.memories.values():
            memory.algorithm = algorithm
        found.append([_once(model, ids), *_gradients(model, ids)])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def _prefilled(model: Any, ids: Any) -> float:
    """How many tokens differ when a prompt is read in pieces of 7."""
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return float((model.generate(ids, prefill_chunk_size=7, **options) != model.generate(ids, **options)).sum())


def _compiled(model: Any, ids: Any) -> float:
    return float((torch.compile(model, fullgraph=True)(ids).logits - _once(model, ids)).abs().max())


MODEL_CHECKS: dict[str, Callable[[Any, Any], float]] = {
    "streamed = one call": _streamed,
    "padded = alone": _padded,
    "prompt in pieces = at once": _prefilled,
    "blocks in parallel = one call": _side_by_side,
    "saved and loaded = one call": _saved,
    "causal: later tokens change nothing": _causal,
    "checkpointed gradients = plain": _checkpointed,
}
