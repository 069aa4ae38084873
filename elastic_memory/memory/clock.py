"""Elastic memory with a clock of its own in every head: several time scales, each an exponential window."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from elastic_memory import hippo, sampling
from elastic_memory.common.defaults import ORDER, POINTS
from elastic_memory.memory import pace
from elastic_memory.memory.contract import Block, Geometry, Host, KeyValues, MemoryInfo, Reading, State
from elastic_memory.memory.elastic import ElasticState
from elastic_memory.memory.linear import LinearMemory, Rule, readers_of
from elastic_memory.memory.tools import full_precision, one_of, padded, static, wide
from elastic_memory.operators import Step, readers
from elastic_memory.shapes import Float, Tensor

RATES = ("constant", "learned", "content")
FASTEST = 8.0  # a learned clock runs at most exp(8) times faster or slower than at the start of training
OLDEST = -60.0  # log of the smallest place in the domain: still older tokens share it


class Clock(NamedTuple):
    """Operators of one polynomial per head: token i takes 1/i of its domain, until i reaches the head's window."""

    order: int
    points: int
    sampling: str | Callable[..., Tensor]
    options: tuple[tuple[str, float], ...]
    windows: tuple[int, ...]  # w, by head: from token w on, each takes d / (1 + d) of the domain with d = 1/w

    def earliest(self, start: int, end: int) -> tuple[int, int]:
        """After the longest window, operators depend on the number of new tokens only."""
        late = max(start - max(self.windows) - 1, 0)
        return start - late, end - late

    def step(self, start: int, end: int) -> Step:
        """P(r) with r of its own per head, and integrals of the basis between the places of tokens."""
        places = self.places(torch.arange(start, end + 1), end)
        transition = hippo.transitions(self.order, places[:, 0])
        return Step(transition, hippo.projections(self.order, places))

    def reader(self, history: int) -> Float[Tensor, "head point order"]:
        """R at sample points for at most w + 1 tokens, because the newest takes 1/(w + 1) of the domain."""
        counts = (min(history, window + 1) for window in self.windows)
        looks = [sampling.sample_points(self.sampling, self.points, n, **dict(self.options)) for n in counts]
        return readers(self.order, torch.stack(looks), torch.device("cpu"))

    def places(self, times: Tensor, now: int) -> Float[Tensor, "head time"]:
        """Where in the domain [0, 1] of a history of `now` tokens these times are: T(time) / T(now)."""
        window = torch.tensor(self.windows, dtype=torch.float64)[:, None]
        return (_log_time(times.double(), window) - _log_time(torch.tensor([now]).double(), window)).exp()


def _log_time(time: Float[Tensor, " time"], window: Float[Tensor, "head 1"]) -> Float[Tensor, "head time"]:
    """log T: T(t) = t up to the window w, and from there on w (1 + 1/w)^(t - w)."""
    return time.minimum(window).log() + (time - window).clamp(min=0) * (1 / window).log1p()


