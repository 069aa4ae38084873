"""Where something was measured: date, versions, commit; and which process of several this is."""

import gc
import os
import platform
import resource
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import accelerate
import torch


def is_main() -> bool:
    """Whether this is the process that writes."""
    return int(os.environ.get("RANK", "0")) == 0


def environment() -> dict[str, Any]:
    """Date, versions and commit."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(),
    }


def commit() -> str | None:
    """What ELASTIC_COMMIT says, for copies without this history; else the commit, marked if files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    if given := os.environ.get("ELASTIC_COMMIT"):
        return given
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> str:
    """The GPU, or the number of CPU threads."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"


def free_memory() -> None:
    """Return what nobody refers to any more, on the accelerator too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_memory() -> int:
    """Most bytes ever in use: on the accelerator if there is one, else by this process."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
