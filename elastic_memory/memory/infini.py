"""Infini-Transformer: keys and values of the history summed into one matrix per head, read by linear attention."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from elastic_memory.common.speedups import find
from elastic_memory.memory.contract import (
    Block,
    Blocks,
    Geometry,
    Heads,
    Host,
    KeyValues,
    MemoryInfo,
    ParallelMemory,
    Reading,
    State,
)
from elastic_memory.memory.tools import full_precision, gated, one_of, real_features, wide
from elastic_memory.shapes import Bool, Float, Tensor

fast = find("infini")

EPSILON = 1e-6  # added to normalisers, which are sums of positive numbers


class InfiniState(NamedTuple):
    """M and z: sums of sigma(k)^T v and of sigma(k)."""

    matrix: Float[Tensor, "batch kv_head dim dim"]
    normaliser: Float[Tensor, "batch kv_head dim"]


def _only_its_own_size(multiple: int, geometry: Geometry) -> None:
    if multiple != 1:
        raise ValueError(f"memory_multiple={multiple}: infini's heads fix the size of its memory: only 1 is possible")


class InfiniMemory(ParallelMemory):
    """Linear attention over all earlier blocks, a gate per head between it and the block's own attention.

    `update`: delta, which first subtracts what the memory already returns, or linear. `memory_norm`: output, a
    gain-free RMSNorm on what is read; qk, on queries and keys, those of the block's own attention too; none.
    `first_gate`: the gates' logits at the start of training. `first_block`: bypass, or zero to let the gate mix in the
    zeros that an empty memory returns. Defaults: choices.md, "Infini-Transformer's norm and gates".
    """

    info = MemoryInfo(
        source="Leave No Context Behind: Infini-attention (arXiv 2404.07143)",
        phrase="keys and values summed into one matrix per head",
        layers=lambda count: list(range(count)),
        order_at=_only_its_own_size,
        paper_floats=lambda matrix, normaliser: matrix,
    )
    no_join: str | None = (
        "the delta rule writes what memory lacks, which depends on all that came before; update='linear' joins"
    )

    def __init__(
        self,
        geometry: Geometry,
        *,
        update: str = "delta",
        memory_norm: str = "none",
        first_gate: float = -3.0,
        first_block: str = "bypass",
        detach_every: int | None = None,
    ):
        super().__init__(geometry, detach_every=detach_every)
        self.update = one_of("update", update, ("delta", "linear"))
        self.memory_norm = one_of("memory_norm", memory_norm, ("output", "qk", "none"))
        self.reads_start = one_of("first_block", first_block, ("bypass", "zero")) == "zero"
        if self.update == "linear":
            self.no_join = None
        self.first_gate = first_gate
        self.gate = nn.Parameter(torch.empty(geometry.heads))
        self.reset()

    def reset(self) -> None:
        """Gates nearly closed: the model begins as one without memory."""
        nn.init.constant_(self.gate, self.first_gate)

    def start(self, batch: int, device: torch.device | str | None = None) -> InfiniState:
        """Zero sums."""
        shape = (batch, self.geometry.kv_heads, self.geometry.head_dim)
        return InfiniState(
            torch.zeros(*shape, self.geometry.head_dim, device=device), torch.zeros(shape, device=device)
        )

    def prepare(
        self, query: Float[Tensor, "batch head token dim"], key: Float[Tensor, "batch kv_head token dim"]
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, normalised if `memory_norm` is qk."""
        return (self._rms(query), self._rms(key)) if self.memory_norm == "qk" else (query, key)

    def read(self, state: State, seen: int, host: Host) -> Reading:
        """Queries use the state as it is."""
        return state

    @full_precision
    def write(self, state: State, block: Block, seen: int) -> InfiniState:
        """z <- z + sum sigma(k); M <- M + sigma(K)^T (V - sigma(K) M / sigma(K) z), or + sigma(K)^T V if linear."""
        matrix, normaliser = state
        feature, value = self._sigma(block.key).to(matrix.dtype), block.value.to(matrix.dtype)
        if self.update == "delta":
            value = value - feature @ matrix / (feature @ normaliser[..., None] + EPSILON)
        return InfiniState(matrix + feature.mT @ value, normaliser + feature.sum(2))

    def join(self, state: State, seen: int, other: State, other_seen: int) -> State:
        """Sums of both (linear rule)."""
        if self.no_join:
            return super().join(state, seen, other, other_seen)
        return InfiniState(*(before + after for before, after in zip(state, other, strict=True)))

    def read_all(self, key: KeyValues, value: KeyValues, host: Host) -> Sequence[Reading]:
        """M <- (I - G) M + U: the d x d matrices G and U of all blocks at once; only M is sequential.

        U = sigma(K)^T V and G = S^T S with S = diag(1 / sqrt(sigma(K) z)) sigma(K), z the normaliser before the block.
        """
        if fast is not None and fast.supports(self.geometry, key, value):
            return fast.read_all(self, key, value)
        size = self.geometry.block_size
        blocks = (key.shape[2] - 1) // size  # nobody reads the last
        with torch.autocast(key.device.type, enabled=False):
            features, values = whole_blocks(self._sigma(key), size), whole_blocks(value, size)
            normalisers = self.normalisers(features.sum(3), blocks)
            features, values, known = features[:, :blocks], values[:, :blocks], None
            updates = product(features.mT, values, key.dtype)
            if self.update == "delta" and blocks:
                before = torch.stack(normalisers[:-1], dim=1)
                scaled = features * ((features * before[..., None, :]).sum(-1, keepdim=True) + EPSILON).rsqrt()
                known = product(scaled.mT, scaled, key.dtype)
            return self.chain(updates, known, normalisers)

    def normalisers(self, sums: Float[Tensor, "batch block kv_head dim"], blocks: int) -> list[Tensor]:
        """z before block 0, 1, ..., `blocks`, from the sums of sigma(k) in each block."""
        normalisers = [self.start(sums.shape[0], sums.device).normaliser.to(sums.dtype)]
        for index, added in enumerate(sums[:, :blocks].unbind(1), 1):
            normalisers += self.cut((normalisers[-1] + added,), index)
        return normalisers

    def chain(self, updates: Tensor, known: Tensor | None, normalisers: list[Tensor]) -> list[Reading]:
        """The readings of all blocks from their U, G (None: linear rule) and z."""
        matrix = self.start(updates.shape[0], updates.device).matrix.to(updates.dtype)
        readings: list[Reading] = [(matrix, normalisers[0])] if self.reads_start else []
        for index in range(len(normalisers) - 1):
            if known is not None:
                matrix = matrix - known[:, index] @ matrix
            (matrix,) = self.cut((matrix + updates[:, index],), index + 1)
            readings.append((matrix, normalisers[index + 1]))
        return readings

    def mix(
        self, local: Heads, query: Heads, rotated: Heads, reading: Reading, visible: Bool[Tensor, "batch column"] | None
    ) -> Heads:
        """y = g sigma(q) M / sigma(q) z + (1 - g) local; no positions."""
        matrix, normaliser = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in reading)
        with torch.autocast(query.device.type, enabled=False):
            feature = self._sigma(query)
            weight = (feature * normaliser[:, :, None]).sum(-1, keepdim=True) + EPSILON
            remembered = product(feature, matrix, query.dtype) / weight
            if self.memory_norm == "output":
                remembered = self._rms(remembered)
            return gated(wide(self.gate), remembered, local, visible)

    def mix_all(self, local: Blocks, query: Blocks, rotated: Blocks, readings: Sequence[Reading]) -> Blocks:
        """`mix` for all blocks, by a kernel where there is one."""
        if fast is not None and fast.supports(self.geometry, query, local):
            return fast.mix_all(self, local, query, readings)
        return super().mix_all(local, query, rotated, readings)

    def _sigma(self, x: Tensor) -> Tensor:
        """ELU(x) + 1, positive; padding stays zero."""
        feature = F.elu(wide(x)) + 1
        if self.geometry.features is None:
            return feature
        return feature * real_features(self.geometry.features, x.shape[-1], x.device)

    def _rms(self, x: Tensor) -> Tensor:
        real = self.geometry.features or self.geometry.head_dim
        square = wide(x).square().sum(-1, keepdim=True) / real
        return (x * (square + 1e-5).rsqrt()).to(x.dtype)


def whole_blocks(x: Float[Tensor, "batch head token dim"], size: int) -> Float[Tensor, "batch block head inner dim"]:
    """Cut into blocks, dropping a short last one, which no later block reads."""
    whole = x.shape[2] // size
    return x[:, :, : whole * size].unflatten(2, (whole, size)).transpose(1, 2)


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A product with operands in the precision of activations; but float16 would overflow in sums over blocks."""
    if dtype == torch.float16:
        dtype = torch.float32
    return wide(left.to(dtype) @ right.to(dtype))
