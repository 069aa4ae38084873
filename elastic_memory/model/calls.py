"""Calls of a model that change their cache entirely or not at all."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from elastic_memory.streaming.cache import MemoryCache


def whole_calls(forward: Callable) -> Callable:
    """A model's `forward` that changes its cache entirely or, if anything in it fails, not at all."""

    @wraps(forward)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values", args[3] if len(args) > 3 else None)
        if isinstance(cache, MemoryCache):
            return cache.whole_call(forward, model, *args, **kwargs)
        return forward(model, *args, **kwargs)

    return call
