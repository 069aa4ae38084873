"""A hybrid: the most novel tokens raw, the whole history as a polynomial."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from elastic_memory import hippo
from elastic_memory.common.defaults import ORDER, POINTS
from elastic_memory.memory.contract import Block, Geometry, Host, KeyValues, MemoryInfo, ParallelMemory, Reading, State
from elastic_memory.memory.elastic import ElasticMemory
from elastic_memory.memory.linear import plan_of, reader_of, states
from elastic_memory.memory.tools import beside, budget, full_precision, one_of, static, wide
from elastic_memory.operators import Step
from elastic_memory.shapes import Float, Int, Tensor

EMPTY = -1.0  # novelty of a slot without a token
# Squared errors below this share of the squared key count as 0. Otherwise rounding would choose among repeated tokens
# at the beginning of a text, and results would depend on how it is split into calls.
ROUNDING = 1e-6


class Newest(NamedTuple):
    """Elastic memory's operators, with R at the middles of the newest `tokens`."""

    order: int
    tokens: int

    def earliest(self, start: int, end: int) -> tuple[int, int]:
        """Every time has operators of its own."""
        return start, end

    def step(self, start: int, end: int) -> Step:
        """P and K of eq. 6."""
        return Step(hippo.transition(self.order, start, end), hippo.projection(self.order, start, end))

    def reader(self, history: int) -> Float[Tensor, "token order"]:
        """R, one row per token."""
        middles = torch.arange(history - self.tokens, history, dtype=torch.float64) + 0.5
        return hippo.basis(self.order, middles / history)


