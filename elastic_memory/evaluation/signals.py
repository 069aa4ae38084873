"""Synthetic signals, and how well a memory of some order reconstructs them."""

import argparse
import math
from pathlib import Path

import torch

from elastic_memory import hippo
from elastic_memory.shapes import Float, Tensor

LENGTH = 1024

# Time of the first token, and the points at which the reconstruction is compared with it. A token is a step of the
# history, so its value belongs to the middle of the step; the paper shifts by a step and compares from edge to edge.
CONVENTIONS = {
    "paper": (1, lambda length: torch.linspace(0, 1, length, dtype=torch.float64)),
    "ours": (0, lambda length: (torch.arange(length, dtype=torch.float64) + 0.5) / length),
}


def sines(count: int, length: int = LENGTH) -> Float[Tensor, " token"]:
    """The sum of `count` sine waves of frequencies 1, 2, ..., with amplitude 1 and phase 0."""
    time = torch.arange(length, dtype=torch.float64) / length
    return torch.stack([torch.sin(2 * math.pi * frequency * time) for frequency in range(1, count + 1)]).sum(0)


def noise(length: int = LENGTH, seed: int = 42) -> Float[Tensor, " token"]:
    """White noise; by default the paper's own sample."""
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).double()


def text(length: int, features: int, smooth: int = 1) -> Float[Tensor, "token feature"]:
    """Python source code with a random embedding for each byte, averaged over `smooth` bytes.

    Smoothing imitates depth: keys and values of deeper layers vary slowly from token to token.
    """
    letters = Path(argparse.__file__).read_bytes()
    letters = (letters * (length // len(letters) + 1))[:length]
    table = torch.randn(256, features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    signal = table[torch.frombuffer(bytearray(letters), dtype=torch.uint8).long()]
    total = torch.nn.functional.pad(signal.cumsum(0), (0, 0, smooth, 0))
    return (total[smooth:] - total[:-smooth]) / math.sqrt(smooth)


def error(signal: Float[Tensor, "token ..."], order: int, method: str = "zoh", convention: str = "ours") -> float:
    """Mean squared error between a signal and its reconstruction from `order` coefficients."""
    origin, points = CONVENTIONS[convention]
    state = hippo.compress(signal, order, method, origin)
    return (hippo.reconstruct(state, points(len(signal))) - signal).square().mean().item()
