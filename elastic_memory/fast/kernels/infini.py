"""Infini-Transformer's memory in training: what all blocks read and what they add.

Plain code passes over queries, keys, values and what is read a dozen times in float32. Here tokens are as narrow as
activations, and kernels pass over them once or twice: what is divided and normalised exists only inside, and so do
products with a head's matrices. These take 64 tokens at a time: then Hopper's tensor cores have the matrices in shared
memory and a row in one warp, where fewer tokens leave a kernel so few registers that it waits for memory instead of
keeping it busy. A matrix that is summed up needs them all, in a kernel of its own. Operations of their own, so that
compiled graphs can hold them.

A program takes some tokens of one block in one head, or all where it sums them up. Tensors of tokens may be strided,
except along the last axis; gradients have heads of a token side by side, as projections want them.

Torch keeps compiled graphs on disk and knows operations by name: one that comes to mean something else needs another.
"""

# Constants of the compiled program are in capitals, as Triton has it.
# ruff: noqa: N803

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from elastic_memory.shapes import Float, Tensor

EPSILON = tl.constexpr(1e-6)  # of normalisers
NORM_EPSILON = tl.constexpr(1e-5)
TILE = 64  # tokens at a time
CHUNK = 1024  # tokens of a program
COLUMNS = 16  # of a matrix, where one program goes from block to block
# Of each kernel, as an H200 likes it, in shared memory that an A100 has too; folding has as many warps as keep two
# matrices in registers.
RECALL = {"num_warps": 4, "num_stages": 1}
RECALL_SLOPES = {"num_warps": 4, "num_stages": 1}
MATRIX_SLOPES = {"num_warps": 4, "num_stages": 3}
FOLD = {"num_warps": 8, "num_stages": 3}
FOLD_SLOPES = {"num_warps": 4, "num_stages": 1}
LINKS = {"num_warps": 4, "num_stages": 1}


def recall(
    feature: Float[Tensor, "batch block head token dim"],
    local: Float[Tensor, "batch block head token dim"],
    matrix: Float[Tensor, "batch read kv_head dim dim"],
    normaliser: Float[Tensor, "batch read kv_head dim"],
    gate: Float[Tensor, " head"],
    real: int,
    norm: bool,
) -> Float[Tensor, "batch block head token dim"]:
    """local + g (sigma(q) M / sigma(q) z - local), what is read normalised if `norm`; first blocks without M: local.

    `feature` is sigma(q), zero beyond the `real` features of a head.
    """
    (blocks, heads), (reads, kv_heads) = feature.shape[1:3], matrix.shape[1:3]
    # What is made of matrices is made by plain code, which a compiler joins.
    matrix, normaliser = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (matrix, normaliser))
    first = blocks - reads
    matrix, normaliser = F.pad(matrix, (0, 0) * 3 + (first, 0)), F.pad(normaliser, (0, 0) * 2 + (first, 0))
    return _recall(feature, local, matrix, normaliser, gate, first, real, norm)


def fold(
    feature: Float[Tensor, "batch block head token dim"],
    value: Float[Tensor, "batch block head token dim"],
    normaliser: Float[Tensor, "batch folded head dim"],
) -> tuple[Float[Tensor, "batch folded head dim dim"], Float[Tensor, "batch folded head dim dim"]]:
    """U = sigma(K)^T V and G = sigma(K)^T diag(1 / sigma(K) z) sigma(K) of each block that has a z, from before it.

    Others are left out here, as cutting them off would cost a copy of their gradients.
    """
    return _fold(feature, value, normaliser)


def chain(
    known: Float[Tensor, "batch folded head dim dim"], added: Float[Tensor, "batch folded head dim dim"]
) -> Float[Tensor, "batch folded head dim dim"]:
    """M <- (I - G) M + U, from zeros on: all the matrices on the way."""
    return _chain(known, added)


def _sizes(dim: int) -> dict[str, int]:
    return {"DIM": dim, "WIDTH": max(16, triton.next_power_of_2(dim))}


def _laid_out(x: Tensor) -> Tensor:
    """[batch, block, head, token, dim], heads of a token side by side."""
    batch, blocks, heads, tokens, dim = x.shape
    return x.new_empty(batch, blocks, tokens, heads, dim).transpose(2, 3)


