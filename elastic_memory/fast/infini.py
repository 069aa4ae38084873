"""Infini-Transformer's memory in training and long prompts by Triton kernels, checked against plain code before use."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from elastic_memory.fast.kernels import agrees, largest, triton_runs_on
from elastic_memory.memory.contract import Blocks, Geometry, KeyValues, Reading
from elastic_memory.memory.tools import real_features, wide
from elastic_memory.shapes import Tensor


def supports(geometry: Geometry, *tensors: Tensor) -> bool:
    """Whether the kernels support these tensors: bf16, on a GPU where they agree with plain code."""
    dim = tensors[0].shape[-1]
    if any(x.dtype != torch.bfloat16 for x in tensors) or dim > 128 or dim % 2:
        return False
    if geometry.block_size * geometry.heads * dim >= 2**31:  # inside a block they count in int32
        return False
    return _works(str(tensors[0].device), dim)


def read_all(memory: Any, key: KeyValues, value: KeyValues) -> Sequence[Reading]:
    """`InfiniMemory.read_all`."""
    from elastic_memory.fast.kernels import infini
    from elastic_memory.memory.infini import product, whole_blocks

    size = memory.geometry.block_size
    blocks = (key.shape[2] - 1) // size  # nobody reads the last
    with torch.autocast(key.device.type, enabled=False):
        values, features = whole_blocks(value, size), whole_blocks(_sigma(key, memory.geometry), size)
        sums = features.sum(3, dtype=torch.promote_types(features.dtype, torch.float32))
        normalisers = memory.normalisers(sums, blocks)
        known = None
        if memory.update == "delta" and blocks:
            updates, known = infini.fold(features, values, torch.stack(normalisers[:-1], dim=1))
            if memory.detach_every is None:  # a cut would end gradients inside the chain
                matrices, start = infini.chain(known, updates), int(memory.reads_start)
                matrices = F.pad(matrices, (0, 0) * 3 + (start, 0))
                return StackedReadings(matrices, torch.stack(normalisers[1 - start :], dim=1))
        else:
            updates = product(features[:, :blocks].mT, values[:, :blocks], key.dtype)
        readings: Sequence[Reading] = memory.chain(updates, known, normalisers)
        return readings


def mix_all(memory: Any, local: Blocks, query: Blocks, readings: Sequence[Reading]) -> Blocks:
    """`InfiniMemory.mix` for all blocks at once."""
    from elastic_memory.fast.kernels import infini

    if isinstance(readings, StackedReadings):
        matrices, normalisers = readings.parts
    else:
        matrices, normalisers = (torch.stack(parts, dim=1) for parts in zip(*readings, strict=True))
    features, norm = _sigma(query, memory.geometry), memory.memory_norm == "output"
    real = memory.geometry.features or memory.geometry.head_dim
    return infini.mix(features, local, matrices, normalisers, wide(memory.gate), real, norm)


class StackedReadings(Sequence[Reading]):
    """Readings of all blocks, each part in one tensor [batch, block, ...], as kernels return and take them."""

    def __init__(self, *parts: Tensor):
        self.parts = parts

    def __len__(self) -> int:
        return self.parts[0].shape[1]

    def __getitem__(self, index: Any) -> Any:
        parts = tuple(part[:, index] for part in self.parts)
        return StackedReadings(*parts) if isinstance(index, slice) else parts


def _sigma(x: Tensor, geometry: Geometry) -> Tensor:
    """ELU(x) + 1 in the precision of x; padding stays zero."""
    real = None if geometry.features is None else real_features(geometry.features, x.shape[-1], x.device)
    result: Tensor = _Sigma.apply(x, real)
    return result


class _Sigma(torch.autograd.Function):
    """ELU(x) + 1, zero where not `real`. Its derivative is itself where that is below 1, so that x need not be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, real: Tensor | None) -> Tensor:
        precise = wide(x)
        # F.elu takes longer to be exact near zero, where adding 1 would round it anyway.
        feature = torch.where(precise > 0, precise + 1, precise.exp())
        feature = (feature if real is None else feature * real).to(x.dtype)
        ctx.save_for_backward(feature)
        return feature

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (feature,) = ctx.saved_tensors
        return gradient * feature.clamp(max=1), None


@torch.compiler.assume_constant_result
def _works(device: str, dim: int) -> bool:
    return triton_runs_on(torch.device(device)) and _agrees(device, dim)


@lru_cache
def _agrees(device: str, dim: int) -> bool:
    what = f"kernels for Infini-Transformer's heads of {dim}"
    return agrees(what, lambda: _error(torch.device(device), dim), within=2e-2)


def _error(device: torch.device, dim: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Relative error of kernels against plain code in float32: what two blocks read, and all its gradients."""
    return largest(_error_of(norm, device, dim, dtype) for norm in ("output", "none"))


def _error_of(norm: str, device: torch.device, dim: int, dtype: torch.dtype) -> float:
    from elastic_memory.fast.kernels import infini
    from elastic_memory.memory.infini import InfiniMemory

    size, features = infini.CHUNK + 80, max(dim - 2, 2)
    geometry = Geometry(width=2 * dim, heads=2, kv_heads=1, head_dim=dim, layers=1, block_size=size, features=features)
    memory = InfiniMemory(geometry, memory_norm=norm).to(device)
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((1, 3, 2, size, dim), (1, 3, 2, size, dim), (1, 1, 3 * size, dim), (1, 1, 3 * size, dim))
    drawn = [torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes]

    def by_kernels(local: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return mix_all(memory, local, query, read_all(memory, key, value))

    def plain(local: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        readings = memory.read_all(key, value, None)  # type: ignore[arg-type]
        mixed = [memory.mix(local[:, n], query[:, n], query[:, n], readings[n - 1], None) for n in (1, 2)]
        return torch.stack((local[:, 0], *mixed), dim=1)

    results = []
    for function, inputs in ((by_kernels, drawn), (plain, [x.float() for x in drawn])):
        inputs = [x.requires_grad_() for x in inputs]
        mixed = function(*inputs)
        weight = torch.linspace(-1, 1, mixed.numel(), device=device).sin().view(mixed.shape).to(mixed.dtype)
        results.append((mixed, *torch.autograd.grad(mixed, (*inputs, memory.gate), weight)))
    return largest((ours.float() - exact).norm() / exact.norm() for ours, exact in zip(*results, strict=True))
