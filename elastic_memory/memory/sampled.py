"""Raw tokens picked from the history where elastic memory would look: what does compression buy?"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from elastic_memory import sampling as samplings
from elastic_memory.memory.contract import Block, Floats, Geometry, Host, Memory, Reading, State, constant, wide
from elastic_memory.shapes import Float, Int, Tensor


class Picked(NamedTuple):
    """Raw keys and values, newest last, zeros where nothing came yet; and when each was read, in tokens before now."""

    key: Float[Tensor, "batch kv_head order dim"]
    value: Float[Tensor, "batch kv_head order dim"]
    time: Float[Tensor, "batch order"]


class Rule(NamedTuple):
    """Which tokens stay."""

    order: int
    sampling: str | Callable[..., Tensor]
    options: tuple[tuple[str, object], ...]

    def choose(self, time: Float[Tensor, "batch candidate"], seen: int) -> Int[Tensor, "batch order"]:
        """Indices of those candidates, of all that a history of `seen` tokens left, that stay."""
        moments = samplings.moments(self.sampling, self.order, seen, **dict(self.options))
        if moments.ndim == 2:
            moments = moments.mean(1)
        return nearest(time, ((moments - 1) * seen).sort().values.to(time))


class SampledMemory(Memory):
    """Elastic memory without its polynomial: `order` tokens as they were, in the block's softmax. No parameters.

    A stream cannot go back to a token that it let go. So after each block, of the tokens kept so far and the new ones,
    those stay that are nearest to the moments of the sampling; moments that want the same token give way to both sides.
    A cell stands for its middle. Until more than `order` tokens came, all of them stay.
    """

    source = "control: elastic memory's samplings on raw tokens"
    phrase = "raw tokens kept near the sampled moments"
    shares_softmax = True
    no_join = "which tokens are still there depends on where earlier blocks ended"

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
        options: dict[str, object] = dict(sampling_options or {})
        samplings.resolve(sampling, options)
        self.rule = Rule(order, sampling, tuple(sorted(options.items())))

    @property
    def floats(self) -> Floats:
        """Equal to elastic memory's, but for one number per token: its time."""
        key, value, time = (part.numel() for part in self.start(1, "meta"))
        return Floats(key + value + time, key + value)

    def start(self, batch: int, device: torch.device | str | None = None) -> Picked:
        """No tokens."""
        shape = (batch, self.geometry.kv_heads, self.rule.order, self.geometry.head_dim)
        key, value = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        return Picked(key, value, torch.zeros(batch, self.rule.order, device=device))

    def read(self, state: State, seen: int, host: Host) -> Reading:
        """The tokens, without positions."""
        return tuple(part[:, :, max(self.rule.order - seen, 0) :] for part in state[:2])

    def write(self, state: State, block: Block, seen: int) -> Picked:
        """Of the tokens kept and the new ones, keep those nearest to the sampled moments."""
        empty, tokens = max(self.rule.order - seen, 0), block.key.shape[2]
        new = torch.arange(0.5 - tokens, 0, device=block.key.device).expand(len(block.key), -1)
        time = torch.cat((state[2][:, empty:] - tokens, new), dim=1)
        key = torch.cat((state[0][:, :, empty:], wide(block.key)), dim=2)
        value = torch.cat((state[1][:, :, empty:], wide(block.value)), dim=2)
        missing = self.rule.order - time.shape[1]
        if missing >= 0:
            key, value = (F.pad(part, (0, 0, missing, 0)) for part in (key, value))
            return Picked(key, value, F.pad(time, (missing, 0)))
        chosen = self.rule.choose(time, seen + tokens)
        index = chosen[:, None, :, None].expand(-1, key.shape[1], -1, key.shape[3])
        return Picked(key.gather(2, index), value.gather(2, index), time.gather(1, chosen))

    def read_all(
        self, key: Float[Tensor, "batch kv_head token dim"], value: Float[Tensor, "batch kv_head token dim"], host: Host
    ) -> Sequence[Reading]:
        """The tokens that a stream would still have, straight from the sample."""
        size = constant(self.geometry.block_size)
        left = _survivors(self.rule, size, constant(-(-key.shape[2] // size)), str(key.device))
        return [
            tuple(self.history(signal, block)[:, :, kept] for signal in (key, value))
            for block, kept in enumerate(left, 1)
        ]


def nearest(time: Float[Tensor, "batch candidate"], moments: Float[Tensor, " order"]) -> Int[Tensor, "batch order"]:
    """Indices of candidates close to the moments, all different; both ascend."""
    after = torch.searchsorted(time, moments.expand(len(time), -1).contiguous()).clamp(1, time.shape[1] - 1)
    closer = moments - time.gather(1, after - 1) <= time.gather(1, after) - moments
    # Different and ascending means that index minus rank may not fall. Where it does, older moments could be pushed
    # back or newer ones on; half of both keeps a stream from drifting either way over many blocks.
    rank = torch.arange(len(moments), device=time.device)
    slack = after - closer.long() - rank
    pushed_back, pushed_on = slack.flip(1).cummin(1).values.flip(1), slack.cummax(1).values
    return ((pushed_back + pushed_on) // 2).clamp(0, time.shape[1] - len(moments)) + rank


# A constant of the compiled graph: it depends on numbers, not on tensors.
@torch.compiler.assume_constant_result
def _survivors(rule: Rule, size: int, blocks: int, device: str) -> tuple[Int[Tensor, " kept"], ...]:
    return survivors(rule, size, blocks, device)


@lru_cache(maxsize=4)
def survivors(rule: Rule, size: int, blocks: int, device: str = "cpu") -> tuple[Int[Tensor, " kept"], ...]:
    """For blocks 1, 2, ...: the tokens of the history that a stream has kept."""
    kept, result = torch.arange(0), []
    for seen in range(size, blocks * size, size):
        kept = torch.cat((kept, torch.arange(seen - size, seen)))
        if len(kept) > rule.order:
            kept = kept[rule.choose((kept - seen + 0.5)[None], seen)[0]]
        result.append(kept.to(device))
    return tuple(result)
