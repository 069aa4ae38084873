"""Infini-Transformer: keys and values of the history summed into one matrix per head, read by linear attention."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from elastic_memory.fast.kernels import agrees, largest, triton_runs_on
from elastic_memory.memory.contract import (
    Block,
    Floats,
    Geometry,
    Host,
    Memory,
    Reading,
    State,
    full_precision,
    gated,
    one_of,
    real_features,
    wide,
)
from elastic_memory.shapes import Bool, Float, Tensor

EPSILON = 1e-6  # added to normalisers, which are sums of positive numbers


class InfiniState(NamedTuple):
    """M and z: sums of sigma(k)^T v and of sigma(k)."""

    matrix: Float[Tensor, "batch kv_head dim dim"]
    normaliser: Float[Tensor, "batch kv_head dim"]


class InfiniMemory(Memory):
    """Linear attention over all earlier blocks, a gate per head between it and the block's own attention.

    `update`: delta, which first takes off what the memory says already, or linear. `memory_norm`: output, a gain-free
    RMSNorm on what is read; qk, on queries and keys, those of the block's own attention too; none. `first_gate`: the
    gates' logits at the start of training. `first_block`: bypass, or zero to let the gate mix in the zeros that an
    empty memory returns. Defaults: choices.md, "Infini-Transformer's norm and gates".
    """

    source = "Leave No Context Behind: Infini-attention (arXiv 2404.07143)"
    phrase = "keys and values summed into one matrix per head"
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

    @classmethod
    def layers(cls, count: int) -> list[int]:
        """All of them."""
        return list(range(count))

    @classmethod
    def order_at(cls, multiple: int, geometry: Geometry) -> int | None:
        """Its size is that of a head."""
        if multiple != 1:
            raise ValueError(f"memory_multiple={multiple}: infini's memory is as large as its heads, 1 is all there is")
        return None

    @property
    def floats(self) -> Floats:
        """The paper leaves the normaliser out."""
        matrix, normaliser = (part.numel() for part in self.start(1, "meta"))
        return Floats(matrix + normaliser, matrix)

    def reset(self) -> None:
        """Gates nearly closed: the model begins as one without memory."""
        nn.init.constant_(self.gate, self.first_gate)

    def start(self, batch: int, device: torch.device | str | None = None) -> InfiniState:
        """Nothing summed."""
        shape = (batch, self.geometry.kv_heads, self.geometry.head_dim)
        return InfiniState(
            torch.zeros(*shape, self.geometry.head_dim, device=device), torch.zeros(shape, device=device)
        )

    def prepare(
        self, query: Float[Tensor, "batch head token dim"], key: Float[Tensor, "batch kv_head token dim"]
    ) -> tuple[Tensor, Tensor]:
        """Normalised, if `memory_norm` is qk."""
        return (self._rms(query), self._rms(key)) if self.memory_norm == "qk" else (query, key)

    def read(self, state: State, seen: int, host: Host) -> Reading:
        """Queries use the state as it is."""
        return state

    @full_precision
    def write(self, state: State, block: Block, seen: int) -> InfiniState:
        """z <- z + sum sigma(k), and M <- M + sigma(K)^T (V - sigma(K) M / sigma(K) z); if linear, the V alone."""
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

    def read_all(
        self, key: Float[Tensor, "batch kv_head token dim"], value: Float[Tensor, "batch kv_head token dim"], host: Host
    ) -> Sequence[Reading]:
        """M <- (I - G) M + U: the d x d matrices G and U of all blocks at once, so that only they wait for each other.

        U = sigma(K)^T V and G = S^T S with S = diag(1 / sqrt(sigma(K) z)) sigma(K), z the normaliser before the block.
        """
        return self._read_all(key, value, self._kernels(key, value))

    def _read_all(self, key: Tensor, value: Tensor, kernels: Any) -> Sequence[Reading]:
        size, length = self.geometry.block_size, key.shape[2]
        blocks = (length - 1) // size  # the last is read by nobody
        with torch.autocast(key.device.type, enabled=False):
            values = _whole_blocks(value, size)
            features = _whole_blocks(self._sigma(key) if kernels is None else self._narrow_sigma(key), size)
            sums = features.sum(3, dtype=torch.promote_types(features.dtype, torch.float32))
            matrix, normaliser = (part.to(sums.dtype) for part in self.start(key.shape[0], key.device))
            readings: list[Reading] = [(matrix, normaliser)] if self.reads_start else []
            normalisers = [normaliser]
            for index, added in enumerate(sums[:, :blocks].unbind(1), 1):
                normalisers += self.cut((normalisers[-1] + added,), index)

            before = torch.stack(normalisers[:-1], dim=1) if blocks else None
            if kernels is not None and self.update == "delta" and before is not None:
                updates, known = kernels.fold(features, values, before)
                if self.detach_every is None:  # a cut would end gradients inside the chain
                    matrices, start = kernels.chain(known, updates), int(self.reads_start)
                    matrices = F.pad(matrices, (0, 0) * 3 + (start, 0))
                    return _Stacked(matrices, torch.stack(normalisers[1 - start :], dim=1))
            else:
                features, values = features[:, :blocks], values[:, :blocks]
                updates = _product(features.mT, values, key.dtype)
                if self.update == "delta" and before is not None:
                    scaled = features * ((features * before[..., None, :]).sum(-1, keepdim=True) + EPSILON).rsqrt()
                    known = _product(scaled.mT, scaled, key.dtype)
            for index in range(blocks):
                if self.update == "delta":
                    matrix = matrix - known[:, index] @ matrix
                (matrix,) = self.cut((matrix + updates[:, index],), index + 1)
                readings.append((matrix, normalisers[index + 1]))
        return readings

    def mix(
        self,
        local: Float[Tensor, "batch head token dim"],
        query: Float[Tensor, "batch head token dim"],
        rotated: Float[Tensor, "batch head token dim"],
        reading: Reading,
        visible: Bool[Tensor, "batch column"] | None,
    ) -> Float[Tensor, "batch head token dim"]:
        """y = g sigma(q) M / sigma(q) z + (1 - g) local; no positions."""
        matrix, normaliser = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in reading)
        with torch.autocast(query.device.type, enabled=False):
            feature = self._sigma(query)
            weight = (feature * normaliser[:, :, None]).sum(-1, keepdim=True) + EPSILON
            remembered = _product(feature, matrix, query.dtype) / weight
            if self.memory_norm == "output":
                remembered = self._rms(remembered)
            return gated(wide(self.gate), remembered, local, visible)

    def mix_all(
        self,
        local: Float[Tensor, "batch block head token dim"],
        query: Float[Tensor, "batch block head token dim"],
        readings: Sequence[Reading],
    ) -> Float[Tensor, "batch block head token dim"] | None:
        """By a kernel, if there is one that fits."""
        return self._mix_all(local, query, readings, self._kernels(query, local))

    def _mix_all(self, local: Tensor, query: Tensor, readings: Sequence[Reading], kernels: Any) -> Tensor | None:
        if kernels is None:
            return None
        if isinstance(readings, _Stacked):
            matrices, normalisers = readings.parts
        else:
            matrices, normalisers = (torch.stack(parts, dim=1) for parts in zip(*readings, strict=True))
        features, norm = self._narrow_sigma(query), self.memory_norm == "output"
        return kernels.recall(features, local, matrices, normalisers, wide(self.gate), self._real, norm)

    def _kernels(self, *tensors: Tensor) -> Any:
        """Kernels for these tensors, or None."""
        dim, device = tensors[0].shape[-1], tensors[0].device
        if any(x.dtype != torch.bfloat16 for x in tensors) or dim > 128 or dim % 2:
            return None
        if self.geometry.block_size * self.geometry.heads * dim >= 2**31:  # inside a block they count in int32
            return None
        if not _works(str(device), dim):
            return None
        from elastic_memory.fast.kernels import infini

        return infini

    @property
    def _real(self) -> int:
        """Of a head that are not padding."""
        return self.geometry.features or self.geometry.head_dim

    def _sigma(self, x: Tensor) -> Tensor:
        """ELU(x) + 1, positive; padding stays zero."""
        feature = F.elu(wide(x)) + 1
        if self.geometry.features is None:
            return feature
        return feature * real_features(self.geometry.features, x.shape[-1], x.device)

    def _narrow_sigma(self, x: Tensor) -> Tensor:
        real = None if self.geometry.features is None else real_features(self._real, x.shape[-1], x.device)
        result: Tensor = _Sigma.apply(x, real)
        return result

    def _rms(self, x: Tensor) -> Tensor:
        square = wide(x).square().sum(-1, keepdim=True) / self._real
        return (x * (square + 1e-5).rsqrt()).to(x.dtype)


class _Stacked(Sequence[Reading]):
    """Readings of blocks in one tensor each, as kernels make and take them: [batch, block, ...]."""

    def __init__(self, *parts: Tensor):
        self.parts = parts

    def __len__(self) -> int:
        return self.parts[0].shape[1]

    def __getitem__(self, index: Any) -> Any:
        parts = tuple(part[:, index] for part in self.parts)
        return _Stacked(*parts) if isinstance(index, slice) else parts


class _Sigma(torch.autograd.Function):
    """ELU(x) + 1, as narrow as x; its slope is itself where that is below 1, so that x need not be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, real: Tensor | None) -> Tensor:
        precise = wide(x)
        # F.elu takes longer to be exact near zero, where adding 1 would round it anyway.
        feature = torch.where(precise > 0, precise + 1, precise.exp())
        feature = (feature if real is None else feature * real).to(x.dtype)
        ctx.save_for_backward(feature)
        return feature

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (feature,) = ctx.saved_tensors
        return gradient * feature.clamp(max=1), None


