"""Elastic Memory: all past keys and values as one polynomial, read at sample points (Algorithm 1)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from elastic_memory.common.defaults import ORDER, POINTS
from elastic_memory.memory.contract import (
    Block,
    Geometry,
    Host,
    KeyValues,
    MemoryInfo,
    ParallelMemory,
    Reading,
    State,
    check_type,
)
from elastic_memory.memory.tools import full_precision, one_of, static
from elastic_memory.operators import Bank, Direct, Recurrent, Step
from elastic_memory.shapes import Float, Tensor

EPSILON = 1e-12  # of a squared length


class ElasticState(NamedTuple):
    """C of eq. 6: Legendre coefficients of the history of raw keys and of values."""

    key: Float[Tensor, "batch kv_head order dim"]
    value: Float[Tensor, "batch kv_head order dim"]


class ElasticMemory(ParallelMemory):
    """HiPPO-LegS compresses, polynomial sampling reads, the block's softmax attends to both. No parameters.

    `mass`: add log m to the scores of a memory token that stands for m tokens. A cell stands for the tokens that it
    averages, a point for those nearest to it. `query`: rotated, as in the paper, or raw: queries without positions,
    like the memory's keys. `length`: rescale keys and values that are read to the average norm of the history, because
    a mean of many vectors has a small norm; the state carries that norm as one more feature. `algorithm`: how training
    computes the readings, direct or recurrent; None chooses the cheaper one.
    """

    info = MemoryInfo(
        source="Towards Compressive and Scalable Recurrent Memory (arXiv 2602.11212)",
        phrase="the history as a polynomial, read at chosen points",
    )
    shares_softmax = True
    no_join: str | None = None

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: int = ORDER,
        points: int = POINTS,
        sampling: str | Callable[..., Tensor] = "exponential",
        sampling_options: dict[str, float] | None = None,
        mass: bool = False,
        query: str = "rotated",
        length: bool = False,
        algorithm: str | None = None,
        detach_every: int | None = None,
    ):
        super().__init__(geometry, detach_every=detach_every)
        if algorithm not in (None, "direct", "recurrent"):
            raise ValueError(f"algorithm={algorithm!r}: give 'direct', 'recurrent', or None for the cheaper of the two")
        self.algorithm = algorithm
        self.adds_score = mass
        self.raw_queries = one_of("query", query, ("rotated", "raw")) == "raw"
        self.length = length
        options = tuple(sorted((sampling_options or {}).items()))
        self.bank = self.retrieval = Bank(order, points, sampling, options).checked()

    def set_retrieval(  # type: ignore[override]
        self,
        sampling: str | Callable[..., Tensor] | None = None,
        points: int | None = None,
        order: int | None = None,
        sampling_options: dict[str, float] | None = None,
    ) -> None:
        """Read with another sampling, number of points or order than the model was trained with."""
        check_type("points", points, int | None)
        check_type("order", order, int | None)
        check_type("sampling_options", sampling_options, dict | None)
        changes: dict[str, Any] = {"sampling": sampling, "points": points, "order": order}
        if sampling is not None or sampling_options is not None:
            changes["options"] = tuple(sorted((sampling_options or {}).items()))
        changes = {name: value for name, value in changes.items() if value is not None}
        self.bank = self.retrieval = replace(self.bank, **changes).checked()

    def start(self, batch: int, device: torch.device | str | None = None) -> ElasticState:
        """All coefficients zero."""
        shape = (batch, self.geometry.kv_heads, self.bank.order, self.geometry.head_dim + self.length)
        return ElasticState(torch.zeros(shape, device=device), torch.zeros(shape, device=device))

    @full_precision
    def read(self, state: State, seen: int, host: Host) -> Reading:
        """K_mem, V_mem = R C^(K), R C^(V) (eq. 8); memory tokens get no positions."""
        reader = self.reader(seen, state[0].device)
        return self.finished(tuple(reader @ part for part in state), seen)

    @full_precision
    def write(self, state: State, block: Block, seen: int) -> ElasticState:
        """C <- P C + K F (eq. 6)."""
        step = self.step(seen, seen + block.key.shape[2], block.key.device)
        key, value = (
            step.transition @ part + step.projection @ signal.float()
            for part, signal in zip(state, self._signals(block.key, block.value), strict=True)
        )
        return ElasticState(key, value)

    def reader(self, seen: int, device: torch.device) -> Float[Tensor, "*head point order"]:
        """R for a history of `seen` tokens."""
        return self.bank.reconstruction(seen, device, every=self.geometry.block_size)

    def step(self, start: int, end: int, device: torch.device) -> Step:
        """P and K for tokens `start` to `end - 1`."""
        return self.bank.step(start, end, device, every=self.geometry.block_size)

    def log_mass(self, seen: int, device: str) -> Float[Tensor, " point"]:
        """The logarithm of the number of tokens that each point or cell of a history stands for."""
        return _log_mass(*_fields(self.bank), seen, device)

    @full_precision
    def join(self, state: State, seen: int, other: State, other_seen: int) -> ElasticState:
        """C = P(r) C_first + S P(1-r) S C_second: `hippo.join`."""
        first, second = self.bank.joiners(seen, other_seen, state[0].device, state[0].dtype)
        key, value = (first @ before + second @ after for before, after in zip(state, other, strict=True))
        return ElasticState(key, value)

    def read_all(self, key: KeyValues, value: KeyValues, host: Host) -> Sequence[Reading]:
        """Readings of all blocks from raw keys and values, by the cheaper of two algorithms that agree to rounding."""
        size = static(self.geometry.block_size)
        blocks = static(-(-key.shape[2] // size))
        if blocks == 1:
            return []
        # Tokens first, all else features: one matrix product per block for the whole batch.
        signal = torch.stack(self._signals(key, value)).permute(3, 0, 1, 2, 4)
        plan = _plan(*_fields(self.bank), size, blocks, str(key.device), signal.dtype, self.algorithm)
        read = self._direct if isinstance(plan, Direct) else self._recurrent
        readings = read(plan, signal.flatten(1))
        # [point, 2 * batch * head * dim] -> keys and values [batch, head, point, dim]
        pairs = (tuple(one.unflatten(1, signal.shape[1:]).permute(1, 2, 3, 0, 4).unbind(0)) for one in readings)
        return [self.finished(pair, block * size) for block, pair in enumerate(pairs, 1)]

    def _signals(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The signals to compress: keys and values; with `length` also ||k||^2 and ||v|| as their last features."""
        if not self.length:
            return key, value
        squared, norm = key.square().sum(-1, keepdim=True), value.norm(dim=-1, keepdim=True)
        return torch.cat((key, squared), dim=-1), torch.cat((value, norm), dim=-1)

    def finished(self, reading: Reading, seen: int) -> Reading:
        """The reading made of reconstructed signals: rescaled with `length`, with scores under `mass`."""
        if self.length:
            (key, squared), (value, norm) = (part.split((self.geometry.head_dim, 1), dim=-1) for part in reading)
            reading = _lengthened(key, squared.clamp_min(EPSILON).sqrt()), _lengthened(value, norm.clamp_min(0))
        if not self.adds_score:
            return reading
        score = self.log_mass(static(seen), str(reading[0].device))
        return *reading, score[None, None, :, None].expand(len(reading[0]), 1, -1, 1)

    def _direct(self, plan: Direct, signal: Float[Tensor, "token feature"]) -> Sequence[Tensor]:
        """W_i times the raw history: no state, all blocks in parallel."""
        size = static(self.geometry.block_size)
        return _Direct.apply(signal, size, self.detach_every, tuple(plan.weights)).unbind(0)

    def _recurrent(self, plan: Recurrent, signal: Float[Tensor, "token feature"]) -> Sequence[Tensor]:
        """P and K block by block, in float32: bf16 errors would accumulate over blocks."""
        size = static(self.geometry.block_size)
        blocks = static(-(-len(signal) // size)) - 1  # that are read
        with torch.autocast(signal.device.type, enabled=False):
            tokens = signal[: blocks * size].to(plan.projections.dtype).unflatten(0, (blocks, size))
            updates = (plan.projections @ tokens).unbind(0)
            states = [updates[0]]
            for index in range(1, blocks):
                (entering,) = self.cut((states[-1],), index)
                states.append(plan.transitions[index - 1] @ entering + updates[index])
            entering = torch.stack([self.cut((state,), index)[0] for index, state in enumerate(states, 1)])
            return (plan.reconstructions @ entering).to(signal.dtype).unbind(0)

    def adapt(self, state: State) -> tuple[State, str | None]:
        """Low coefficients are a prefix: a lower order keeps them, a higher order appends zeros for the past."""
        had, wanted = state[0].shape[2], self.bank.order
        if had == wanted:
            return state, None
        if had > wanted:
            kept = ElasticState(*(part[:, :, :wanted].clone() for part in state))
            return kept, f"order lowered from {had} to {wanted}: the {had - wanted} highest coefficients were dropped"
        padding = (0, 0, 0, wanted - had)
        padded = ElasticState(*(torch.nn.functional.pad(part, padding) for part in state))
        return (
            padded,
            f"order raised from {had} to {wanted}: tokens read so far stay at order {had}, new ones get {wanted}",
        )


def _lengthened(x: Float[Tensor, "... dim"], length: Float[Tensor, "... 1"]) -> Float[Tensor, "... dim"]:
    return x * (length / x.square().sum(-1, keepdim=True).clamp_min(EPSILON).sqrt())


class _Direct(torch.autograd.Function):
    """Readings of all blocks, stacked: `weights[i-1] @ signal[:i * size]`.

    In the backward pass a block of tokens gets one product with all readings that saw it, which sums over them;
    autograd would compute one product per reading, as long as its history, and sum them in memory.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        signal: Float[Tensor, "token feature"], size: int, detach_every: int | None, weights: tuple[Tensor, ...]
    ) -> Float[Tensor, "reading point feature"]:
        # The backward pass has no autocast, and needs the same types.
        with torch.autocast(signal.device.type, enabled=False):
            return torch.stack([weight @ signal[: index * size] for index, weight in enumerate(weights, 1)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        signal, ctx.size, ctx.detach_every, ctx.weights = inputs  # weights are constants of the plan
        ctx.tokens = len(signal)

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, "reading point feature"]) -> tuple:  # type: ignore[override]
        weights, size, every = ctx.weights, ctx.size, ctx.detach_every
        parts = []
        for block in range(len(weights)):
            # Readings of later blocks, up to the next cut.
            last = len(weights) if every is None else min(len(weights), (block // every + 1) * every - 1)
            seeing = [weight[:, block * size : (block + 1) * size] for weight in weights[block:last]]
            if len(seeing) > 0:
                parts.append(torch.cat(seeing).mT @ gradient[block:last].flatten(0, 1))
            else:
                parts.append(gradient.new_zeros(size, gradient.shape[2]))
        unread = ctx.tokens - len(weights) * size
        parts.append(gradient.new_zeros(unread, gradient.shape[2]))
        return torch.cat(parts), None, None, None


def _fields(bank: Bank) -> tuple[int, int, Any, tuple]:
    return static(bank.order), static(bank.points), bank.sampling, bank.options


# A constant of the compiled graph: building operators is float64 work that must not be traced.
@torch.compiler.assume_constant_result
def _plan(
    order: int, points: int, sampling: Any, options: tuple, size: int, blocks: int, device: str, dtype: torch.dtype,
    algorithm: str | None,
) -> Direct | Recurrent:  # fmt: skip
    bank = Bank(order, points, sampling, options)
    return bank.plan(size, blocks, torch.device(device), dtype, algorithm=algorithm)


@torch.compiler.assume_constant_result
def _log_mass(
    order: int, points: int, sampling: Any, options: tuple, seen: int, device: str
) -> Float[Tensor, " point"]:
    return Bank(order, points, sampling, options).log_mass(seen, device)
