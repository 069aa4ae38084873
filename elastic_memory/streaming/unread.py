"""The cache of a call that was given none. It reads the call's tokens when it is first used.

So a loop that passes on the cache that each call returns works as with any model of transformers, and calls whose cache
nobody uses cost no second pass.

The object changes its class once it is read. A flag would have to be checked by every method and field of
`MemoryCache`, on every token; this way a cache that is read is a plain one.
"""

from typing import Any, NamedTuple

import torch

from elastic_memory.shapes import Tensor
from elastic_memory.streaming.cache import MemoryCache
from elastic_memory.streaming.packing import from_positions


class Call(NamedTuple):
    """The inputs of a model's call."""

    ids: Tensor | None
    embeds: Tensor | None
    mask: Tensor | None
    positions: Tensor | None


class UnreadCache(MemoryCache):
    """Becomes a plain `MemoryCache` when one of its fields is read or set."""

    def __init__(self, model: Any, call: Call):
        # Copies: callers may reuse their buffers.
        own = Call(*(None if part is None else part.detach().clone() for part in call))
        object.__setattr__(self, "_unread", (model, own))

    def __getattr__(self, name: str) -> Any:
        if name == "_unread" or not hasattr(MemoryCache(self._unread[0]), name):
            raise AttributeError(f"MemoryCache has no attribute {name!r}")
        return getattr(_read(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_read(self), name, value)

    def fork(self) -> MemoryCache:  # type: ignore[override]
        """An independent copy."""
        return _read(self).fork()


def _read(unread: UnreadCache) -> MemoryCache:
    """Read the call and turn `unread` itself into the resulting cache."""
    model, (ids, embeds, mask, positions) = unread._unread
    source: Any = ids if ids is not None else embeds
    if positions is not None and positions.shape == source.shape[:2] and from_positions(positions, mask) is not None:
        raise ValueError(
            "position_ids packed several documents into a row, and a cache continues only one: "
            "call the model with the document to continue alone"
        )
    cache = MemoryCache(model)
    cache.feed(model.base_model, ids, embeds, mask, keep=1)
    unread.__dict__.clear()
    unread.__dict__.update(cache.__dict__)
    object.__setattr__(unread, "__class__", MemoryCache)
    return unread


def unread_cache(model: Any, use_cache: bool | None, call: Call) -> UnreadCache | None:
    """The `past_key_values` that a call without a cache returns: if the configuration says so, and none in training.

    Exported programs return tensors only.
    """
    wanted = model.config.use_cache if use_cache is None and not model.training else False
    return UnreadCache(model, call) if wanted and not torch.compiler.is_exporting() else None