def _strided(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("elastic_memory::infini_recall", mutates_args=())
def _recall(
    feature: Tensor, local: Tensor, matrix: Tensor, normaliser: Tensor, gate: Tensor, first: int, real: int, norm: bool
) -> Tensor:
    """`matrix` and `normaliser` are of each head of each block, zeros before the `first` that reads."""
    feature, local, mixed = _strided(feature), _strided(local), _laid_out(local)
    batch, blocks, heads, tokens, dim = local.shape
    with torch.cuda.device_of(local):
        _recall_kernel[(batch * blocks * heads, triton.cdiv(tokens, CHUNK))](
            feature, local, matrix.contiguous(), normaliser.contiguous(), gate, mixed, *feature.stride()[:4],
            *local.stride()[:4], *mixed.stride()[:4], blocks, heads, first, tokens, NORM=norm, REAL=real, CHUNK=CHUNK,
            TILE=TILE, **_sizes(dim), **RECALL,
        )  # fmt: skip
    return mixed


@torch.library.custom_op("elastic_memory::infini_recall_backward", mutates_args=())
def _recall_backward(
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
        _recall_slopes[(rows, of_gate.shape[-1])](
            gradient, feature, local, matrix.contiguous(), normaliser.contiguous(), gate, of_feature, of_local,
            of_product, of_weight, of_gate, *gradient.stride()[:4], *feature.stride()[:4], *local.stride()[:4],
            *of_local.stride()[:4], blocks, heads, first, tokens, NORM=norm, REAL=real, CHUNK=CHUNK, TILE=TILE,
            **_sizes(dim), **RECALL_SLOPES,
        )  # fmt: skip
        _matrix_slopes[(rows,)](
            feature, of_product, of_weight, of_matrix, of_normaliser, *feature.stride()[:4], *of_product.stride()[:4],
            blocks, heads, tokens, TILE=TILE, **_sizes(dim), **MATRIX_SLOPES,
        )  # fmt: skip
    return of_feature, of_local, of_matrix, of_normaliser, of_gate.sum((0, 1, 3))


@torch.library.custom_op("elastic_memory::infini_fold", mutates_args=())
def _fold(feature: Tensor, value: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    feature, value, normaliser = _strided(feature), _strided(value), normaliser.contiguous()
    batch, folded, heads, dim = normaliser.shape
    added, known = (normaliser.new_empty(batch, folded, heads, dim, dim) for _ in range(2))
    with torch.cuda.device_of(value):
        _fold_kernel[(batch * folded * heads,)](
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
        _fold_slopes[(batch * blocks * heads, chunks)](
            of_added.contiguous(), of_known.contiguous(), feature, value, normaliser, of_feature, of_value,
            of_normaliser, *feature.stride()[:4], *value.stride()[:4], *of_value.stride()[:4], blocks, heads, folded,
            tokens, CHUNK=CHUNK, TILE=TILE, **_sizes(dim), **FOLD_SLOPES,
        )  # fmt: skip
    return of_feature, of_value, of_normaliser.sum(3)


@torch.library.custom_op("elastic_memory::infini_chain", mutates_args=())
def _chain(known: Tensor, added: Tensor) -> Tensor:
    return _links(known, added, back=False)


@torch.library.custom_op("elastic_memory::infini_chain_backward", mutates_args=())
def _chain_backward(gradient: Tensor, known: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """What reaches a matrix, and so U, goes on to the one before by (I - G)^T: the same chain, from its end on."""
    of_added = _links(known, gradient, back=True)
    before = F.pad(matrices[:, :-1], (0, 0) * 3 + (1, 0))
    return -(of_added @ before.mT), of_added


def _links(known: Tensor, added: Tensor, back: bool) -> Tensor:
    known, added = (known.mT if back else known).contiguous(), added.contiguous()
    (batch, count, heads, dim, _), matrices = known.shape, torch.empty_like(added)
    with torch.cuda.device_of(known):
        _links_kernel[(batch * heads, triton.cdiv(dim, COLUMNS))](
            known, added, matrices, heads, count, BACK=back, COLUMNS=COLUMNS, **_sizes(dim), **LINKS
        )
    return matrices


@_chain.register_fake
def _(known: Tensor, added: Tensor) -> Tensor:
    return added.new_empty(added.shape)


@_chain_backward.register_fake
def _(gradient: Tensor, known: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
    return known.new_empty(known.shape), known.new_empty(known.shape)


@_recall.register_fake
def _(feature: Tensor, local: Tensor, *_: Any) -> Tensor:
    return _laid_out(local)


@_recall_backward.register_fake
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


def _recall_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: recomputation unpacks them a single time
    *others, of_gate = _recall_backward(gradient, *saved, *ctx.settings)
    return *others, of_gate.to(saved[-1].dtype), None, None, None


def _fold_gradients(ctx: Any, of_added: Tensor, of_known: Tensor) -> tuple[Tensor, ...]:
    return _fold_backward(of_added, of_known + of_known.mT, *ctx.saved_tensors)


def _remember_chain(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _chain_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return _chain_backward(gradient, *ctx.saved_tensors)


_chain.register_autograd(_chain_gradients, setup_context=_remember_chain)
_recall.register_autograd(_recall_gradients, setup_context=_remember)
_fold.register_autograd(_fold_gradients, setup_context=_remember)


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(x, y):
    """Of the rows of both: together, so that both have the layout that products leave."""
    return tl.reduce((x, y), 1, _both)


@triton.jit
def _place(row, blocks, heads, s0, s1, s2):
    """Where a block of a head begins: its row counts through rows of a batch, their blocks, and the heads of those."""
    return row // heads // blocks * s0 + row // heads % blocks * s1 + row % heads * s2


@triton.jit
def _square(matrix, row, column, there, DIM: tl.constexpr):
    """A matrix of a head, or zeros if it is not there."""
    inside = (column < DIM) & there
    at = (row * DIM + column[:, None]) * DIM + column[None, :]
    return tl.load(matrix + at, mask=inside[:, None] & inside[None, :], other=0.0)


@triton.jit
def _open(gate, row, blocks, heads, first):
    """How far a gate is: that of a block that reads nothing is closed."""
    return tl.where(row // heads % blocks >= first, tl.sigmoid(tl.load(gate + row % heads).to(tl.float32)), 0.0)


@triton.jit
def _scale(weight, square, NORM: tl.constexpr, REAL: tl.constexpr):
    """What a row of sigma(q) M, whose squares sum up to `square`, is multiplied by.

    It is divided by the weight sigma(q) z; normalised after that, the weight matters only to the epsilon.
    """
    return tl.rsqrt(square / REAL + NORM_EPSILON * weight * weight) if NORM else 1 / weight


@triton.jit
def _recall_kernel(
    feature, local, matrix, normaliser, gate, mixed, f0, f1, f2, f3, l0, l1, l2, l3, m0, m1, m2, m3,
    blocks, heads, first, tokens, NORM: tl.constexpr, REAL: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, begin, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK, tl.arange(0, WIDTH)
    feature += _place(row, blocks, heads, f0, f1, f2)
    local += _place(row, blocks, heads, l0, l1, l2)
    mixed += _place(row, blocks, heads, m0, m1, m2)
    openness = _open(gate, row, blocks, heads, first)
    z = tl.load(normaliser + row * DIM + column, mask=column < DIM, other=0.0)
    known = _square(matrix, row, column, True, DIM).to(feature.dtype.element_ty)
    for start in range(begin, tl.minimum(begin + CHUNK, tokens), TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (column < DIM)[None, :]
        x = tl.load(feature + token[:, None] * f3 + column[None, :], mask=inside, other=0.0)
        own = tl.load(local + token[:, None] * l3 + column[None, :], mask=inside, other=0.0)
        product = tl.dot(x, known)
        weight, square = _sums(x.to(tl.float32) * z[None, :], product * product)
        scale = openness * _scale(weight + EPSILON, square, NORM, REAL)
        both = (1 - openness) * own.to(tl.float32) + scale[:, None] * product
        tl.store(mixed + token[:, None] * m3 + column[None, :], both.to(x.dtype), mask=inside)


@triton.jit
def _recall_slopes(
    gradient, feature, local, matrix, normaliser, gate, of_feature, of_local, of_product, of_weight, of_gate,
    g0, g1, g2, g3, f0, f1, f2, f3, l0, l1, l2, l3, o0, o1, o2, o3, blocks, heads, first, tokens,
    NORM: tl.constexpr, REAL: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, begin, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK, tl.arange(0, WIDTH)
    gradient += _place(row, blocks, heads, g0, g1, g2)
    feature += _place(row, blocks, heads, f0, f1, f2)
    local += _place(row, blocks, heads, l0, l1, l2)
    to = _place(row, blocks, heads, o0, o1, o2)
    of_feature, of_local, of_product = of_feature + to, of_local + to, of_product + to
    openness = _open(gate, row, blocks, heads, first)
    z = tl.load(normaliser + row * DIM + column, mask=column < DIM, other=0.0)
    known = _square(matrix, row, column, True, DIM).to(feature.dtype.element_ty)
    of_openness = tl.zeros([TILE], tl.float32)
    for start in range(begin, tl.minimum(begin + CHUNK, tokens), TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (column < DIM)[None, :]
        x = tl.load(feature + token[:, None] * f3 + column[None, :], mask=inside, other=0.0)
        slope = tl.load(gradient + token[:, None] * g3 + column[None, :], mask=inside, other=0.0)
        own = tl.load(local + token[:, None] * l3 + column[None, :], mask=inside, other=0.0)
        at = token[:, None] * o3 + column[None, :]
        tl.store(of_local + at, ((1 - openness) * slope.to(tl.float32)).to(x.dtype), mask=inside)
        of_openness -= tl.sum(own.to(tl.float32) * slope.to(tl.float32), 1)
        product = tl.dot(x, known)
        weight, square = _sums(x.to(tl.float32) * z[None, :], product * product)
        weight += EPSILON
        scale = _scale(weight, square, NORM, REAL)
        along = scale * tl.sum(product * slope.to(tl.float32), 1)
        of_openness += along
        along *= openness
        if NORM:
            turn = scale * scale * along
            of_row = -NORM_EPSILON * weight * turn
            turn /= REAL
        else:
            turn = 0.0 * scale
            of_row = -scale * along
        change = (openness * scale)[:, None] * slope.to(tl.float32) - turn[:, None] * product
        tl.store(of_product + at, change.to(x.dtype), mask=inside)
        tl.store(of_weight + row * tokens + token, of_row, mask=token < tokens)
        of_x = tl.dot(change.to(x.dtype), tl.trans(known)) + of_row[:, None] * z[None, :]
        tl.store(of_feature + at, of_x.to(x.dtype), mask=inside)
    of_openness *= openness * (1 - openness)
    tl.store(of_gate + row * tl.num_programs(1) + tl.program_id(1), tl.sum(of_openness))


@triton.jit
def _matrix_slopes(
    feature, of_product, of_weight, of_matrix, of_normaliser, f0, f1, f2, f3, p0, p1, p2, p3, blocks, heads, tokens,
    TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    feature += _place(row, blocks, heads, f0, f1, f2)
    of_product += _place(row, blocks, heads, p0, p1, p2)
    of_known, of_z = tl.zeros([WIDTH, WIDTH], tl.float32), tl.zeros([TILE, WIDTH], tl.float32)
    for start in range(0, tokens, TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (column < DIM)[None, :]
        x = tl.load(feature + token[:, None] * f3 + column[None, :], mask=inside, other=0.0)
        slope = tl.load(of_product + token[:, None] * p3 + column[None, :], mask=inside, other=0.0)
        of_row = tl.load(of_weight + row * tokens + token, mask=token < tokens, other=0.0)
        of_known = tl.dot(tl.trans(x), slope, of_known)
        of_z += x.to(tl.float32) * of_row[:, None]
    inside = column < DIM
    at = (row * DIM + column[:, None]) * DIM + column[None, :]
    tl.store(of_matrix + at, of_known, mask=inside[:, None] & inside[None, :])
    tl.store(of_normaliser + row * DIM + column, tl.sum(of_z, 0), mask=inside)


@triton.jit
def _fold_kernel(
    feature, value, normaliser, added, known, f0, f1, f2, f3, v0, v1, v2, v3, heads, folded, tokens,
    TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    feature += _place(row, folded, heads, f0, f1, f2)
    value += _place(row, folded, heads, v0, v1, v2)
    z = tl.load(normaliser + row * DIM + column, mask=column < DIM, other=0.0)
    sum_added, sum_known = tl.zeros([WIDTH, WIDTH], tl.float32), tl.zeros([WIDTH, WIDTH], tl.float32)
    for start in range(0, tokens, TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (column < DIM)[None, :]
        x = tl.load(feature + token[:, None] * f3 + column[None, :], mask=inside, other=0.0)
        own = tl.load(value + token[:, None] * v3 + column[None, :], mask=inside, other=0.0)
        wide, turned = x.to(tl.float32), tl.trans(x)
        scaled = (wide / (tl.sum(wide * z[None, :], 1) + EPSILON)[:, None]).to(x.dtype)
        sum_added = tl.dot(turned, own, sum_added)
        sum_known = tl.dot(turned, scaled, sum_known)
    inside = column < DIM
    at = (row * DIM + column[:, None]) * DIM + column[None, :]
    tl.store(added + at, sum_added, mask=inside[:, None] & inside[None, :])
    tl.store(known + at, sum_known, mask=inside[:, None] & inside[None, :])


@triton.jit
def _fold_slopes(
    of_added, of_known, feature, value, normaliser, of_feature, of_value, of_normaliser,
    f0, f1, f2, f3, v0, v1, v2, v3, o0, o1, o2, o3, blocks, heads, folded, tokens,
    CHUNK: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, begin, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK, tl.arange(0, WIDTH)
    there, own_row = row // heads % blocks < folded, _place(row, blocks, heads, folded * heads, heads, 1)
    feature += _place(row, blocks, heads, f0, f1, f2)
    value += _place(row, blocks, heads, v0, v1, v2)
    to = _place(row, blocks, heads, o0, o1, o2)
    of_feature, of_value = of_feature + to, of_value + to
    z = tl.load(normaliser + own_row * DIM + column, mask=(column < DIM) & there, other=0.0)
    added = _square(of_added, own_row, column, there, DIM).to(feature.dtype.element_ty)
    twice = _square(of_known, own_row, column, there, DIM).to(feature.dtype.element_ty)
    of_z = tl.zeros([WIDTH], tl.float32)
    for start in range(begin, tl.minimum(begin + CHUNK, tokens), TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (column < DIM)[None, :]
        x = tl.load(feature + token[:, None] * f3 + column[None, :], mask=inside, other=0.0)
        own = tl.load(value + token[:, None] * v3 + column[None, :], mask=inside, other=0.0)
        wide, slope = x.to(tl.float32), tl.dot(x, twice)
        weight, along = _sums(wide * z[None, :], wide * slope)
        share = 1 / (weight + EPSILON)
        of_weight = -0.5 * share * share * along
        of_z += tl.sum(wide * of_weight[:, None], 0)
        slope = tl.dot(own, tl.trans(added), share[:, None] * slope + of_weight[:, None] * z[None, :])
        at = token[:, None] * o3 + column[None, :]
        tl.store(of_feature + at, slope.to(x.dtype), mask=inside)
        tl.store(of_value + at, tl.dot(x, added).to(x.dtype), mask=inside)
    tile = own_row * tl.num_programs(1) + tl.program_id(1)
    tl.store(of_normaliser + tile * DIM + column, of_z, mask=(column < DIM) & there)


@triton.jit
def _links_kernel(
    known, added, matrices, heads, count,
    BACK: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's matrices, which need no others. Backwards it is the next one's G."""
    row = tl.program_id(0).to(tl.int64)
    begin, head = row // heads * count, row % heads
    line, column = tl.arange(0, WIDTH), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (line < DIM)[:, None] & (column < DIM)[None, :]
    matrix = tl.zeros([WIDTH, COLUMNS], tl.float32)
    for step in range(count):
        index = count - 1 - step if BACK else step
        other = tl.minimum(index + 1, count - 1) if BACK else index  # at the end there is no matrix yet
        own = _square(known, (begin + other) * heads + head, line, True, DIM)
        place = (((begin + index) * heads + head) * DIM + line[:, None]) * DIM + column[None, :]
        more = tl.load(added + place, mask=inside, other=0.0)
        matrix += more - tl.dot(own, matrix)  # in TF32, as training has products of float32
        tl.store(matrices + place, matrix, mask=inside)