def _whole_blocks(x: Float[Tensor, "batch head token dim"], size: int) -> Float[Tensor, "batch block head inner dim"]:
    """Without a last block that is short, which nobody reads."""
    whole = x.shape[2] // size
    return x[:, :, : whole * size].unflatten(2, (whole, size)).transpose(1, 2)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A product with operands as precise as the activations; half precision is not wide enough for sums over blocks."""
    if dtype == torch.float16:
        dtype = torch.float32
    return wide(left.to(dtype) @ right.to(dtype))


@torch.compiler.assume_constant_result
def _works(device: str, dim: int) -> bool:
    return triton_runs_on(torch.device(device)) and _agrees(device, dim)


@lru_cache
def _agrees(device: str, dim: int) -> bool:
    what = f"kernels for Infini-Transformer's heads of {dim}"
    return agrees(what, lambda: _error(torch.device(device), dim), within=2e-2)


def _error(device: torch.device, dim: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Of what two blocks read from memory and all its gradients, by kernels against plain code in float32."""
    return largest(_error_of(norm, device, dim, dtype) for norm in ("output", "none"))


def _error_of(norm: str, device: torch.device, dim: int, dtype: torch.dtype) -> float:
    from elastic_memory.fast.kernels import infini

    size, features = infini.CHUNK + 80, max(dim - 2, 2)
    geometry = Geometry(width=2 * dim, heads=2, kv_heads=1, head_dim=dim, layers=1, block_size=size, features=features)
    memory = InfiniMemory(geometry, memory_norm=norm).to(device)
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((1, 3, 2, size, dim), (1, 3, 2, size, dim), (1, 1, 3 * size, dim), (1, 1, 3 * size, dim))
    drawn = [torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes]
    results = []
    for kernels in (infini, None):
        inputs = [(x if kernels is not None else x.float()).requires_grad_() for x in drawn]
        local, query, key, value = inputs
        readings = memory._read_all(key, value, kernels)
        mixed = memory._mix_all(local, query, readings, kernels)
        if mixed is None:
            rest = [memory.mix(local[:, n], query[:, n], query[:, n], readings[n - 1], None) for n in (1, 2)]
            mixed = torch.stack((local[:, 0], *rest), dim=1)
        weight = torch.linspace(-1, 1, mixed.numel(), device=device).sin().view(mixed.shape).to(mixed.dtype)
        results.append((mixed, *torch.autograd.grad(mixed, (*inputs, memory.gate), weight)))
    return largest((ours.float() - plain).norm() / plain.norm() for ours, plain in zip(*results, strict=True))
