"""The bank: every matrix that a memory of one order needs, for any block of any history.

Reading a memory is linear in the tokens it has seen, and two algorithms give the same result:

    recurrent    state = P state + K tokens, then R state      constant memory: streaming, and training at small orders
    direct       W tokens with W = R K over the whole history  no state at all, cost independent of the order: training

Matrices are built in float64 on the device that uses them and cast last. They depend on no weights: layers share them,
checkpoints never hold them, and small caches forget those of blocks long gone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from elastic_memory import hippo, sampling
from elastic_memory.shapes import Float, Tensor

BATCH = 2**22  # float64 numbers of the transitions that the recurrent algorithm builds together

# Tokens, and degrees of their polynomials, that are in memory together while W is built. A GPU needs few long launches,
# a CPU what fits its caches.
SWEEP = {"cpu": 2**13, "cuda": 2**15}
PANEL = {"cpu": 64, "cuda": 256}

LARGEST = 2**20  # order and points: anything above is a slip, and would fill the machine before it fails
CACHED = 4  # entries per cache; an unbounded one would break the promise of constant memory

# A stream builds the operators of several blocks together, a stretch: the recurrence over n takes as many launches for
# several blocks as for one. The largest stretch in bytes: nine blocks at order 540. Two stretches then hold the eight
# blocks of a prompt that pass through one layer before the next.
AHEAD = 3 * 2**24


class Step(NamedTuple):
    """P and K, which write tokens: `state = transition @ state + projection @ tokens`."""

    transition: Float[Tensor, "order order"]
    projection: Float[Tensor, "order token"]


class Direct(NamedTuple):
    """Block i reads `weights[i-1] @ tokens[:i * block_size]`, for i = 1 .. blocks-1; block 0 has nothing to read."""

    weights: tuple[Float[Tensor, "point token"], ...]


class Recurrent(NamedTuple):
    """The same through the state C_i after i blocks: block i reads `reconstructions[i-1] @ C_i`.

    C_1 = projections[0] @ block 0, and from there C_i = transitions[i-2] @ C_{i-1} + projections[i-1] @ block i-1. The
    last block is not written. If the sampling ignores the history's length, one reconstruction serves all blocks.
    """

    transitions: Float[Tensor, "carried order order"]
    projections: Float[Tensor, "written order token"]
    reconstructions: Float[Tensor, "read point order"]


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def constant(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Build a constant: without gradient, and usable in training even if first built in inference mode."""

    @wraps(function)
    def build(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return build


def _stretched(function: Callable[..., Result]) -> Callable[..., Result]:
    """Cache the last two results of a function of a stretch: `count` neighbouring blocks from block `first` on.

    A stretch replaces the one right before it. So one stream fills one entry; two interleaved streams, or rows that are
    far apart, fill both.
    """
    held: dict[Any, Result] = {}

    @wraps(function)
    def build(first: int, count: int, *others: Any) -> Result:
        result = held.get((first, count, *others))
        if result is None:
            held.pop((first - count, count, *others), None)
            if len(held) > 1:
                held.pop(next(iter(held)), None)
            result = held[first, count, *others] = function(first, count, *others)
        return result

    return build


@dataclass(frozen=True)
class Bank:
    """A memory of `order` coefficients, read as `points` tokens by `sampling`. Equal banks share their matrices."""

    order: int
    points: int
    sampling: str | Callable[..., Tensor] = "uniform"
    options: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if not (1 <= self.order <= LARGEST and 1 <= self.points <= LARGEST):
            raise ValueError(f"order {self.order:,} read at {self.points:,} points: give 1 to {LARGEST:,} of each")
        sampling.resolve(self.sampling, dict(self.options))

    def checked(self) -> "Bank":
        """This bank, after a test of its sampling options. Not in the constructor, which torch.export traces."""
        self.sample_points(self.points)
        return self

    def step(
        self, start: int, end: int, device: Any, dtype: torch.dtype = torch.float32, every: int | None = None
    ) -> Step:
        """P and K for tokens `start`..`end - 1`; `every`: block size of the stream, whose stretch is built together."""
        size = end - start
        if size < 1 or start < 0 or (size != every if every else start % size):
            return _step(self.order, start, end, torch.device(device), dtype)
        block, ahead = start // size, _ahead(self.order * (self.order + size), dtype)
        first = block // ahead * ahead
        return _steps(first, ahead, self.order, size, torch.device(device), dtype, start % size)[block - first]

    def reconstruction(
        self, history: int, device: Any, dtype: torch.dtype = torch.float32, every: int | None = None
    ) -> Float[Tensor, "point order"]:
        """R for a history of that many tokens; `every`: block size of the stream, whose stretch is built together."""
        if not every or history < every:
            return _reconstructions(0, 1, self, history, torch.device(device), dtype)[0]
        block, ahead = history // every - 1, _ahead(self.order * self.points, dtype)
        first, place = block // ahead * ahead, torch.device(device)
        return _reconstructions(first, ahead, self, every, place, dtype, history % every)[block - first]

    def joiners(
        self, first: int, second: int, device: Any, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "order order"], Float[Tensor, "order order"]]:
        """The operators that give the state of two histories in sequence from their states; lengths in tokens."""
        return _joiners(self.order, first, second, torch.device(device), dtype)

    def direct(self, history: int, device: Any, dtype: torch.dtype = torch.float32) -> Float[Tensor, "point token"]:
        """W = R K, which reads that many tokens without a state."""
        return _direct(self, (history,), torch.device(device), dtype)[0]

    def plan(
        self,
        block_size: int,
        blocks: int,
        device: Any,
        dtype: torch.dtype = torch.float32,
        algorithm: str | None = None,
    ) -> Direct | Recurrent:
        """The operators of one pass over `blocks` whole blocks, by the cheaper algorithm unless one is given.

        Recurrent operators are float32 at least: their errors would add up from block to block.
        """
        if block_size < 1 or blocks < 1:
            raise ValueError(f"{blocks} blocks of {block_size} tokens: both must be at least 1")
        cost = self.cost(block_size, blocks)
        algorithm = min(cost, key=cost.__getitem__) if algorithm is None else algorithm
        if algorithm not in cost:
            raise ValueError(f"algorithm={algorithm!r}: give {' or '.join(cost)}, or None for the cheaper one")
        if algorithm == "direct":
            histories = tuple(block_size * block for block in range(1, blocks))
            return Direct(_direct(self, histories, torch.device(device), dtype))
        return _recurrent(self, block_size, blocks, torch.device(device), torch.promote_types(dtype, torch.float32))

    def cost(self, block_size: int, blocks: int, width: int = 1) -> dict[str, int]:
        """Operations of one pass by either algorithm, for `width` features (keys and values of all heads together)."""
        read = max(blocks - 1, 0)
        carried = max(blocks - 2, 0) * self.order**2
        return {
            "direct": 2 * width * self.points * block_size * read * (read + 1) // 2,
            "recurrent": 2 * width * (carried + read * self.order * (block_size + self.points)),
        }

    def log_mass(self, history: int, device: Any) -> Float[Tensor, " point"]:
        """The logarithm of the number of tokens that each point or cell of a history stands for."""
        return _log_mass(self, history, torch.device(device))

    def sample_points(self, history: int) -> Tensor:
        """Where this bank looks in a history of that many tokens: points [points] or cells [points, 2]."""
        return sampling.sample_points(self.sampling, self.points, history, **dict(self.options))


