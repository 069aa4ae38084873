"""A hybrid: part of the budget for the newest raw tokens, the rest for elastic memory of the whole history."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_memory.common.defaults import ORDER, POINTS
from elastic_memory.memory.contract import Block, Geometry, Host, KeyValues, MemoryInfo, ParallelMemory, Reading, State
from elastic_memory.memory.elastic import beside, with_raw_tokens
from elastic_memory.memory.memorizing import MemorizingMemory
from elastic_memory.shapes import Tensor


class RecentMemory(ParallelMemory):
    """`share` of `order` is a queue at its true positions, the rest a polynomial; both join the block's softmax.

    Under sliding attention the queue is a window wider by as many tokens.
    """

    info = MemoryInfo(
        source="control: elastic memory beside a queue, at equal floats",
        phrase="the newest tokens raw, the whole history as a polynomial",
    )
    shares_softmax = True

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
        super().__init__(geometry, detach_every=detach_every)
        options = {"points": points, "sampling": sampling, "sampling_options": sampling_options}
        self.elastic, raw = with_raw_tokens(geometry, order, share, **options, detach_every=detach_every)
        self.queue = MemorizingMemory(geometry, order=raw, combine="joint", positions="full", detach_every=detach_every)
        self.widens, self.no_sliding, self.no_join = self.queue.widens, self.queue.no_sliding, self.queue.no_join
        self.retrieval = self.elastic.retrieval

    def start(self, batch: int, device: torch.device | str | None = None) -> State:
        """Coefficients, then the queue."""
        return (*self.elastic.start(batch, device), *self.queue.start(batch, device))

    def read(self, state: State, seen: int, host: Host) -> Reading:
        """The polynomial's points, then the queue's tokens."""
        return beside(self.elastic.read(state[:2], seen, host), self.queue.read(state[2:], seen, host))

    def write(self, state: State, block: Block, seen: int) -> State:
        """Both parts, independently."""
        return (*self.elastic.write(state[:2], block, seen), *self.queue.write(state[2:], block, seen))

    def join(self, state: State, seen: int, other: State, other_seen: int) -> State:
        """Both parts, independently."""
        coefficients = self.elastic.join(state[:2], seen, other[:2], other_seen)
        return (*coefficients, *self.queue.join(state[2:], seen, other[2:], other_seen))

    def read_all(self, key: KeyValues, value: KeyValues, host: Host) -> Sequence[Reading]:
        """The readings of both, side by side."""
        readings, queues = (memory.read_all(key, value, host) for memory in (self.elastic, self.queue))
        return [beside(*pair) for pair in zip(readings, queues, strict=True)] if queues else readings

    def set_retrieval(self, **changes: Any) -> None:
        """Change how the polynomial is read; the queue stays as it is."""
        self.elastic.set_retrieval(**changes)
        self.retrieval = self.elastic.retrieval

    def adapt(self, state: State) -> tuple[State, str | None]:
        """Fit the polynomial to another order."""
        coefficients, said = self.elastic.adapt(state[:2])
        return (*coefficients, *state[2:]), said
