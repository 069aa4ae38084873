"""Infini-Transformer's memory in training: what all blocks read and what they add, as operations of torch.

Plain code passes over queries, keys, values and what is read a dozen times in float32. Here tokens have the precision
of activations, and the programs of `infini_programs.py` pass over them once or twice. They are registered as custom
operations, so that compiled graphs can hold them.

Tensors of tokens may be strided, except along the last axis. Gradients are laid out with the heads of a token side by
side, as projections need them.

torch.compile caches graphs on disk and knows operations by name: an operation whose meaning changes needs a new name.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton

from elastic_memory.fast.kernels.infini_programs import (
    chain_kernel,
    fold_gradient_kernel,
    fold_kernel,
    matrix_gradient_kernel,
    mix_gradient_kernel,
    mix_kernel,
)
from elastic_memory.shapes import Float, Tensor

TILE = 64  # tokens at a time
CHUNK = 1024  # tokens of a program
COLUMNS = 16  # of a matrix, where one program goes from block to block
# Launch options, tuned on an H200 within the shared memory of an A100. FOLD has enough warps to keep two matrices in
# registers.
MIX = {"num_warps": 4, "num_stages": 1}
MIX_GRADIENT = {"num_warps": 4, "num_stages": 1}
MATRIX_GRADIENT = {"num_warps": 4, "num_stages": 3}
FOLD = {"num_warps": 8, "num_stages": 3}
FOLD_GRADIENT = {"num_warps": 4, "num_stages": 1}
CHAIN = {"num_warps": 4, "num_stages": 1}


def mix(
    feature: Float[Tensor, "batch block head token dim"],
    local: Float[Tensor, "batch block head token dim"],
    matrix: Float[Tensor, "batch read kv_head dim dim"],
    normaliser: Float[Tensor, "batch read kv_head dim"],
    gate: Float[Tensor, " head"],
    real: int,
    norm: bool,
) -> Float[Tensor, "batch block head token dim"]:
    """local + g (r - local) with r = sigma(q) M / sigma(q) z, normalised if `norm`; `local` in first blocks without M.

    `feature` is sigma(q), zero beyond the `real` features of a head.
    """
    (blocks, heads), (reads, kv_heads) = feature.shape[1:3], matrix.shape[1:3]
    # Plain code for the small matrices: torch.compile fuses it.
    matrix, normaliser = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (matrix, normaliser))
    first = blocks - reads
    matrix, normaliser = F.pad(matrix, (0, 0) * 3 + (first, 0)), F.pad(normaliser, (0, 0) * 2 + (first, 0))
    return _mix(feature, local, matrix, normaliser, gate, first, real, norm)


def fold(
    feature: Float[Tensor, "batch block head token dim"],
    value: Float[Tensor, "batch block head token dim"],
    normaliser: Float[Tensor, "batch folded head dim"],
) -> tuple[Float[Tensor, "batch folded head dim dim"], Float[Tensor, "batch folded head dim dim"]]:
    """U = sigma(K)^T V and G = sigma(K)^T diag(1 / sigma(K) z) sigma(K) of each block, z from before the block.

    Blocks beyond the last z are ignored: slicing them off would copy their gradients.
    """
    return _fold(feature, value, normaliser)


def chain(
    known: Float[Tensor, "batch folded head dim dim"], added: Float[Tensor, "batch folded head dim dim"]
) -> Float[Tensor, "batch folded head dim dim"]:
    """M <- (I - G) M + U from zeros on: M after each block."""
    return _chain(known, added)


def _sizes(dim: int) -> dict[str, int]:
    return {"DIM": dim, "WIDTH": max(16, triton.next_power_of_2(dim))}


def _laid_out(x: Tensor) -> Tensor:
    """An empty [batch, block, head, token, dim], with the heads of a token side by side in memory."""
    batch, blocks, heads, tokens, dim = x.shape
    return x.new_empty(batch, blocks, tokens, heads, dim).transpose(2, 3)


def _strided(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("elastic_memory::infini_mix", mutates_args=())
def _mix(
    feature: Tensor, local: Tensor, matrix: Tensor, normaliser: Tensor, gate: Tensor, first: int, real: int, norm: bool
) -> Tensor:
    """`matrix` and `normaliser` are of each head of each block, zeros before the `first` that reads."""
    feature, local, mixed = _strided(feature), _strided(local), _laid_out(local)
    batch, blocks, heads, tokens, dim = local.shape
    with torch.cuda.device_of(local):
        mix_kernel[(batch * blocks * heads, triton.cdiv(tokens, CHUNK))](
            feature, local, matrix.contiguous(), normaliser.contiguous(), gate, mixed, *feature.stride()[:4],
            *local.stride()[:4], *mixed.stride()[:4], blocks, heads, first, tokens, NORM=norm, REAL=real, CHUNK=CHUNK,
            TILE=TILE, **_sizes(dim), **MIX,
        )  # fmt: skip
    return mixed


@torch.library.custom_op("elastic_memory::infini_mix_backward", mutates_args=())
def _mix_backward(
    gradient: Tensor, feature: Tensor, local: Tensor, matrix: Tensor, normaliser: Tensor, gate: Tensor, first: int,
    real: int, norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gradient, feature, local = _strided(gradient), _strided(feature), _strided(local)
    of_feature, of_local, of_product = (_laid_out(local) for _ in range(3))
    (batch, blocks, heads, tokens, dim), rows = local.shape, local.shape[:3].numel()
    of_weight = normaliser.new_empty(batch, blocks, heads, tokens)
    of_gate = normaliser.new_empty(batch, blocks, heads, triton.cdiv(tokens, CHUNK))
    of_matrix, of_normaliser = normaliser.new_empty(matrix.shape), normaliser.new_empty(normaliser.shape)
    with torch.cuda.device_of(local):
        mix_gradient_kernel[(rows, of_gate.shape[-1])](
            gradient, feature, local, matrix.contiguous(), normaliser.contiguous(), gate, of_feature, of_local,
            of_product, of_weight, of_gate, *gradient.stride()[:4], *feature.stride()[:4], *local.stride()[:4],
            *of_local.stride()[:4], blocks, heads, first, tokens, NORM=norm, REAL=real, CHUNK=CHUNK, TILE=TILE,
            **_sizes(dim), **MIX_GRADIENT,
        )  # fmt: skip
        matrix_gradient_kernel[(rows,)](
            feature, of_product, of_weight, of_matrix, of_normaliser, *feature.stride()[:4], *of_product.stride()[:4],
            blocks, heads, tokens, TILE=TILE, **_sizes(dim), **MATRIX_GRADIENT,
        )  # fmt: skip
    return of_feature, of_local, of_matrix, of_normaliser, of_gate.sum((0, 1, 3))


@torch.library.custom_op("elastic_memory::infini_fold", mutates_args=())
def _fold(feature: Tensor, value: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    feature, value, normaliser = _strided(feature), _strided(value), normaliser.contiguous()
    batch, folded, heads, dim = normaliser.shape
    added, known = (normaliser.new_empty(batch, folded, heads, dim, dim) for _ in range(2))
    with torch.cuda.device_of(value):
        fold_kernel[(batch * folded * heads,)](
            feature, value, normaliser, added, known, *feature.stride()[:4], *value.stride()[:4], heads, folded,
            feature.shape[3], TILE=TILE, **_sizes(dim), **FOLD,
        )  # fmt: skip
    return added, known


@torch.library.custom_op("elastic_memory::infini_fold_backward", mutates_args=())
def _fold_backward(
    of_added: Tensor, of_known: Tensor, feature: Tensor, value: Tensor, normaliser: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`of_known` is the gradient of G plus its transpose: G is symmetric in what it is made of."""
    feature, value, normaliser = _strided(feature), _strided(value), normaliser.contiguous()
    of_feature, of_value = _laid_out(feature), _laid_out(value)
    (batch, blocks, heads, tokens, dim), folded = feature.shape, normaliser.shape[1]
    chunks = triton.cdiv(tokens, CHUNK)
    of_normaliser = normaliser.new_empty(batch, folded, heads, chunks, dim)
    with torch.cuda.device_of(feature):
        fold_gradient_kernel[(batch * blocks * heads, chunks)](
            of_added.contiguous(), of_known.contiguous(), feature, value, normaliser, of_feature, of_value,
            of_normaliser, *feature.stride()[:4], *value.stride()[:4], *of_value.stride()[:4], blocks, heads, folded,
            tokens, CHUNK=CHUNK, TILE=TILE, **_sizes(dim), **FOLD_GRADIENT,
        )  # fmt: skip
    return of_feature, of_value, of_normaliser.sum(3)