def _ahead(numbers: int, dtype: torch.dtype) -> int:
    """Blocks in a stretch, if the operator of each holds so many numbers."""
    return max(1, min(16, AHEAD // (numbers * dtype.itemsize)))


@_stretched
@constant
def _steps(
    first: int, count: int, order: int, size: int, device: torch.device, dtype: torch.dtype, offset: int = 0
) -> tuple[Step, ...]:
    """P and K of a stretch; block 0 begins at token `offset`."""
    starts = torch.arange(first, first + count, dtype=torch.float64, device=device) * size + offset
    edges = torch.arange(size + 1, dtype=torch.float64, device=device) + starts[:, None]
    projections = hippo.projections(order, edges / (starts + size)[:, None], dtype)
    transitions = hippo.transitions(order, starts / (starts + size), dtype)
    return tuple(Step(*pair) for pair in zip(transitions, projections, strict=True))


@lru_cache(maxsize=CACHED)
@constant
def _step(order: int, start: int, end: int, device: torch.device, dtype: torch.dtype) -> Step:
    projection = hippo.projection(order, start, end, device=device).to(dtype)
    return Step(hippo.transition(order, start, end, device=device).to(dtype), projection)


@lru_cache(maxsize=CACHED)
@constant
def _joiners(
    order: int, first: int, second: int, device: torch.device, dtype: torch.dtype
) -> tuple[Float[Tensor, "order order"], Float[Tensor, "order order"]]:
    before, after = hippo.joiners(order, first, second, device=device)
    return before.to(dtype), after.to(dtype)


@_stretched
@constant
def _reconstructions(
    first: int, count: int, bank: Bank, every: int, device: torch.device, dtype: torch.dtype, offset: int = 0
) -> Float[Tensor, "history point order"]:
    """R after each block of a stretch; block 0 begins at token `offset`."""
    points = torch.stack([bank.sample_points(offset + (block + 1) * every) for block in range(first, first + count)])
    return readers(bank.order, points, device).to(dtype).contiguous()


@lru_cache(maxsize=16 * CACHED)
@constant
def _log_mass(bank: Bank, history: int, device: torch.device) -> Float[Tensor, " point"]:
    tokens = sampling.mass(bank.sample_points(history), history)
    return tokens.clamp_min(1e-6).log().float().to(device)  # points may coincide


@lru_cache(maxsize=CACHED)
@constant
def _recurrent(bank: Bank, size: int, blocks: int, device: torch.device, dtype: torch.dtype) -> Recurrent:
    order, read = bank.order, range(1, blocks)
    transitions = torch.empty(max(blocks - 2, 0), order, order, device=device, dtype=dtype)
    ratios = torch.arange(1, max(blocks - 1, 1), dtype=torch.float64, device=device)
    ratios = ratios / (ratios + 1)
    batch = max(1, BATCH // order**2)
    for first in range(0, len(ratios), batch):
        transitions[first : first + batch] = hippo.transitions(order, ratios[first : first + batch], dtype)

    ends = size * torch.arange(1, blocks, dtype=torch.float64, device=device)[:, None]
    edges = torch.arange(-size, 1, dtype=torch.float64, device=device) + ends
    projections = hippo.projections(order, edges / ends, dtype)
    if not read:
        return Recurrent(transitions, projections, projections.new_empty(0, bank.points, order))
    points = [bank.sample_points(size * block) for block in read]
    if all(torch.equal(points[0], other) for other in points[1:]):
        points = points[:1]
    reconstructions = readers(order, torch.stack(points), device).to(dtype).contiguous()
    return Recurrent(transitions, projections, reconstructions)


@lru_cache(maxsize=CACHED)
@constant
def _direct(
    bank: Bank, histories: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Float[Tensor, "point token"], ...]:
    """W = R K for several histories; neither R nor K is ever in memory.

    W[j,k] is the sum over n of R[j,n] times Phi_n at token k's right edge minus Phi_n at its left edge, and
    Phi_n = (P_{n+1} - P_{n-1}) / (2 sqrt(2n+1)). Sorted by polynomial instead, it is the sum over m = 1 .. order of

        (r[j,m-1] - r[j,m+1]) / 2 * (P_m at the right edge - P_m at the left edge),

    r[j,n] = R[j,n] / sqrt(2n+1) and 0 from n = order on. One plain product per panel of polynomials does that, and one
    difference along the tokens at the very end; one recurrence over n serves edges and sample points alike.
    """
    weights = tuple(torch.empty(bank.points, history, device=device, dtype=dtype) for history in histories)
    points = [bank.sample_points(history).to(device) for history in histories]
    most, rows = (limit.get(device.type, limit["cpu"]) for limit in (SWEEP, PANEL))
    for pieces in _pieces(histories, most):
        edges = [
            torch.arange(first, last + 1, dtype=torch.float64, device=device) / histories[which]
            for which, first, last in pieces
        ]
        looks = torch.stack([points[which] for which, _, _ in pieces])
        sums = [points.new_zeros(bank.points, len(points)) for points in edges]
        sizes = [len(points) for points in edges]
        # P_{begin-1} .. P_{begin+rows+2} for begin = 0, rows, ...: neighbouring panels share four rows.
        panels = hippo.legendre(torch.cat([*edges, looks.flatten()]), rows, shared=4)
        for begin, panel in zip(range(0, bank.order, rows), panels, strict=False):
            *values, seen = panel.split([*sizes, looks.numel()], dim=1)
            differences = _differences(bank.order, begin, seen, looks)
            for total, columns, difference in zip(sums, values, differences.unbind(1), strict=True):
                total.addmm_(difference.T, columns[2:-2])
        for (which, first, last), total in zip(pieces, sums, strict=True):
            # In strips, as the difference exists in float64 before it is cast.
            for part, strip in zip(total.split(rows), weights[which].split(rows), strict=True):
                torch.sub(part[:, 1:], part[:, :-1], out=strip[:, first:last])
    return weights


def _differences(
    order: int, begin: int, panel: Float[Tensor, "row look"], looks: Float[Tensor, "piece point ..."]
) -> Float[Tensor, "panel piece point"]:
    """(r[m-1] - r[m+1]) / 2 for m = begin + 1, begin + 2, ... (see `_direct`), from a panel at points or cells.

    r[n] is P_n at a point; over a cell it is the mean of P_n, (P_{n+1} - P_{n-1}) / (2n+1) / 2 at its right end minus
    the same at its left end, by its width.
    """
    n = torch.arange(begin, begin + len(panel) - 2, device=panel.device)[:, None, None]
    panel = panel.unflatten(1, looks.shape)
    if looks.ndim == 2:
        r = panel[1:-1]
    else:
        steps = panel[..., 1] - panel[..., 0]
        r = (steps[2:] - steps[:-2]) / (2 * (2 * n + 1) * (looks[..., 1] - looks[..., 0]))
    r = torch.where(n < order, r, 0.0)
    return (r[:-2] - r[2:]) / 2


def readers(
    order: int, points: Float[Tensor, "reader point ..."], device: torch.device
) -> Float[Tensor, "reader point order"]:
    """R for several sets of points or cells, in one pass: the basis at a point, its mean over a cell."""
    flat = points.flatten()
    if points.ndim == 2:
        return hippo.basis(order, flat, device=device).unflatten(0, points.shape)
    left, right = hippo.integral(order, flat, device=device).unflatten(0, points.shape).unbind(2)
    return (right - left) / (points[..., 1] - points[..., 0]).to(device)[..., None]


def _pieces(histories: tuple[int, ...], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut histories into pieces (which, first token, last token) and group them: about `most` tokens per group."""
    group: list[tuple[int, int, int]] = []
    room = most
    for which, history in enumerate(histories):
        first = 0
        while first < history:
            last = min(history, first + room)
            group.append((which, first, last))
            room -= last - first
            first = last
            if not room:
                yield group
                group, room = [], most
    if group:
        yield group
