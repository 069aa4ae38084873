"""Speed of one configuration as it would be trained: samples/s of whole training steps and of evaluation.

A step is forward, backward, clipping and fused AdamW on rows of one length; on a GPU in bfloat16, layers compiled,
heads padded to a multiple of 8 where the mechanism allows it.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic_memory.memory import MEMORIES
from elastic_memory.model import MemoryLlamaConfig, MemoryLlamaForCausalLM


@dataclass(frozen=True)
class Speed:
    """Medians, and what a training step needed."""

    training: float
    inference: float
    tokens_per_second: float
    peak_bytes: int | None
    first_seconds: float  # until the second step was done: construction and compilation


def speed(settings: dict[str, Any], length: int, rows: int, repeats: int = 7) -> Speed:
    """Time the model of `MemoryLlamaConfig.preset(**settings)`."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    began = time.perf_counter()
    torch.manual_seed(0)
    padded = cuda and not MEMORIES[settings["memory"]].no_padding
    model = MemoryLlamaForCausalLM(MemoryLlamaConfig.preset(**settings, pad_heads=padded)).to(device).train()
    if cuda:
        torch._dynamo.reset()  # graphs of earlier models would count against the limit on recompilation
        torch.cuda.empty_cache()
        model.compile_blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda)
    ids = torch.randint(model.config.vocab_size, (rows, length), device=device)

    def train() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            model(ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def evaluate() -> None:
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=cuda):
            model(ids, labels=ids)

    for _ in range(2):
        _timed(train, cuda)
    first = time.perf_counter() - began
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    training = statistics.median(_timed(train, cuda) for _ in range(repeats))
    peak = torch.cuda.max_memory_allocated() if cuda else None
    model.eval()
    for _ in range(2):
        _timed(evaluate, cuda)
    inference = statistics.median(_timed(evaluate, cuda) for _ in range(repeats))
    return Speed(rows / training, rows / inference, rows * length / training, peak, first)


def _timed(run: Callable[[], None], cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
