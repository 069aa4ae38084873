"""Compile models before they are timed, several at a time.

Layers that are alike share what is compiled for them, and torch keeps it on disk. So a process that runs two layers of
a model once, or as many as go together, leaves what the whole model needs (of those that go together, all but a join of
gradients): half a minute to a minute and a half each, where timing takes seconds.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from rich.progress import track

from elastic_memory.common.speedups import find
from elastic_memory.evaluation.throughput import evaluate_once, tensor_cores, train_once
from elastic_memory.memory import MEMORIES, ParallelMemory
from elastic_memory.model import MemoryLlamaConfig, MemoryLlamaForCausalLM


def compile_ahead(configs: Sequence[MemoryLlamaConfig], rows: int, length: int, processes: int = 4) -> None:
    """Training steps and evaluation of these models on `rows` samples; one that fails is compiled when it is timed."""
    with ThreadPoolExecutor(processes) as pool:
        results = pool.map(lambda config: _failure(config, rows, length), configs)
        reasons = list(track(results, description="compiling", total=len(configs)))
    failed = [config for config, reason in zip(configs, reasons, strict=True) if reason]
    # Together they may need more memory than there is.
    for config in track(failed, description="compiling again", disable=not failed):
        reason = _failure(config, rows, length)
        if reason:
            warnings.warn(f"a model was not compiled ahead: {reason}", stacklevel=2)


def _failure(config: MemoryLlamaConfig, rows: int, length: int) -> str | None:
    """Compile in a process of its own; why that failed."""
    task = json.dumps([config.to_dict(), rows, length])
    done = subprocess.run([sys.executable, "-m", __name__, task], capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1] if done.returncode else None


def _compile(values: dict, rows: int, length: int) -> None:
    # The order of a memory is among the values; its layers are the mechanism's own choice, with and without if it can.
    count, tokens = values["num_hidden_layers"], rows * values["block_size"]
    parallel = issubclass(MEMORIES[values["memory"]], ParallelMemory)
    together = 1 if parallel else find("wavefront").group_size(count, tokens)
    layers = min(count, max(2, together))
    config = MemoryLlamaConfig.from_dict(values | {"num_hidden_layers": layers, "memory_layers": None})
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = MemoryLlamaForCausalLM(config)
        # Whole samples, as the strides of their blocks tell how long they are.
        ids = torch.randint(config.vocab_size, (rows, length))
    model.compile_blocks()
    with tensor_cores():
        train_once(model, ids)
        evaluate_once(model, ids)


if __name__ == "__main__":
    _compile(*json.loads(sys.argv[1]))
