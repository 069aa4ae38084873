"""Elastic memory with other operators P, K and R: state = P state + K tokens, and R state is read."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from elastic_memory.memory.contract import Host, KeyValues, Memory, Reading, State
from elastic_memory.memory.elastic import ElasticMemory
from elastic_memory.memory.tools import static
from elastic_memory.operators import CACHED, Step, constant
from elastic_memory.shapes import Float, Tensor


class Rule(Protocol):
    """The operators of a memory; a named tuple of numbers, so that it can be a constant of compiled graphs.

    Operators are float64 on the CPU: [row, column], or [head, row, column] if heads differ.
    """

    def __hash__(self) -> int:
        """Equal rules share their operators."""

    def earliest(self, start: int, end: int) -> tuple[int, int]:
        """The earliest (start, end) with the same operators, so that operators that stop changing are built once."""

    def step(self, start: int, end: int) -> Step:
        """P and K, which write tokens `start` to `end - 1`."""

    def reader(self, history: int) -> Tensor:
        """R, which reads the state of `history` tokens."""


class SampleOperators(NamedTuple):
    """The operators of a sample: P and K of each block but the last, R for each but the first."""

    transitions: tuple[Tensor, ...]
    projections: tuple[Tensor, ...]
    readers: tuple[Tensor, ...]


class LinearMemory(ElasticMemory):
    """A memory that writes and reads by the operators of its `rule`."""

    rule: Rule

    def make_rule(self) -> Rule:
        """The rule under the present retrieval settings."""
        raise NotImplementedError

    def set_retrieval(self, **changes: Any) -> None:  # type: ignore[override]
        """Read with another sampling, number of points or order than the model was trained with."""
        super().set_retrieval(**changes)
        self.update_rule()

    def update_rule(self) -> None:
        """Make the rule anew. Readings depend on it, not on the bank: rows do not belong to the whole history."""
        self.rule = self.make_rule()
        self.retrieval = (self.rule,)

    def reader(self, seen: int, device: torch.device) -> Float[Tensor, "*head point order"]:
        """R of the rule."""
        return reader_of(self.rule, seen, str(device), torch.float32)

    def step(self, start: int, end: int, device: torch.device) -> Step:
        """P and K of the rule."""
        return step_of(self.rule, start, end, str(device), torch.float32)

    join = Memory.join  # type: ignore[assignment]  # a token's place in the state depends on the text before it

    def read_all(self, key: KeyValues, value: KeyValues, host: Host) -> Sequence[Reading]:
        """Block by block, one product per head for the whole batch."""
        size, dtype = static(self.geometry.block_size), torch.promote_types(key.dtype, torch.float32)
        plan = plan_of(self.rule, size, static(-(-key.shape[2] // size)), str(key.device), dtype)
        # [2, batch, head, token, dim] -> [head, token, feature]
        signal = torch.stack((key, value)).permute(2, 3, 0, 1, 4)
        with torch.autocast(key.device.type, enabled=False):
            entering = states(plan, signal.flatten(2).to(dtype), size, self.cut)
            readings = [reader @ state for reader, state in zip(plan.readers, entering, strict=True)]
        shape = signal.shape[2:]
        pairs = (tuple(one.to(key.dtype).unflatten(2, shape).permute(2, 3, 0, 1, 4).unbind(0)) for one in readings)
        return [self.finished(pair, block * size) for block, pair in enumerate(pairs, 1)]


def states(
    plan: SampleOperators,
    signal: Float[Tensor, "head token feature"],
    size: int,
    cut: Callable[[State, int], State] = lambda state, block: state,
) -> list[Tensor]:
    """The states before blocks 1, 2, ... of a sample, after `cut`."""
    found: list[Tensor] = []
    for index, (transition, projection) in enumerate(zip(plan.transitions, plan.projections, strict=True)):
        state = projection @ signal[:, index * size : (index + 1) * size]
        if found:
            state = transition @ found[-1] + state
        found += cut((state,), index + 1)
    return found


# A constant of the compiled graph: building operators is float64 work that must not be traced.
@torch.compiler.assume_constant_result
def plan_of(rule: Rule, size: int, blocks: int, device: str, dtype: torch.dtype) -> SampleOperators:
    """All operators of a sample of `blocks` blocks."""
    return _plan(rule, size, blocks, device, dtype)


@lru_cache(maxsize=CACHED)
def _plan(rule: Rule, size: int, blocks: int, device: str, dtype: torch.dtype) -> SampleOperators:
    ends = range(size, blocks * size, size)
    steps = [step_of(rule, end - size, end, device, dtype) for end in ends]
    readers = readers_of(rule, size, blocks, device, dtype)
    return SampleOperators(tuple(step.transition for step in steps), tuple(step.projection for step in steps), readers)


@torch.compiler.assume_constant_result
def readers_of(rule: Rule, size: int, blocks: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """R for each block of a sample but the first."""
    return tuple(reader_of(rule, end, device, dtype) for end in range(size, blocks * size, size))


def step_of(rule: Rule, start: int, end: int, device: str, dtype: torch.dtype) -> Step:
    """P and K of a rule, cast and on a device."""
    return _step(rule, *rule.earliest(start, end), device, dtype)


def reader_of(rule: Rule, history: int, device: str, dtype: torch.dtype) -> Tensor:
    """R of a rule, cast and on a device."""
    return _reader(rule, rule.earliest(history, history)[1], device, dtype)


@lru_cache(maxsize=CACHED)
@constant
def _step(rule: Rule, start: int, end: int, device: str, dtype: torch.dtype) -> Step:
    return Step(*(operator.to(dtype).to(device) for operator in rule.step(start, end)))


@lru_cache(maxsize=CACHED)
@constant
def _reader(rule: Rule, history: int, device: str, dtype: torch.dtype) -> Tensor:
    return rule.reader(history).to(dtype).to(device)
