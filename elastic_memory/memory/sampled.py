"""Raw tokens picked from the history where elastic memory would look: what does compression buy?"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from elastic_memory import sampling as samplings
from elastic_memory.memory.contract import Block, Floats, Geometry, Host, Memory, Reading, State, wide
from elastic_memory.shapes import Float, Int, Tensor


class Picked(NamedTuple):
    """Raw keys and values, newest last, zeros where nothing came yet; and when each was read, in tokens before now."""

    key: Float[Tensor, "batch kv_head order dim"]
    value: Float[Tensor, "batch kv_head order dim"]
    time: Float[Tensor, "batch order"]


class SampledMemory(Memory):
    """Elastic memory without its polynomial: `order` tokens as they were, in the block's softmax. No parameters.

    A stream cannot go back to a token that it let go. So after each block, of the tokens kept so far and the new ones,
    those stay that are nearest to the moments of the sampling; each moment takes one that no newer moment has taken. A
    cell stands for its middle. Until more than `order` tokens came, all of them stay.
    """

    source = "control: elastic memory's samplings on raw tokens"
    phrase = "raw tokens kept near the sampled moments"
    joins = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: int = 540,
        sampling: str | Callable[..., Tensor] = "exponential",
        sampling_options: dict[str, float] | None = None,
        detach_every: int | None = None,
    ):
        super().__init__(geometry, detach_every=detach_every)
        if order < 1:
            raise ValueError(f"{order} tokens: give an order (memory_order) from 1 on")
        samplings.resolve(sampling, dict(sampling_options or {}))
        self.order, self.sampling = order, sampling
        self.sampling_options = tuple(sorted((sampling_options or {}).items()))

    @property
    def floats(self) -> Floats:
        """Equal to elastic memory's, but for one number per token: its time."""
        key, value, time = (part.numel() for part in self.start(1, "meta"))
        return Floats(key + value + time, key + value)

    def start(self, batch: int, device: torch.device | str | None = None) -> Picked:
        """No tokens."""
        shape = (batch, self.geometry.kv_heads, self.order, self.geometry.head_dim)
        return Picked(*(torch.zeros(s, device=device) for s in (shape, shape, (batch, self.order))))

    def read(self, state: State, seen: int, host: Host) -> Reading:
        """The tokens, without positions."""
        return tuple(part[:, :, max(self.order - seen, 0) :] for part in state[:2])

    def write(self, state: State, block: Block, seen: int) -> Picked:
        """Of the tokens kept and the new ones, keep those nearest to the sampled moments."""
        empty, tokens = max(self.order - seen, 0), block.key.shape[2]
        new = torch.arange(0.5 - tokens, 0, device=block.key.device).expand(len(block.key), -1)
        time = torch.cat((state[2][:, empty:] - tokens, new), dim=1)
        key, value = (
            torch.cat((part[:, :, empty:], wide(signal)), dim=2)
            for part, signal in zip(state, (block.key, block.value), strict=False)
        )
        if time.shape[1] <= self.order:
            missing = self.order - time.shape[1]
            key, value = (F.pad(part, (0, 0, missing, 0)) for part in (key, value))
            return Picked(key, value, F.pad(time, (missing, 0)))
        moments = _moments(self.sampling, self.sampling_options, self.order, seen + tokens)
        chosen = nearest(time, moments.to(time))
        index = chosen[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3])
        return Picked(key.gather(2, index), value.gather(2, index), time.gather(1, chosen))


def nearest(time: Float[Tensor, "batch candidate"], moments: Float[Tensor, " order"]) -> Int[Tensor, "batch order"]:
    """Indices of candidates close to the moments, all different: newer moments choose first. Both ascend."""
    order = moments.shape[0]
    after = torch.searchsorted(time, moments.expand(len(time), -1).contiguous()).clamp(1, time.shape[1] - 1)
    closer = moments - time.gather(1, after - 1) <= time.gather(1, after) - moments
    # Different and ascending: index minus rank may not fall. From the newest on, whatever is taken already pushes older
    # moments further back, but not so far that nothing is left for those before them.
    rank = torch.arange(order, device=time.device)
    slack = (after - closer.long() - rank).flip(1).cummin(1).values.flip(1)
    return slack.clamp(min=0) + rank


# A constant of the compiled graph: samplings are functions of numbers, not of tensors.
@torch.compiler.assume_constant_result
def _moments(sampling: str | Callable[..., Tensor], options: tuple, order: int, seen: int) -> Float[Tensor, " order"]:
    """Where the sampling looks in a history of `seen` tokens, in tokens before now, oldest first."""
    moments = samplings.moments(sampling, order, seen, **dict(options))
    if moments.ndim == 2:
        moments = moments.mean(1)
    return ((moments - 1) * seen).sort().values
