"""Memorizing Transformer, dense: a queue of the newest raw tokens, which the block attends to."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from elastic_memory.attention import masked
from elastic_memory.common.defaults import ORDER
from elastic_memory.memory.contract import (
    Block,
    Geometry,
    Heads,
    Host,
    KeyValues,
    MemoryInfo,
    ParallelMemory,
    Reading,
    State,
)
from elastic_memory.memory.tools import gated, one_of, wide
from elastic_memory.shapes import Bool, Float, Tensor


class Queue(NamedTuple):
    """Raw keys and values, newest last; zeros while there are fewer."""

    key: Float[Tensor, "batch kv_head order dim"]
    value: Float[Tensor, "batch kv_head order dim"]


class MemorizingMemory(ParallelMemory):
    """A second softmax, over the queue, and a gate per head between it and the block's own; gradients reach the queue.

    `order`: tokens in the queue. `combine`: gate, or joint for one softmax over queue and block, without gates; under
    sliding attention that is a window wider by `order` tokens. `positions`: none, raw queries meet raw keys; query,
    rotated queries meet raw keys; full, both are rotated, keys to their true distance. `detach_memory`: no gradient
    into the queue, as in the original.
    """

    info = MemoryInfo(
        source="Memorizing Transformers (arXiv 2203.08913), without its kNN search",
        phrase="a queue of the newest tokens, attended in full",
    )
    no_join: str | None = None

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: int = ORDER,
        combine: str = "gate",
        positions: str = "none",
        detach_memory: bool = False,
        detach_every: int | None = None,
    ):
        super().__init__(geometry, detach_every=detach_every)
        if order < 1:
            raise ValueError(f"a queue of {order} tokens: give an order (memory_order) from 1 on")
        self.shares_softmax = one_of("combine", combine, ("gate", "joint")) == "joint"
        self.positions = one_of("positions", positions, ("none", "query", "full"))
        if self.shares_softmax and positions == "none":
            raise ValueError("combine='joint' needs positions: its softmax has rotated queries; give 'query' or 'full'")
        self.order = self.reach = order
        self.detach_memory = detach_memory
        if self.shares_softmax:
            if geometry.sliding:
                self.widens, self.reach = order, 0
                self.no_join = "its tokens are in the window, which no other part sees"
            if positions != "full":
                self.no_sliding = "tokens that leave the window would lose their positions; positions='full' keeps them"
            elif detach_memory or detach_every:
                self.no_sliding = (
                    "it is a wider window there, whose gradients detach_memory and detach_every cannot cut"
                )
        else:
            self.gate = nn.Parameter(torch.empty(geometry.heads))
        self.reset()

    def reset(self) -> None:
        """Gates half open."""
        if not self.shares_softmax:
            nn.init.zeros_(self.gate)

    def start(self, batch: int, device: torch.device | str | None = None) -> State:
        """An empty queue; nothing, if the layer's window holds its tokens."""
        if self.widens:
            return ()
        shape = (batch, self.geometry.kv_heads, self.order, self.geometry.head_dim)
        return Queue(torch.zeros(shape, device=device), torch.zeros(shape, device=device))

    def read(self, state: State, seen: int, host: Host) -> Reading:
        """The tokens in the queue."""
        if self.widens:
            return ()
        key, value = (part[:, :, max(self.order - seen, 0) :] for part in state)
        return self._columns(key, value, host)

    def write(self, state: State, block: Block, seen: int) -> State:
        """Append the new tokens and drop as many of the oldest."""
        if self.widens:
            return ()
        key, value = (
            torch.cat((part[:, :, signal.shape[2] :], wide(self._stored(signal[:, :, -self.order :]))), dim=2)
            for part, signal in zip(state, (block.key, block.value), strict=True)
        )
        return Queue(key, value)

    def join(self, state: State, seen: int, other: State, other_seen: int) -> Queue:
        """The newest tokens of the two histories in sequence."""
        new = min(other_seen, self.order)
        key, value = (
            torch.cat((before[:, :, new:], after[:, :, self.order - new :]), dim=2)
            for before, after in zip(state, other, strict=True)
        )
        return Queue(key, value)

    def read_all(self, key: KeyValues, value: KeyValues, host: Host) -> Sequence[Reading]:
        """The queue of each block is a slice of the sample: the tokens before it."""
        if self.widens:
            return []
        readings: list[Reading] = []
        for block in range(1, -(-key.shape[2] // self.geometry.block_size)):
            keys, values = (self._stored(self.history(x, block)[:, :, -self.order :]) for x in (key, value))
            readings.append(self._columns(keys, values, host))
        return readings

    def mix(
        self, local: Heads, query: Heads, rotated: Heads, reading: Reading, visible: Bool[Tensor, "batch column"] | None
    ) -> Heads:
        """y = g softmax(q K^T / sqrt(d)) V + (1 - g) local."""
        looking = query if self.positions == "none" else rotated
        key, value = (part.to(looking.dtype) for part in reading)
        mask = None
        if visible is not None:
            # A row without any column keeps `local`; its attention here must only not be NaN.
            mask = (visible | ~visible.any(1, keepdim=True))[:, None, None]
        return gated(self.gate, masked(looking, key, value, mask, self.geometry.scale), local, visible)

    def _columns(self, key: Tensor, value: Tensor, host: Host) -> Reading:
        if self.positions == "full":
            key = host.rope(key, torch.arange(-key.shape[2], 0, device=key.device))
        return key, value

    def _stored(self, signal: Tensor) -> Tensor:
        return signal.detach() if self.detach_memory else signal