class ClockMemory(LinearMemory):
    """Elastic memory in which a token's share of the domain shrinks by 1 + 1/w with each token after it.

    So a head looks back over about w tokens, finely at the newest and coarsely beyond. The resolution does not depend
    on the length of the text. The first w tokens have equal shares, as in elastic memory. `shortest` and `longest`: w
    of the first and the last head of keys; the others are spaced geometrically between them. The sample points lie in
    the domain: at equal distances there, they are spaced geometrically in age. `query`: rotated or raw, as for elastic
    memory.

    `rate`: constant, without parameters; learned, each head's clock runs exp(a) times faster, with a learned from 0;
    content, exp(a + b k) times faster at a token with key k, so that important tokens take more of the domain.
    """

    info = MemoryInfo(
        source="ours: elastic memory over a clock per head",
        phrase="a polynomial over exponential windows, from short to long by head",
    )
    no_join = "the first tokens of a text get larger shares of the domain than they would in a longer text"

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: int = ORDER,
        points: int = POINTS,
        sampling: str | Callable[..., Tensor] = "geometric_cells",
        sampling_options: dict[str, float] | None = None,
        shortest: int = 64,
        longest: int = 4096,
        query: str = "rotated",
        rate: str = "constant",
        detach_every: int | None = None,
    ):
        super().__init__(
            geometry,
            order=order,
            points=points,
            sampling=sampling,
            sampling_options=sampling_options,
            query=query,
            detach_every=detach_every,
        )
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"windows from shortest={shortest} to longest={longest} tokens: give 1 <= shortest <= longest"
            )
        self.windows = spaced(shortest, longest, geometry.kv_heads)
        self.rate = one_of("rate", rate, RATES)
        if rate != "constant":
            self.rate_gain = nn.Parameter(torch.empty(geometry.kv_heads))
        if rate == "content":
            self.weigh = nn.Parameter(torch.empty(geometry.kv_heads, geometry.features or geometry.head_dim))
        self.update_rule()
        self.reset()

    def reset(self) -> None:
        """All clocks at the speed of their windows."""
        for parameter in self.parameters(recurse=False):
            if parameter is not self.blend:
                nn.init.zeros_(parameter)

    def make_rule(self) -> Rule:
        """The rule with the windows of all heads."""
        return Clock(self.bank.order, self.bank.points, self.bank.sampling, self.bank.options, self.windows)

    @full_precision
    def write(self, state: State, block: Block, seen: int) -> ElasticState:
        """C <- P C + K F."""
        if self.rate == "constant":
            return super().write(state, block, seen)
        places = self._places(wide(block.key)[:, :, None], seen)[:, :, 0]
        signal = torch.cat((block.key, block.value), dim=3).float()
        new = pace.projections(places, self.bank.order, signal.dtype) @ signal
        if seen:
            new = pace.transitions(places[..., 0], self.bank.order, signal.dtype) @ torch.cat(state, dim=3) + new
        return ElasticState(*new.chunk(2, dim=3))

    def read_all(self, key: KeyValues, value: KeyValues, host: Host) -> Sequence[Reading]:
        """The recurrence block by block, with operators of all blocks built at once."""
        size = static(self.geometry.block_size)
        blocks = static(-(-key.shape[2] // size)) - 1  # that are read
        if self.rate == "constant" or not blocks:
            return super().read_all(key, value, host)
        with torch.autocast(key.device.type, enabled=False):
            signal = wide(torch.cat((key, value), dim=3))[:, :, : blocks * size].unflatten(2, (blocks, size))
            places = self._places(signal[..., : key.shape[3]], 0)
            updates = (pace.projections(places, self.bank.order, signal.dtype) @ signal).unbind(2)
            carries = pace.transitions(places[:, :, 1:, 0], self.bank.order, signal.dtype)
            readers = readers_of(self.rule, size, blocks + 1, str(key.device), signal.dtype)
            readings, entering = [], updates[0]
            for index, reader in enumerate(readers, 1):
                (entering,) = self.cut((entering,), index)
                readings.append(tuple((reader @ entering).to(key.dtype).chunk(2, dim=3)))
                if index < blocks:
                    entering = carries[:, :, index - 1] @ entering + updates[index]
        return readings

    def _places(
        self, key: Float[Tensor, "batch kv_head block token dim"], seen: int
    ) -> Float[Tensor, "batch kv_head block edge"]:
        """Where tokens of neighbouring blocks begin and end in the domain at the end of their block: T(edge) / T(end).

        Token number i, from 1 on, moves the clock on by the factor 1 + d, with d = exp(a + b k) / min(i - 1, w).
        """
        faster = wide(self.rate_gain)[:, None, None].expand(key.shape[:-1])
        if self.rate == "content":
            faster = faster + (key @ padded(wide(self.weigh), key.shape[-1])[:, None, :, None])[..., 0]
        before = torch.arange(seen, seen + key.shape[2] * key.shape[3], dtype=torch.float64, device=key.device)
        windows = torch.tensor(self.windows, dtype=torch.float64, device=key.device)[:, None]
        longest = before.clamp(min=1).minimum(windows).unflatten(1, key.shape[2:4])
        steps = (faster.double().clamp(-FASTEST, FASTEST).exp() / longest).log1p()
        ages = steps.flip(3).cumsum(3).flip(3).neg().clamp(min=OLDEST)
        places = torch.cat((ages.exp(), torch.ones_like(ages[..., :1])), dim=3)
        if seen:
            return places
        # The first token takes the whole domain when it comes: before it there is nothing.
        first = torch.zeros_like(places)
        first[:, :, 0, 0] = 1
        return torch.where(first > 0, 0.0, places)


def spaced(first: int, last: int, count: int) -> tuple[int, ...]:
    """`count` whole numbers from `first` to `last`, spaced geometrically; a single one is their geometric mean."""
    places = [i / (count - 1) for i in range(count)] if count > 1 else [0.5]
    return tuple(round(math.exp((1 - x) * math.log(first) + x * math.log(last))) for x in places)
