"""Elastic Memory: a fixed-size memory for Llama, with its mathematics, baselines, training and evaluation."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_memory import attention, data, evaluation, hippo, memory, operators, report, sampling, training
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
    "operators", "report", "sampling", "training",
]  # fmt: skip

_MODULES = {
    "attention", "data", "evaluation", "hippo", "memory", "model", "operators", "report", "sampling", "training",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Imported when first used: some need more packages, all take seconds, and `elastic --help` needs none of them.
    if name in _MODULES:
        return importlib.import_module(f"elastic_memory.{name}")
    if name in __all__:
        return getattr(importlib.import_module("elastic_memory.model"), name)
    raise AttributeError(f"module 'elastic_memory' has no attribute {name!r}")


if sys.argv[:1] == ["-m"] and "elastic_memory.cli" in sys.orig_argv:
    # python -m elastic_memory.cli: let Ctrl-C end it while torch is imported
    importlib.import_module("elastic_command").begin()
if "elastic_command" not in sys.modules:
    importlib.import_module("elastic_memory.model")  # registers our models with the Auto classes of transformers
