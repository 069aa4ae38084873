"""The one lookup for `fast/`, the folder of faster implementations; without it everything runs on plain PyTorch."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@cache
def find(name: str) -> Any:
    """The module of `fast/` with this name, or None if the folder was left out.

    Files that torch.compile traces call this at module level, so that the compiler sees a plain module.
    """
    if find_spec("elastic_memory.fast") is None:
        return None
    return import_module(f"elastic_memory.fast.{name}")
