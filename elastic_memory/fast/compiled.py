"""torch.compile without an error at its limit of recompilations."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

GRAPHS = 64  # of one function in a process; torch itself stops at 8, with an error


def compiled(function: Callable, **options: Any) -> Callable:
    """`function`, compiled for each new shape, up to GRAPHS of them; beyond that it runs eagerly."""
    fast = torch.compile(function, **options)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return fast(*args, **kwargs)
        except FailOnRecompileLimitHit:  # before anything was computed
            pass
        try:
            with torch._dynamo.config.patch(recompile_limit=GRAPHS):
                return fast(*args, **kwargs)
        except FailOnRecompileLimitHit:
            warnings.warn(
                f"{function.__name__} was compiled for {GRAPHS} input shapes and runs uncompiled on further ones: "
                "use fewer different batch sizes and lengths",
                stacklevel=2,
            )
            return function(*args, **kwargs)

    return run
