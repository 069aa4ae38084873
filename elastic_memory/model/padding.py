"""Heads padded with zeros to a multiple of 8: the same function, on the fastest attention kernels.

Rotary positions pair feature i of a head's first half with feature i of its second, so both halves are padded alike.
Zero weights get zero gradients (queries and keys meet only each other's zeros, values only the output projection's),
so they stay zero through training.
"""

import torch
from torch import nn

from elastic_memory.memory.tools import real_features
from elastic_memory.shapes import Int, Tensor


class PaddedRotary(nn.Module):
    """Rotary positions of `rotary`, for heads stored with `stored` features."""

    def __init__(self, rotary: nn.Module, stored: int):
        super().__init__()
        self.rotary, self.stored = rotary, stored

    def forward(self, x: Tensor, position_ids: Int[Tensor, "row token"]) -> tuple[Tensor, Tensor]:
        """Cosines and sines; padding is not rotated."""
        cos, sin = self.rotary(x, position_ids)
        missing = (0, self.stored // 2 - cos.shape[-1] // 2)
        return tuple(  # type: ignore[return-value]
            torch.cat([nn.functional.pad(half, missing, value=value) for half in table.chunk(2, dim=-1)], dim=-1)
            for table, value in ((cos, 1.0), (sin, 0.0))
        )


@torch.no_grad()
def pad_heads(attention: nn.Module, dim: int) -> None:
    """Zero the weights of padded features: `attention` then computes with heads of `dim` features."""
    stored = attention.head_dim
    attention.scaling = dim**-0.5
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = getattr(attention, name).weight
        real = real_features(dim, stored, weight.device).repeat(max(weight.shape) // stored)
        if name == "o_proj":
            weight.mul_(real[: weight.shape[1]])
        else:
            weight.mul_(real[: weight.shape[0], None])
