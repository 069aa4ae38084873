"""Hybrids: part of the budget for the newest raw tokens, the rest for another memory of the whole history."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_memory.common.defaults import ORDER, POINTS
from elastic_memory.memory.contract import Block, Geometry, Host, KeyValues, MemoryInfo, ParallelMemory, Reading, State
from elastic_memory.memory.elastic import ElasticMemory
from elastic_memory.memory.memorizing import MemorizingMemory
from elastic_memory.memory.tools import beside, budget
from elastic_memory.shapes import Tensor


class QueueBeside(ParallelMemory):
    """Another memory, which shares the block's softmax, beside a queue of `raw` tokens at their true positions.

    Under sliding attention the queue is a window wider by as many tokens.
    """

    shares_softmax = True

    def __init__(self, rest: ParallelMemory, raw: int):
        super().__init__(rest.geometry, detach_every=rest.detach_every)
        self.rest = rest
        self.queue = MemorizingMemory(
            rest.geometry, order=raw, combine="joint", positions="full", detach_every=rest.detach_every
        )
        self.adds_score, self.retrieval = rest.adds_score, rest.retrieval
        self.widens, self.no_sliding = self.queue.widens, self.queue.no_sliding
        self.no_join = rest.no_join or self.queue.no_join
        self.parts = len(rest.start(0, "meta"))

    def start(self, batch: int, device: torch.device | str | None = None) -> State:
        """The other memory's state, then the queue."""
        return (*self.rest.start(batch, device), *self.queue.start(batch, device))

    def read(self, state: State, seen: int, host: Host) -> Reading:
        """The other memory's columns, then the queue's tokens."""
        rest, queue = self._split(state)
        return beside(self.rest.read(rest, seen, host), self.queue.read(queue, seen, host))

    def write(self, state: State, block: Block, seen: int) -> State:
        """Both parts, independently."""
        rest, queue = self._split(state)
        return (*self.rest.write(rest, block, seen), *self.queue.write(queue, block, seen))

    def join(self, state: State, seen: int, other: State, other_seen: int) -> State:
        """Both parts, independently."""
        (rest, queue), (other_rest, other_queue) = self._split(state), self._split(other)
        joined = self.rest.join(rest, seen, other_rest, other_seen)
        return (*joined, *self.queue.join(queue, seen, other_queue, other_seen))

    def read_all(self, key: KeyValues, value: KeyValues, host: Host) -> Sequence[Reading]:
        """The readings of both, side by side."""
        readings, queues = (memory.read_all(key, value, host) for memory in (self.rest, self.queue))
        return [beside(*pair) for pair in zip(readings, queues, strict=True)] if queues else readings

    def set_retrieval(self, **changes: Any) -> None:
        """Change how the other memory is read; the queue stays as it is."""
        self.rest.set_retrieval(**changes)
        self.retrieval = self.rest.retrieval

    def adapt(self, state: State) -> tuple[State, str | None]:
        """Fit the other memory to its present settings."""
        rest, queue = self._split(state)
        adapted, said = self.rest.adapt(rest)
        return (*adapted, *queue), said

    def _split(self, state: State) -> tuple[State, State]:
        return state[: self.parts], state[self.parts :]


class RecentMemory(QueueBeside):
    """`share` of `order` is a queue at its true positions, the rest a polynomial; both join the block's softmax.

    Under sliding attention the queue is a window wider by as many tokens.
    """

    info = MemoryInfo(
        source="control: elastic memory beside a queue, at equal floats",
        phrase="the newest tokens raw, the whole history as a polynomial",
    )

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: int = ORDER,
        share: float = 0.5,
        points: int = POINTS,
        sampling: str | Callable[..., Tensor] = "exponential",
        sampling_options: dict[str, float] | None = None,
        detach_every: int | None = None,
    ):
        order, raw = budget(order, share)
        super().__init__(
            ElasticMemory(
                geometry,
                order=order,
                points=points,
                sampling=sampling,
                sampling_options=sampling_options,
                detach_every=detach_every,
            ),
            raw,
        )