class OutliersMemory(ParallelMemory):
    """`share` of `order` are raw tokens, the rest a polynomial; both join the block's softmax. No parameters.

    The novelty of a token is the squared error with which the polynomial reconstructs its key when its block has been
    written, divided by the mean of the block. Each head keeps the keys and values of the most novel tokens of the whole
    history, without positions. The polynomial contains these tokens, too. `query`: rotated
    or raw, as for elastic memory.
    """

    info = MemoryInfo(
        source="ours: elastic memory beside the tokens that it reconstructs worst, at equal floats",
        phrase="the most novel tokens raw, the whole history as a polynomial",
        paper_floats=lambda *parts: sum(parts[:4]),  # it keeps the novelty of each raw token, too
    )
    shares_softmax = True
    no_join = "how novel a token is depends on the text before it"

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: int = ORDER,
        share: float = 0.5,
        points: int = POINTS,
        sampling: str | Callable[..., Tensor] = "exponential",
        sampling_options: dict[str, float] | None = None,
        query: str = "rotated",
        detach_every: int | None = None,
    ):
        super().__init__(geometry, detach_every=detach_every)
        order, self.raw = budget(order, share)
        self.elastic = ElasticMemory(
            geometry,
            order=order,
            points=points,
            sampling=sampling,
            sampling_options=sampling_options,
            detach_every=detach_every,
        )
        self.raw_queries = one_of("query", query, ("rotated", "raw")) == "raw"
        self._update_rule()

    def _update_rule(self) -> None:
        self.retrieval = self.elastic.retrieval
        self.rule = Newest(self.elastic.bank.order, self.geometry.block_size)

    def start(self, batch: int, device: torch.device | str | None = None) -> State:
        """Coefficients, then raw keys and values, then their novelty."""
        shape = (batch, self.geometry.kv_heads, self.raw)
        key, value = (torch.zeros(*shape, self.geometry.head_dim, device=device) for _ in range(2))
        return (*self.elastic.start(batch, device), key, value, torch.full(shape, EMPTY, device=device))

    def read(self, state: State, seen: int, host: Host) -> Reading:
        """The polynomial's points, then the raw tokens."""
        raw = [part[:, :, : min(seen, self.raw)] for part in state[2:4]]
        return beside(self.elastic.read(state[:2], seen, host), raw)

    @full_precision
    def write(self, state: State, block: Block, seen: int) -> State:
        """The polynomial; then the most novel of the raw tokens and the new ones."""
        coefficients = self.elastic.write(state[:2], block, seen)
        rule = self.rule._replace(tokens=block.key.shape[2])
        reader = reader_of(rule, seen + rule.tokens, str(block.key.device), torch.float32)
        novelty = torch.cat((state[4], _novelty(block.key, reader @ coefficients[0])), dim=2)
        novelty, index = _most_novel(novelty, self.raw)
        raw = [torch.cat((a, b.float()), dim=2) for a, b in zip(state[2:4], block[:2], strict=True)]
        return (*coefficients, *(_gather(part, index) for part in raw), novelty)

    def read_all(self, key: KeyValues, value: KeyValues, host: Host) -> Sequence[Reading]:
        """Raw tokens come straight from the sample: the most novel of a history are those that a stream has kept."""
        size, readings = static(self.geometry.block_size), []
        novelty = self._novelty_of_all(key)
        for block, polynomial in enumerate(self.elastic.read_all(key, value, host), 1):
            seen = block * size
            index = _most_novel(novelty[:, :, :seen], self.raw)[1]
            readings.append(beside(polynomial, [_gather(self.history(x, block), index) for x in (key, value)]))
        return readings

    @torch.no_grad()
    def _novelty_of_all(self, key: Float[Tensor, "batch kv_head token dim"]) -> Float[Tensor, "batch kv_head written"]:
        """Novelty of the tokens of all blocks but the last, which nobody reads."""
        size, dtype = static(self.geometry.block_size), torch.promote_types(key.dtype, torch.float32)
        plan = plan_of(self.rule, size, static(-(-key.shape[2] // size)), str(key.device), dtype)
        signal, found = key.permute(1, 2, 0, 3), []
        with torch.autocast(key.device.type, enabled=False):
            for index, state in enumerate(states(plan, signal.flatten(2).to(dtype), size)):
                reconstructed = (plan.readers[index] @ state).unflatten(2, (key.shape[0], -1)).permute(2, 0, 1, 3)
                found.append(_novelty(key[:, :, index * size : (index + 1) * size], reconstructed))
        return torch.cat(found, dim=2) if found else key[:, :, :0, 0]

    def set_retrieval(self, **changes: Any) -> None:
        """Change how the polynomial is read; the raw tokens stay as they are."""
        self.elastic.set_retrieval(**changes)
        self._update_rule()

    def adapt(self, state: State) -> tuple[State, str | None]:
        """Fit the polynomial to another order."""
        coefficients, said = self.elastic.adapt(state[:2])
        return (*coefficients, *state[2:]), said


@torch.no_grad()
def _novelty(
    key: Float[Tensor, "batch kv_head token dim"], reconstructed: Float[Tensor, "batch kv_head token dim"]
) -> Float[Tensor, "batch kv_head token"]:
    """Squared error of reconstructed keys, relative to the mean of the block.

    Relative, because the polynomial gets coarser as the history grows: late tokens would all be more novel.
    """
    key = wide(key)
    error = (key - reconstructed).square().sum(3)
    error = torch.where(error > ROUNDING * key.square().sum(3), error, 0)
    return error / error.mean(2, keepdim=True).clamp(min=1e-30)


def _most_novel(
    novelty: Float[Tensor, "batch kv_head token"], count: int
) -> tuple[Float[Tensor, "batch kv_head kept"], Int[Tensor, "batch kv_head kept"]]:
    """The largest novelties and their indices; of equal ones the older, so that a stream keeps what a sample does."""
    values, index = novelty.sort(dim=2, descending=True, stable=True)
    return values[:, :, :count], index[:, :, :count]


def _gather(part: Tensor, index: Int[Tensor, "batch kv_head kept"]) -> Tensor:
    return part.gather(2, index[..., None].expand(-1, -1, -1, part.shape[3]))
