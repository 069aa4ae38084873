"""`elastic doctor`: what this machine has, which fast paths it uses, and what makes it slow."""

import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

NEEDED = ("elastic-memory", "torch", "transformers", "accelerate", "numpy", "safetensors", "pyarrow")
OPTIONAL = {
    "triton": "kernels on a GPU",
    "flash-attn-4": "faster attention on Hopper and Blackwell GPUs (pip install 'elastic-memory[flash]')",
    "datasets": "corpora on the hub (pip install 'elastic-memory[data]')",
    "zstandard": "JSONL files in zst (pip install 'elastic-memory[data]')",
    "sentencepiece": "tokenizers of that kind (pip install 'elastic-memory[data]')",
    "gguf": "models in llama.cpp's format (pip install 'elastic-memory[gguf]')",
    "peft": "adapters",
}


def doctor() -> None:
    """Show versions, devices and fast paths of this machine, and what makes it slow.

    Send what it prints along with a report of a problem. `elastic selfcheck` compares the results of fast and plain
    computation; `elastic bench` measures speed.

        elastic doctor
    """
    import torch
    from rich.console import Console

    from elastic_memory.report.tables import Table

    console, device = Console(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with console.status("checking this machine"):
        tables = [
            Table("Versions", ["package", "version"], list(_versions())),
            Table("Machine", ["", ""], list(_machine(device))),
            Table("Fast paths", ["", "in use", "why not"], list(_paths(device))),
        ]
        slow = list(_slow(device))
    for table in tables:
        shown = table.rich()
        for column in shown.columns:
            column.justify = "left"
        console.print(shown)
    for line in slow or ["Nothing found that would make it slow."]:
        console.print(line, highlight=False, markup=False)


def _versions() -> Iterator[tuple[str, str]]:
    import torch

    from elastic_memory.common.environment import commit

    yield "commit", commit() or "not a checkout"
    yield "python", platform.python_version()
    for name in (*NEEDED, *OPTIONAL):
        try:
            found = version(name)
        except PackageNotFoundError:
            found = f"not installed: {OPTIONAL[name]}" if name in OPTIONAL else "not installed"
        yield name, found
    yield "CUDA of torch", torch.version.cuda or "none: this torch was built for CPUs only"


def _machine(device: Any) -> Iterator[tuple[str, str]]:
    import torch

    yield "platform", platform.platform()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "CPU", f"{cores} cores, torch uses {torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}"
    yield "load", ", ".join(f"{load:.1f}" for load in os.getloadavg())
    for index in range(torch.cuda.device_count()):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        yield f"GPU {index}", f"{name}, {capability[0]}.{capability[1]}, {free:.0f} of {total:.0f} GiB free"
    yield "models run on", str(device)


def _paths(device: Any) -> Iterator[tuple[str, str, str]]:
    """Each fast path: its name, whether it is used here, and if not, why."""
    import torch

    from elastic_memory.common.speedups import find

    if find("attention") is None:
        yield "all", "no", "the folder elastic_memory/fast was left out"
        return
    gpu = device.type == "cuda"
    why = "they need a GPU" if not gpu else "triton is not installed"
    yield "Triton kernels", *_taken(find("hippo").kernels_on(device) is not None, why)
    heads = torch.zeros(1, 8, 256, 96, device=device, dtype=torch.bfloat16)
    flash = find("attention").supports(heads, heads)
    why = "not installed, or not for this GPU: torch's attention is used" if gpu else "it needs a GPU"
    yield "FlashAttention-4", *_taken(flash, why)
    hidden = torch.zeros(2, 64, device=device, dtype=torch.bfloat16)
    why = "its kernel needs a GPU and triton" if not gpu else "its kernel does not work here"
    yield "loss without logits", *_taken(find("loss").supports(hidden, hidden), why)
    yield "captured decoding and training steps", *_taken(gpu, "CUDA graphs need a GPU")
    yield "compiled layers", *_taken(gpu, "no gain on a CPU")


def _taken(used: bool, why: str) -> tuple[str, str]:
    return ("yes", "") if used else ("no", why)


def _slow(device: Any) -> Iterator[str]:
    """A sentence for each thing that makes this machine slow, and what to do about it."""
    import torch

    from elastic_memory.common.threads import choose_threads

    if torch.version.cuda is None and Path("/dev/nvidia0").exists():
        yield "This machine has a GPU, but torch was installed for CPUs: see https://pytorch.org for one with CUDA."
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if load > cores:
        yield f"The machine is busy: {load:.1f} processes want to run on {cores} cores. Timings will vary."
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        if free < total / 2:
            yield "More than half of the GPU's memory is taken by other processes."
        return
    most = torch.get_num_threads()
    if choose_threads() < most:
        yield f"One thread is faster than {most} for small models here: set OMP_NUM_THREADS=1."
    torch.set_num_threads(most)
    yield f"Without a GPU: {_gflops():,.1f} GFLOP/s in float32. Use tiny models; the paper's need a GPU."


def _gflops() -> float:
    """GFLOP/s of a float32 matrix product, the best of five."""
    import torch

    left = torch.randn(512, 512)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        left @ left
        seconds.append(time.perf_counter() - begin)
    return 2 * 512**3 / min(seconds) / 1e9
