"""Signals whose truth is known: how much of them a memory of some order gives back."""

import argparse
import math
from pathlib import Path

import torch

from elastic_memory import hippo
from elastic_memory.shapes import Float, Tensor

LENGTH = 1024

# Time of the first token, and the moments at which the reconstruction is compared with it. A token is a step of the
# history, so its value belongs to the middle of the step; the paper shifts by a step and compares from edge to edge.
CONVENTIONS = {
    "paper": (1, lambda length: torch.linspace(0, 1, length, dtype=torch.float64)),
    "ours": (0, lambda length: (torch.arange(length, dtype=torch.float64) + 0.5) / length),
}


def sines(count: int, length: int = LENGTH) -> Float[Tensor, " token"]:
    """`count` sine waves of frequencies 1, 2, ..., all of amplitude one and phase zero."""
    time = torch.arange(length, dtype=torch.float64) / length
    return torch.stack([torch.sin(2 * math.pi * frequency * time) for frequency in range(1, count + 1)]).sum(0)


def noise(length: int = LENGTH, seed: int = 42) -> Float[Tensor, " token"]:
    """White noise, the paper's own draw by default."""
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).double()


def text(length: int, features: int, smooth: int = 1) -> Float[Tensor, "token feature"]:
    """Python's own sources, each byte a random vector as an embedding would give it, averaged over `smooth` bytes.

    Smoothing stands for depth: keys and values of deeper layers vary slowly from token to token.
    """
    letters = Path(argparse.__file__).read_bytes()
    letters = (letters * (length // len(letters) + 1))[:length]
    table = torch.randn(256, features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    signal = table[torch.frombuffer(bytearray(letters), dtype=torch.uint8).long()]
    total = torch.nn.functional.pad(signal.cumsum(0), (0, 0, smooth, 0))
    return (total[smooth:] - total[:-smooth]) / math.sqrt(smooth)


def error(signal: Float[Tensor, "token ..."], order: int, method: str = "zoh", convention: str = "ours") -> float:
    """Mean squared difference between a signal and what a memory of `order` coefficients gives back."""
    origin, moments = CONVENTIONS[convention]
    state = hippo.compress(signal, order, method, origin)
    return (hippo.reconstruct(state, moments(len(signal))) - signal).square().mean().item()
