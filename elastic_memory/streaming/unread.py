"""The cache of a call that was given none: it reads the call's tokens when it is first used.

So the usual loop, which passes on whatever cache a call returns, works, and calls whose cache nobody uses cost nothing.
"""

from typing import Any, NamedTuple

import torch

from elastic_memory.shapes import Tensor
from elastic_memory.streaming.cache import MemoryCache
from elastic_memory.streaming.packing import from_positions


class Call(NamedTuple):
    """What a model was given."""

    ids: Tensor | None
    embeds: Tensor | None
    mask: Tensor | None
    positions: Tensor | None


class UnreadCache(MemoryCache):
    """Becomes a plain `MemoryCache` as soon as anybody looks at it."""

    def __init__(self, model: Any, call: Call):
        # Copies: callers may use their buffers again.
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
    """The same object, as the cache it stands for."""
    model, (ids, embeds, mask, positions) = unread._unread
    source: Any = ids if ids is not None else embeds
    if positions is not None and positions.shape == source.shape[:2] and from_positions(positions, mask) is not None:
        raise ValueError(
            "position_ids packed several documents into a row, and a cache goes on with one: "
            "read the one to go on with by itself"
        )
    cache = MemoryCache(model)
    cache.feed(model.base_model, ids, embeds, mask, keep=1)
    unread.__dict__.clear()
    unread.__dict__.update(cache.__dict__)
    object.__setattr__(unread, "__class__", MemoryCache)
    return unread


def unasked(model: Any, use_cache: bool | None, call: Call) -> UnreadCache | None:
    """What a call without a cache returns as one: by default what the configuration says, and none in training.

    Exported programs return tensors only.
    """
    wanted = model.config.use_cache if use_cache is None and not model.training else False
    return UnreadCache(model, call) if wanted and not torch.compiler.is_exporting() else None
