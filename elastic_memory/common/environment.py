"""Where something was measured: date, versions, commit, hardware; and which of several processes this is."""

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
    """Whether this is the main process (rank 0), the only one that writes files and messages."""
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
    """The git commit, ending in -dirty if files differ from it; ELASTIC_COMMIT overrides it, in copies without .git."""
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
    """Collect garbage, and return unused memory of the accelerator to it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_memory() -> int:
    """Peak memory of this process in bytes: on the accelerator if it was used, else in RAM."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
