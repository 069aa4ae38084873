"""Compile models before they are timed, several at a time.

Identical layers share compiled code, and torch caches it on disk. So a process that runs two layers of a model once (or
as many as run as one wavefront) compiles nearly everything that the whole model needs. That takes 30 to 90 seconds per
model, timing only seconds.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from elastic_memory.common.progress import Bars
from elastic_memory.common.speedups import find
from elastic_memory.evaluation.throughput import evaluate_once, tensor_cores, train_once
from elastic_memory.memory import MEMORIES, ParallelMemory
from elastic_memory.model import MemoryLlamaConfig, MemoryLlamaForCausalLM


def compile_ahead(configs: Sequence[MemoryLlamaConfig], rows: int, length: int, processes: int = 4) -> None:
    """Compile training steps and evaluation on `rows` samples; a model that fails here is compiled when it is timed."""
    with ThreadPoolExecutor(processes) as pool, Bars(transient=True) as progress:
        results = pool.map(lambda config: _failure(config, rows, length), configs)
        reasons = list(progress.track(results, len(configs), description="compiling"))
        failed = [config for config, reason in zip(configs, reasons, strict=True) if reason]
        # One at a time: several may have needed too much memory.
        for config in progress.track(failed, description="compiling again") if failed else ():
            reason = _failure(config, rows, length)
            if reason:
                warnings.warn(f"a model was not compiled ahead: {reason}", stacklevel=2)


def _failure(config: MemoryLlamaConfig, rows: int, length: int) -> str | None:
    """Compile in a separate process, and return the reason if it failed, else None."""
    task = json.dumps([config.to_dict(), rows, length])
    done = subprocess.run([sys.executable, "-m", __name__, task], capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1] if done.returncode else None


def _compile(values: dict, rows: int, length: int) -> None:
    # `memory_layers=None` lets the memory choose its layers: some with memory and, if possible, some without.
    count, tokens = values["num_hidden_layers"], rows * values["block_size"]
    parallel = issubclass(MEMORIES[values["memory"]], ParallelMemory)
    group = 1 if parallel else find("wavefront").group_size(count, tokens)
    layers = min(count, max(2, group))
    config = MemoryLlamaConfig.from_dict(values | {"num_hidden_layers": layers, "memory_layers": None})
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = MemoryLlamaForCausalLM(config)
        # Full-length samples: the strides of their blocks depend on the length.
        ids = torch.randint(config.vocab_size, (rows, length))
    model.compile_blocks()
    with tensor_cores():
        train_once(model, ids)
        evaluate_once(model, ids)


if __name__ == "__main__":
    _compile(*json.loads(sys.argv[1]))
