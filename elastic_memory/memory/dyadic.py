"""A bank of polynomials over segments of the history that double in length with age."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from elastic_memory import hippo, sampling
from elastic_memory.common.defaults import ORDER, POINTS
from elastic_memory.memory.contract import Geometry, MemoryInfo
from elastic_memory.memory.linear import LinearMemory
from elastic_memory.operators import Step, readers
from elastic_memory.shapes import Float, Tensor


class Segments(NamedTuple):
    """Operators of one polynomial per segment, newest first; the state holds their coefficients in sequence."""

    order: int  # of each segment
    segments: int  # at most
    unit: int  # tokens of the newest
    points: int  # of all segments
    sampling: str | Callable[..., Tensor]
    options: tuple[tuple[str, float], ...]

    def earliest(self, start: int, end: int) -> tuple[int, int]:
        """Every time has operators of its own."""
        return start, end

    def intervals(self, now: int) -> list[tuple[int, int]]:
        """First token and end of each segment of a history of `now` tokens, newest first.

        A counter in base two with the digits 1 and 2 says how many segments of each length there are: a third one of a
        length makes the two older ones one of twice the length. The oldest segment is all that is left.
        """
        found: list[tuple[int, int]] = []
        end, length, left = now, self.unit, -(-now // self.unit)
        for room in range(self.segments - 1, 0, -2):
            digit = 2 - left % 2
            for place in range(left - 1, max(left - min(digit, room), 0) - 1, -1):
                found.append((place * length, end))
                end = place * length
            left, length = max(left - digit, 0) // 2, 2 * length
        return [*found, (0, end)] if end else found

    def step(self, start: int, end: int) -> Step:
        """Segments that stay are carried over, merged ones are joined, new tokens are projected into their segments."""
        size = self.order * self.segments
        transition = torch.zeros(size, size, dtype=torch.float64)
        projection = torch.zeros(size, end - start, dtype=torch.float64)
        before = list(enumerate(self.intervals(start)))
        for row, (left, right) in enumerate(self.intervals(end)):
            rows = self._rows(row)
            for column, (first, last) in before:
                if left <= first and last <= right:
                    transition[rows, self._rows(column)] = placed(self.order, first - left, last - left, right - left)
            new = max(left, start)
            if new < right:
                kernel = hippo.projection(self.order, new - left, right - left)
                projection[rows, new - start : right - start] = kernel
        return Step(transition, projection)

    def looks(self, history: int) -> list[Tensor]:
        """Sample points of each segment: equal numbers, but no more than it has tokens."""
        found, free, looks = self.intervals(history), min(self.points, history), []
        for row, (left, right) in enumerate(found):
            points = min(-(-free // (len(found) - row)), right - left)
            if points:
                looks.append(sampling.sample_points(self.sampling, points, right - left, **dict(self.options)))
            free -= points
        return looks

    def reader(self, history: int) -> Float[Tensor, "column row"]:
        """Every segment at its own sample points, newest first."""
        parts = []
        for row, looks in enumerate(self.looks(history)):
            part = torch.zeros(len(looks), self.order * self.segments, dtype=torch.float64)
            part[:, self._rows(row)] = readers(self.order, looks[None], torch.device("cpu"))[0]
            parts.append(part)
        return torch.cat(parts)

    def log_mass(self, history: int) -> Float[Tensor, " column"]:
        """The logarithm of the number of tokens that each sample point stands for."""
        lengths = (right - left for left, right in self.intervals(history))
        masses = [sampling.mass(*pair) for pair in zip(self.looks(history), lengths, strict=False)]
        return torch.cat(masses).clamp_min(1e-6).log()  # points may coincide

    def _rows(self, segment: int) -> slice:
        return slice(segment * self.order, (segment + 1) * self.order)


def placed(order: int, first: int, last: int, length: int) -> Float[Tensor, "order order"]:
    """Coefficients of tokens `first` to `last - 1` -> coefficients of all `length` tokens, where the others are zero.

    That is a join with `first` zero tokens before them, then a transition from `last` to `length` tokens.
    """
    common = math.gcd(first, last, length)
    return _placed(order, first // common, last // common, length // common)


@lru_cache(maxsize=64)
def _placed(order: int, first: int, last: int, length: int) -> Float[Tensor, "order order"]:
    return hippo.transition(order, last, length) @ hippo.joiners(order, first, last - first)[1]


class DyadicMemory(LinearMemory):
    """The newest tokens in short segments, older ones in segments twice, four times, ... as long. No parameters.

    Each segment is a polynomial with an equal share of `order`, rounded down. There are one or two segments of each
    length, and the oldest is all the rest. They are the best polynomials for their tokens: joining two loses nothing.
    `segments`: how many fit; `unit`: tokens of the shortest. `points` are shared by the segments; none has more of them
    than tokens. `mass` and `query`: as for elastic memory.
    """

    info = MemoryInfo(
        source="ours: elastic memory in segments that double with age",
        phrase="polynomials of segments, the older the longer",
    )
    no_join = "where its segments begin depends on the length of the text before them"

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: int = ORDER,
        points: int = POINTS,
        sampling: str | Callable[..., Tensor] = "uniform_cells",
        sampling_options: dict[str, float] | None = None,
        segments: int = 18,
        unit: int = 32,
        mass: bool = False,
        query: str = "rotated",
        detach_every: int | None = None,
    ):
        if segments < 1 or unit < 1:
            raise ValueError(f"segments={segments}, unit={unit}: both must be at least 1")
        self.segments, self.unit = min(segments, max(order, 1)), unit
        super().__init__(
            geometry,
            order=order - order % self.segments,
            points=points,
            sampling=sampling,
            sampling_options=sampling_options,
            mass=mass,
            query=query,
            detach_every=detach_every,
        )
        self.update_rule()

    rule: Segments

    def make_rule(self) -> Segments:
        """The rule with an equal share of the coefficients for each segment."""
        bank, order = self.bank, self.bank.order // self.segments
        return Segments(order, self.segments, self.unit, bank.points, bank.sampling, bank.options)

    def log_mass(self, seen: int, device: str) -> Float[Tensor, " column"]:
        """The logarithm of the number of tokens that each sample point of a segment stands for."""
        return _log_mass(self.rule, seen, device)

    def set_retrieval(self, order: int | None = None, **changes: Any) -> None:  # type: ignore[override]
        """Read each segment with another sampling or number of points."""
        if order not in (None, self.bank.order):
            raise ValueError(f"order {order}: the order of {self.segments} segments is fixed when the memory is built")
        super().set_retrieval(**changes)


# A constant of the compiled graph: it depends on numbers, not on tensors.
@torch.compiler.assume_constant_result
def _log_mass(rule: Segments, seen: int, device: str) -> Float[Tensor, " column"]:
    return rule.log_mass(seen).float().to(device)
