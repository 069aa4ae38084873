"""Transformer++: Llama 3 in blocks, and nothing between them."""

from collections.abc import Sequence

import torch

from elastic_memory.memory.contract import Block, Geometry, Memory, Reading, Rope, State
from elastic_memory.shapes import Tensor


class NoMemory(Memory):
    """Every block starts anew."""

    source = "Llama 3 (arXiv 2407.21783)"
    phrase = "no memory: the baseline, and the layers in between"
    reach = "its own block"

    @classmethod
    def layers(cls, count: int) -> list[int]:
        """Nowhere."""
        return []

    @classmethod
    def order_at(cls, multiple: int, geometry: Geometry) -> int | None:
        """It has no size."""
        return None

    def start(self, batch: int, device: torch.device | str | None = None) -> State:
        """Nothing."""
        return ()

    def read(self, state: State, seen: int, rope: Rope) -> Reading:
        """Nothing."""
        return ()

    def write(self, state: State, block: Block, seen: int) -> State:
        """Nothing."""
        return ()

    def read_all(self, key: Tensor, value: Tensor, rope: Rope) -> Sequence[Reading]:
        """Nothing, for any number of blocks."""
        return []
