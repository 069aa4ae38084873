"""Rotary positions inside blocks."""

import torch
from torch import nn

from elastic_memory.attention import rotate
from elastic_memory.memory.contract import Heads
from elastic_memory.shapes import Int, Tensor

PADDING = 32  # blocks with summary tokens may be padded to a multiple of so many tokens (fast/summary_tokens.py)


class Rope:
    """Rotary positions, which run 0, 1, ... inside each block, so that a layer is the same function in every block."""

    def __init__(self, rotary: nn.Module, like: Tensor, before: int = 0, size: int = 0):
        self.rotary, self.like, self.before = rotary, like, before
        # One table of cosines and sines for the whole blocks of all layers.
        self.table = self.at(torch.arange(-before, size, device=like.device)) if size else None

    def inside(self, x: Heads, front: int = 0) -> Heads:
        """Rotate `front` tokens before a block, then those of the block, which begins at position 0."""
        first, last = self.before - front, self.before - front + x.shape[2]
        if self.table is None or first < 0 or self.table[0].shape[1] < last:
            return self(x, torch.arange(-front, x.shape[2] - front, device=x.device))
        cos, sin = (part[:, first:last] for part in self.table)
        return rotate(x, cos, sin).to(x.dtype)

    def at(self, positions: Int[Tensor, "*rows token"]) -> tuple[Tensor, Tensor]:
        """Cosines and sines at some positions; tokens before the block have negative ones."""
        cos, sin = self.rotary(self.like, positions.reshape(-1, positions.shape[-1]))
        return cos, sin

    def __call__(self, x: Heads, positions: Int[Tensor, "*rows token"]) -> Heads:
        """Rotate `x` to some positions."""
        return rotate(x, *self.at(positions)).to(x.dtype)
