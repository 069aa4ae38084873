"""Elastic Memory: a fixed-size memory for Llama, its mathematics, its baselines, and what it takes to judge it."""

import importlib
from typing import Any

from elastic_memory import attention, hippo, memory, operators, sampling
from elastic_memory.model import (
    MemoryCache,
    MemoryLlamaConfig,
    MemoryLlamaForCausalLM,
    MemoryLlamaForSequenceClassification,
    MemoryLlamaModel,
    attach_memory,
    detach_memory,
)

__version__ = "0.1.0"
__all__ = [
    "MemoryCache", "MemoryLlamaConfig", "MemoryLlamaForCausalLM", "MemoryLlamaForSequenceClassification",
    "MemoryLlamaModel", "attach_memory", "attention", "data", "detach_memory", "evaluation", "hippo", "memory",
    "operators", "sampling", "training",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # These need more than torch, transformers, numpy and safetensors, so they are imported when first used.
    if name in ("data", "evaluation", "report", "training"):
        return importlib.import_module(f"elastic_memory.{name}")
    raise AttributeError(f"module 'elastic_memory' has no attribute {name!r}")
