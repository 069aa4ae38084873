"""Raw tokens at elastic memory's sample points: a control for what compression gains."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from elastic_memory import sampling as samplings
from elastic_memory.common.defaults import ORDER
from elastic_memory.memory.contract import Block, Geometry, Host, KeyValues, MemoryInfo, ParallelMemory, Reading, State
from elastic_memory.memory.tools import one_of, static, wide
from elastic_memory.shapes import Float, Int, Tensor


class Picked(NamedTuple):
    """Raw keys and values, newest last, zeros while there are fewer; and the age of each in tokens, negative."""

    key: Float[Tensor, "batch kv_head order dim"]
    value: Float[Tensor, "batch kv_head order dim"]
    time: Float[Tensor, "batch order"]


class Choice(NamedTuple):
    """Which tokens are kept."""

    order: int
    sampling: str | Callable[..., Tensor]
    options: tuple[tuple[str, object], ...]

    def choose(self, time: Float[Tensor, "batch candidate"], seen: int) -> Int[Tensor, "batch order"]:
        """Indices of the candidates to keep after `seen` tokens."""
        points = samplings.sample_points(self.sampling, self.order, seen, **dict(self.options))
        if points.ndim == 2:
            points = points.mean(1)
        return nearest(time, ((points - 1) * seen).sort().values.to(time))


class SampledMemory(ParallelMemory):
    """Elastic memory without its polynomial: `order` tokens as they were, in the block's softmax. No parameters.

    A stream cannot recover a token that it dropped. So after each block it keeps, of the tokens kept so far and the new
    ones, those nearest to the sample points; collisions move outward to the nearest free token. A cell stands for its
    middle. Until more than `order` tokens came, all of them are kept.

    `mass`: add to a token's scores the logarithm of the number of tokens that are nearer to it than to any other kept
    one. `query`: rotated or raw, as for elastic memory.
    """

    info = MemoryInfo(
        source="control: elastic memory's samplings on raw tokens",
        phrase="raw tokens kept near the sample points",
        paper_floats=lambda key, value, time: key + value,  # equal to elastic memory's; it keeps a time per token, too
    )
    shares_softmax = True
    no_join = "which tokens are still there depends on where earlier blocks ended"

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: int = ORDER,
        sampling: str | Callable[..., Tensor] = "exponential",
        sampling_options: dict[str, float] | None = None,
        mass: bool = False,
        query: str = "rotated",
        detach_every: int | None = None,
    ):
        super().__init__(geometry, detach_every=detach_every)
        if order < 1:
            raise ValueError(f"{order} tokens: give an order (memory_order) from 1 on")
        options: dict[str, object] = dict(sampling_options or {})
        samplings.sample_points(sampling, order, order, **options)  # refuses options that do not fit
        self.adds_score = mass
        self.raw_queries = one_of("query", query, ("rotated", "raw")) == "raw"
        self.rule = Choice(order, sampling, tuple(sorted(options.items())))

    def start(self, batch: int, device: torch.device | str | None = None) -> Picked:
        """No tokens."""
        shape = (batch, self.geometry.kv_heads, self.rule.order, self.geometry.head_dim)
        key, value = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        return Picked(key, value, torch.zeros(batch, self.rule.order, device=device))

    def read(self, state: State, seen: int, host: Host) -> Reading:
        """The tokens, without positions."""
        empty = max(self.rule.order - seen, 0)
        reading = tuple(part[:, :, empty:] for part in state[:2])
        return (*reading, log_mass(state[2][:, empty:], seen)) if self.adds_score else reading

    def write(self, state: State, block: Block, seen: int) -> Picked:
        """Of the tokens kept and the new ones, keep those nearest to the sample points."""
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

    def read_all(self, key: KeyValues, value: KeyValues, host: Host) -> Sequence[Reading]:
        """The tokens that a stream would still have, straight from the sample."""
        size = static(self.geometry.block_size)
        left = _survivors(self.rule, size, static(-(-key.shape[2] // size)), str(key.device))
        readings = []
        for block, kept in enumerate(left, 1):
            reading = tuple(self.history(signal, block)[:, :, kept] for signal in (key, value))
            if self.adds_score:
                time = (kept - block * size + 0.5).expand(len(key), -1)
                reading = (*reading, log_mass(time, block * size))
            readings.append(reading)
        return readings


def log_mass(time: Float[Tensor, "batch kept"], seen: int) -> Float[Tensor, "batch 1 kept 1"]:
    """The logarithm of how many of `seen` tokens are nearest to each that was kept."""
    edges = F.pad((time[:, 1:] + time[:, :-1]) / 2, (1, 0), value=-seen)
    return F.pad(edges, (0, 1)).diff(dim=1).log()[:, None, :, None]


def nearest(time: Float[Tensor, "batch candidate"], points: Float[Tensor, " order"]) -> Int[Tensor, "batch order"]:
    """Ascending indices of different candidates close to the points, which ascend too."""
    after = torch.searchsorted(time, points.expand(len(time), -1).contiguous()).clamp(1, time.shape[1] - 1)
    closer = points - time.gather(1, after - 1) <= time.gather(1, after) - points
    # Different and ascending means that index minus rank may not fall. Where it does, older points could be moved
    # back or newer ones forward; half of both keeps a stream from drifting either way over many blocks.
    rank = torch.arange(len(points), device=time.device)
    slack = after - closer.long() - rank
    moved_back, moved_forward = slack.flip(1).cummin(1).values.flip(1), slack.cummax(1).values
    return ((moved_back + moved_forward) // 2).clamp(0, time.shape[1] - len(points)) + rank


# A constant of the compiled graph: it depends on numbers, not on tensors.
@torch.compiler.assume_constant_result
def _survivors(rule: Choice, size: int, blocks: int, device: str) -> tuple[Int[Tensor, " kept"], ...]:
    return survivors(rule, size, blocks, device)


@lru_cache(maxsize=4)
def survivors(rule: Choice, size: int, blocks: int, device: str = "cpu") -> tuple[Int[Tensor, " kept"], ...]:
    """For blocks 1, 2, ...: the tokens of the history that a stream has kept."""
    kept, result = torch.arange(0), []
    for seen in range(size, blocks * size, size):
        kept = torch.cat((kept, torch.arange(seen - size, seen)))
        if len(kept) > rule.order:
            kept = kept[rule.choose((kept - seen + 0.5)[None], seen)[0]]
        result.append(kept.to(device))
    return tuple(result)
