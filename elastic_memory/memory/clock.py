"""Elastic memory with a clock of its own in every head: several time scales, each an exponential window."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from elastic_memory import hippo, sampling
from elastic_memory.memory.contract import Geometry, MemoryInfo
from elastic_memory.memory.linear import LinearMemory, Rule
from elastic_memory.operators import Step, readers
from elastic_memory.shapes import Float, Tensor


class Clock(NamedTuple):
    """Polynomials over clocks of which each takes 1/i of the domain for token i, until i is the head's window."""

    order: int
    points: int
    sampling: str | Callable[..., Tensor]
    options: tuple[tuple[str, float], ...]
    windows: tuple[int, ...]  # w, by head: from token w on, each takes d / (1 + d) of the domain with d = 1/w

    def like(self, start: int, end: int) -> tuple[int, int]:
        """When all windows are full, operators depend on the number of new tokens only."""
        late = max(start - max(self.windows) - 1, 0)
        return start - late, end - late

    def step(self, start: int, end: int) -> Step:
        """P(r) with r of its own per head, and integrals of the basis between the places of tokens."""
        places = self.places(torch.arange(start, end + 1), end)
        transition = hippo.transitions(self.order, places[:, 0])
        return Step(transition, hippo.projections(self.order, places))

    def reader(self, history: int) -> Float[Tensor, "head point order"]:
        """The basis at the sample points of a history of as many tokens as the newest fits into the domain."""
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
    """Elastic memory in which a token's share of the domain shrinks by 1 + 1/w with each token after it. No parameters.

    So a head looks back over about w tokens, finely at the newest and coarsely beyond, for ever at one resolution.
    Until w tokens came, all have equal shares, as in elastic memory. `shortest` and `longest`: w of the first and the
    last head of keys; the others are spaced geometrically between them. The sample points lie in the domain: at equal
    distances there, they are spaced geometrically in age.
    """

    info = MemoryInfo(
        source="ours: elastic memory over a clock per head",
        phrase="a polynomial over exponential windows, from short to long by head",
    )
    no_join = "a text's first tokens take larger shares than they would later on"

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: int = 540,
        points: int = 512,
        sampling: str | Callable[..., Tensor] = "geometric_cells",
        sampling_options: dict[str, float] | None = None,
        shortest: int = 64,
        longest: int = 4096,
        detach_every: int | None = None,
    ):
        super().__init__(
            geometry,
            order=order,
            points=points,
            sampling=sampling,
            sampling_options=sampling_options,
            detach_every=detach_every,
        )
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"windows from shortest={shortest} to longest={longest} tokens: give 1 <= shortest <= longest"
            )
        self.windows = spaced(shortest, longest, geometry.kv_heads)
        self.rule = self.make_rule()

    def make_rule(self) -> Rule:
        """With the clocks of all heads."""
        return Clock(self.bank.order, self.bank.points, self.bank.sampling, self.bank.options, self.windows)


def spaced(first: int, last: int, count: int) -> tuple[int, ...]:
    """Whole numbers, spaced geometrically; one alone lies in the middle."""
    places = [i / (count - 1) for i in range(count)] if count > 1 else [0.5]
    return tuple(round(math.exp((1 - x) * math.log(first) + x * math.log(last))) for x in places)
