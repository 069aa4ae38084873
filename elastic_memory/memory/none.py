"""Transformer++: Llama 3 in blocks, without a memory."""

from collections.abc import Sequence

import torch

from elastic_memory.memory.contract import Block, Host, MemoryInfo, ParallelMemory, Reading, State
from elastic_memory.shapes import Tensor


class NoMemory(ParallelMemory):
    """No block sees another."""

    info = MemoryInfo(
        source="Llama 3 (arXiv 2407.21783)",
        phrase="Transformer++: no memory, the baseline and the layers in between",
        layers=lambda count: [],
        order_at=lambda multiple, geometry: None,
    )
    reach = 0
    no_join = None

    def start(self, batch: int, device: torch.device | str | None = None) -> State:
        """Nothing."""
        return ()

    def read(self, state: State, seen: int, host: Host) -> Reading:
        """Nothing."""
        return ()

    def write(self, state: State, block: Block, seen: int) -> State:
        """Nothing."""
        return ()

    def join(self, state: State, seen: int, other: State, other_seen: int) -> State:
        """Nothing."""
        return ()

    def read_all(self, key: Tensor, value: Tensor, host: Host) -> Sequence[Reading]:
        """Nothing, for any number of blocks."""
        return []