@torch.library.custom_op("elastic_memory::infini_chain", mutates_args=())
def _chain(known: Tensor, added: Tensor) -> Tensor:
    return _chained(known, added, back=False)


@torch.library.custom_op("elastic_memory::infini_chain_backward", mutates_args=())
def _chain_backward(gradient: Tensor, known: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of M, and so of U, goes to the M before it by (I - G)^T: the same chain backwards."""
    of_added = _chained(known, gradient, back=True)
    before = F.pad(matrices[:, :-1], (0, 0) * 3 + (1, 0))
    return -(of_added @ before.mT), of_added


def _chained(known: Tensor, added: Tensor, back: bool) -> Tensor:
    known, added = (known.mT if back else known).contiguous(), added.contiguous()
    (batch, count, heads, dim, _), matrices = known.shape, torch.empty_like(added)
    with torch.cuda.device_of(known):
        chain_kernel[(batch * heads, triton.cdiv(dim, COLUMNS))](
            known, added, matrices, heads, count, BACK=back, COLUMNS=COLUMNS, **_sizes(dim), **CHAIN
        )
    return matrices


@_chain.register_fake
def _(known: Tensor, added: Tensor) -> Tensor:
    return added.new_empty(added.shape)


@_chain_backward.register_fake
def _(gradient: Tensor, known: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
    return known.new_empty(known.shape), known.new_empty(known.shape)


@_mix.register_fake
def _(feature: Tensor, local: Tensor, *_: Any) -> Tensor:
    return _laid_out(local)


@_mix_backward.register_fake
def _(
    gradient: Tensor, feature: Tensor, local: Tensor, matrix: Tensor, normaliser: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    matrices = normaliser.new_empty(matrix.shape), normaliser.new_empty(normaliser.shape)
    return _laid_out(feature), _laid_out(local), *matrices, normaliser.new_empty(local.shape[2])


@_fold.register_fake
def _(feature: Tensor, value: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    added, known = (normaliser.new_empty(*normaliser.shape, normaliser.shape[-1]) for _ in range(2))
    return added, known


@_fold_backward.register_fake
def _(
    of_added: Tensor, of_known: Tensor, feature: Tensor, value: Tensor, normaliser: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _laid_out(feature), _laid_out(value), normaliser.new_empty(normaliser.shape)


def _remember(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.settings = [x for x in inputs if not isinstance(x, Tensor)]


def _mix_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: recomputation unpacks them a single time
    *others, of_gate = _mix_backward(gradient, *saved, *ctx.settings)
    return *others, of_gate.to(saved[-1].dtype), None, None, None


def _fold_gradients(ctx: Any, of_added: Tensor, of_known: Tensor) -> tuple[Tensor, ...]:
    return _fold_backward(of_added, of_known + of_known.mT, *ctx.saved_tensors)


def _remember_chain(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _chain_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return _chain_backward(gradient, *ctx.saved_tensors)


_chain.register_autograd(_chain_gradients, setup_context=_remember_chain)
_mix.register_autograd(_mix_gradients, setup_context=_remember)
_fold.register_autograd(_fold_gradients, setup_context=_remember)
