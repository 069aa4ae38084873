"""Infini-Transformer's memory in training: what all blocks read and what they add, without anything written in between.

Plain code passes over queries, keys, values and what is read a dozen times in float32; here they are read once in the
forward pass and once or twice in the backward pass, and features, weights and norms exist only inside a program.
Operations of their own, so that compiled graphs can hold them.

A program loops over tokens of one block in one head: a chunk of them, or all where it sums them up. Tensors of tokens
may be strided, except along the last axis.
"""

# Constants of the compiled program are in capitals, as Triton has it.
# ruff: noqa: N803

from typing import Any

import torch
import triton
import triton.language as tl

from elastic_memory.shapes import Float, Tensor

EPSILON = tl.constexpr(1e-6)  # of normalisers
NORM_EPSILON = tl.constexpr(1e-5)
CHUNK = 512  # tokens of a program that sums nothing up


def recall(
    query: Float[Tensor, "batch block head token dim"],
    local: Float[Tensor, "batch block head token dim"],
    matrix: Float[Tensor, "batch read kv_head dim dim"],
    normaliser: Float[Tensor, "batch read kv_head dim"],
    gate: Float[Tensor, " head"],
    features: int,
    norm: bool,
) -> Float[Tensor, "batch block head token dim"]:
    """local + g (sigma(q) M / sigma(q) z - local), what is read normalised if `norm`; first blocks without M: local."""
    return _recall(query, local, matrix, normaliser, gate, features, norm)


def fold(
    key: Float[Tensor, "batch head block token dim"],
    value: Float[Tensor, "batch head block token dim"],
    normaliser: Float[Tensor, "batch head folded dim"],
    features: int,
) -> tuple[Float[Tensor, "batch head folded dim dim"], Float[Tensor, "batch head folded dim dim"]]:
    """U = sigma(K)^T V and G = sigma(K)^T diag(1 / sigma(K) z) sigma(K) of each block that has a z, from before it.

    Others are left out here, as cutting them off would cost a copy of their gradients.
    """
    return _fold(key, value, normaliser, features)


def _sizes(dim: int, features: int, tile: int, warps: int, stages: int = 2) -> dict[str, int]:
    """Callers choose a tile of tokens, warps and stages so that on Hopper nothing leaves the registers."""
    width = max(16, triton.next_power_of_2(dim))
    return {"DIM": dim, "REAL": features, "WIDTH": width, "TILE": tile, "num_warps": warps, "num_stages": stages}


def _laid_out(x: Tensor) -> Tensor:
    """[batch, block, head, token, dim], heads of a token side by side as projections want them."""
    batch, blocks, heads, tokens, dim = x.shape
    return x.new_empty(batch, blocks, tokens, heads, dim).transpose(2, 3)


def _strided(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("elastic_memory::infini_recall", mutates_args=())
def _recall(
    query: Tensor, local: Tensor, matrix: Tensor, normaliser: Tensor, gate: Tensor, features: int, norm: bool
) -> Tensor:
    query, local, normaliser = _strided(query), _strided(local), normaliser.contiguous()
    batch, blocks, heads, tokens, dim = query.shape
    mixed, known = _laid_out(local), matrix.to(query.dtype).contiguous()
    with torch.cuda.device_of(query):
        _recall_kernel[(batch * blocks * heads, triton.cdiv(tokens, CHUNK))](
            query, local, known, normaliser, gate, mixed, *query.stride()[:4], *local.stride()[:4],
            *mixed.stride()[:4], blocks, heads, matrix.shape[2], blocks - matrix.shape[1], tokens, NORM=norm,
            CHUNK=CHUNK, **_sizes(dim, features, 64, 4),
        )  # fmt: skip
    return mixed


@torch.library.custom_op("elastic_memory::infini_recall_backward", mutates_args=())
def _recall_backward(
    gradient: Tensor, query: Tensor, local: Tensor, matrix: Tensor, normaliser: Tensor, gate: Tensor, features: int,
    norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients; of matrix and normaliser for each head that reads, of normaliser and gate for each chunk."""
    gradient, query, local, normaliser = _strided(gradient), _strided(query), _strided(local), normaliser.contiguous()
    batch, blocks, heads, tokens, dim = query.shape
    reads, kv_heads, chunks = *matrix.shape[1:3], triton.cdiv(tokens, CHUNK)
    of_query, of_local, of_product = _laid_out(query), _laid_out(local), _laid_out(query)
    known = matrix.to(query.dtype).contiguous()
    of_matrix = normaliser.new_empty(batch, reads, heads, dim, dim)
    of_normaliser = normaliser.new_empty(batch, reads, heads, chunks, dim)
    of_gate = normaliser.new_empty(batch, blocks, heads, chunks)
    with torch.cuda.device_of(query):
        _recall_slopes[(batch * blocks * heads, chunks)](
            gradient, query, local, known, normaliser, gate, of_query, of_local, of_product, of_normaliser, of_gate,
            *gradient.stride()[:4], *query.stride()[:4], *local.stride()[:4], *of_query.stride()[:4],
            blocks, heads, kv_heads, blocks - reads, tokens, NORM=norm, CHUNK=CHUNK, **_sizes(dim, features, 32, 4),
        )  # fmt: skip
        _recall_matrix_slopes[(batch * reads * heads,)](
            query, of_product, of_matrix, *query.stride()[:4], *of_product.stride()[:4], blocks, heads, blocks - reads,
            tokens, **_sizes(dim, features, 64, 8),
        )  # fmt: skip
    return of_query, of_local, of_matrix, of_normaliser, of_gate


@torch.library.custom_op("elastic_memory::infini_fold", mutates_args=())
def _fold(key: Tensor, value: Tensor, normaliser: Tensor, features: int) -> tuple[Tensor, Tensor]:
    key, value, normaliser = _strided(key), _strided(value), normaliser.contiguous()
    batch, heads, folded, dim = normaliser.shape
    added, known = (normaliser.new_empty(batch, heads, folded, dim, dim) for _ in range(2))
    with torch.cuda.device_of(key):
        _fold_kernel[(batch * heads * folded,)](
            key, value, normaliser, added, known, *key.stride()[:4], *value.stride()[:4], heads, folded, key.shape[3],
            **_sizes(dim, features, 64, 16, stages=3),
        )  # fmt: skip
    return added, known


@torch.library.custom_op("elastic_memory::infini_fold_backward", mutates_args=())
def _fold_backward(
    of_added: Tensor, of_known: Tensor, key: Tensor, value: Tensor, normaliser: Tensor, features: int
) -> tuple[Tensor, Tensor, Tensor]:
    key, value, normaliser = _strided(key), _strided(value), normaliser.contiguous()
    batch, heads, blocks, tokens, dim = key.shape
    of_key, of_value = (_laid_out(x.transpose(1, 2)).transpose(1, 2) for x in (key, value))
    folded, chunks, twice = normaliser.shape[2], triton.cdiv(tokens, CHUNK), of_known + of_known.mT
    of_normaliser = normaliser.new_empty(batch, heads, folded, chunks, dim)
    with torch.cuda.device_of(key):
        _fold_slopes[(batch * heads * blocks, chunks)](
            of_added.to(key.dtype).contiguous(), twice.to(key.dtype).contiguous(), key, value, normaliser,
            of_key, of_value, of_normaliser, *key.stride()[:4], *value.stride()[:4], *of_key.stride()[:4],
            heads, blocks, folded, tokens, CHUNK=CHUNK, **_sizes(dim, features, 32, 4, stages=1),
        )  # fmt: skip
    return of_key, of_value, of_normaliser


@_recall.register_fake
def _(query: Tensor, local: Tensor, *_: Any) -> Tensor:
    return _laid_out(local)


@_recall_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, local: Tensor, matrix: Tensor, normaliser: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    batch, blocks, heads, tokens, dim = query.shape
    reads, chunks = matrix.shape[1], triton.cdiv(tokens, CHUNK)
    of_matrix = normaliser.new_empty(batch, reads, heads, dim, dim)
    of_normaliser = normaliser.new_empty(batch, reads, heads, chunks, dim)
    of_gate = normaliser.new_empty(batch, blocks, heads, chunks)
    return _laid_out(query), _laid_out(local), of_matrix, of_normaliser, of_gate


@_fold.register_fake
def _(key: Tensor, value: Tensor, normaliser: Tensor, features: int) -> tuple[Tensor, Tensor]:
    added, known = (normaliser.new_empty(*normaliser.shape, normaliser.shape[-1]) for _ in range(2))
    return added, known


@_fold_backward.register_fake
def _(
    of_added: Tensor, of_known: Tensor, key: Tensor, value: Tensor, normaliser: Tensor, features: int
) -> tuple[Tensor, Tensor, Tensor]:
    of_key, of_value = (_laid_out(x.transpose(1, 2)).transpose(1, 2) for x in (key, value))
    chunks = triton.cdiv(key.shape[3], CHUNK)
    return of_key, of_value, normaliser.new_empty(*normaliser.shape[:3], chunks, normaliser.shape[3])


def _remember(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.settings = [x for x in inputs if not isinstance(x, Tensor)]


def _recall_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: recomputation unpacks them a single time
    matrix, gate = saved[2], saved[4]
    *of_tokens, of_matrix, of_normaliser, of_gate = _recall_backward(gradient, *saved, *ctx.settings)
    of_matrix, of_normaliser = (x.unflatten(2, (matrix.shape[2], -1)).sum(3) for x in (of_matrix, of_normaliser.sum(3)))
    return *of_tokens, of_matrix, of_normaliser, of_gate.sum((0, 1, 3)).to(gate.dtype), None, None


def _fold_gradients(ctx: Any, of_added: Tensor, of_known: Tensor) -> tuple[Tensor | None, ...]:
    of_key, of_value, of_normaliser = _fold_backward(of_added, of_known, *ctx.saved_tensors, *ctx.settings)
    return of_key, of_value, of_normaliser.sum(3), None


_recall.register_autograd(_recall_gradients, setup_context=_remember)
_fold.register_autograd(_fold_gradients, setup_context=_remember)


@triton.jit
def _sigma(x, real):
    """ELU + 1, and zero where nothing is; its slope is itself, where that is below 1, and 1 elsewhere."""
    wide = x.to(tl.float32)
    return tl.where(real, tl.where(wide > 0, wide + 1, tl.exp(wide)), 0.0).to(x.dtype)


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(x, y):
    """Of the rows of both: together, as warps wait for each other in every sum."""
    return tl.reduce((x, y), 1, _both)


@triton.jit
def _scale(weight, square, NORM: tl.constexpr, REAL: tl.constexpr):
    """What a row of sigma(q) M, whose squares sum up to `square`, is multiplied by.

    Divided by the weight sigma(q) z; normalised after that, the weight matters only to the epsilon.
    """
    if NORM:
        return tl.rsqrt(square / REAL + NORM_EPSILON * weight * weight)
    return 1 / weight


@triton.jit
def _real(column, DIM: tl.constexpr, REAL: tl.constexpr):
    """Which features are not padding, which stands behind either half of a head."""
    return (column < DIM) & (column % (DIM // 2) < REAL // 2)


@triton.jit
def _square(matrix, column, there, DIM: tl.constexpr):
    """A matrix of a head, or zeros if it is not there."""
    inside = (column < DIM) & there
    at = matrix + column[:, None] * DIM + column[None, :]
    return tl.load(at, mask=inside[:, None] & inside[None, :], other=0.0)


@triton.jit
def _reading(matrix, normaliser, gate, reads, head, heads, kv_heads, column, there, DIM: tl.constexpr):
    """M and z of a head, and how far its gate is open; a block without a reading reads zeros by a closed one."""
    which = reads * kv_heads + head // (heads // kv_heads)
    z = tl.load(normaliser + which * DIM + column, mask=(column < DIM) & there, other=0.0)
    known = _square(matrix + which * DIM * DIM, column, there, DIM)
    return known, z, tl.where(there, tl.sigmoid(tl.load(gate + head).to(tl.float32)), 0.0)


@triton.jit
def _recall_kernel(
    query, local, matrix, normaliser, gate, mixed, q0, q1, q2, q3, l0, l1, l2, l3, m0, m1, m2, m3,
    blocks, heads, kv_heads, first, tokens, NORM: tl.constexpr, CHUNK: tl.constexpr,
    DIM: tl.constexpr, REAL: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK
    batch, block, head = row // heads // blocks, row // heads % blocks, row % heads
    column = tl.arange(0, WIDTH)
    real = _real(column, DIM, REAL)
    query += batch * q0 + block * q1 + head * q2
    local += batch * l0 + block * l1 + head * l2
    mixed += batch * m0 + block * m1 + head * m2
    reads = batch * (blocks - first) + block - first
    known, z, openness = _reading(matrix, normaliser, gate, reads, head, heads, kv_heads, column, block >= first, DIM)
    for start in range(begin, tl.minimum(begin + CHUNK, tokens), TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (column < DIM)[None, :]
        x = tl.load(query + token[:, None] * q3 + column[None, :], mask=inside, other=0.0)
        feature = _sigma(x, inside & real[None, :])
        product = tl.dot(feature, known, input_precision="ieee")
        weight = tl.sum(feature.to(tl.float32) * z[None, :], 1) + EPSILON
        read = product * _scale(weight, tl.sum(product * product, 1), NORM, REAL)[:, None]
        own = tl.load(local + token[:, None] * l3 + column[None, :], mask=inside, other=0.0).to(tl.float32)
        own += openness * (read - own)
        tl.store(mixed + token[:, None] * m3 + column[None, :], own.to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def _recall_slopes(
    gradient, query, local, matrix, normaliser, gate, of_query, of_local, of_product, of_normaliser, of_gate,
    g0, g1, g2, g3, q0, q1, q2, q3, l0, l1, l2, l3, o0, o1, o2, o3, blocks, heads, kv_heads, first, tokens,
    NORM: tl.constexpr, CHUNK: tl.constexpr,
    DIM: tl.constexpr, REAL: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK
    batch, block, head = row // heads // blocks, row // heads % blocks, row % heads
    column = tl.arange(0, WIDTH)
    real = _real(column, DIM, REAL)
    gradient += batch * g0 + block * g1 + head * g2
    query += batch * q0 + block * q1 + head * q2
    local += batch * l0 + block * l1 + head * l2
    of_query += batch * o0 + block * o1 + head * o2
    of_local += batch * o0 + block * o1 + head * o2
    of_product += batch * o0 + block * o1 + head * o2
    there = block >= first
    reads = batch * (blocks - first) + block - first
    known, z, openness = _reading(matrix, normaliser, gate, reads, head, heads, kv_heads, column, there, DIM)
    of_z, of_openness = tl.zeros([WIDTH], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(begin, tl.minimum(begin + CHUNK, tokens), TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (column < DIM)[None, :]
        x = tl.load(query + token[:, None] * q3 + column[None, :], mask=inside, other=0.0)
        feature = _sigma(x, inside & real[None, :])
        slope = tl.load(gradient + token[:, None] * g3 + column[None, :], mask=inside, other=0.0).to(tl.float32)
        own = tl.load(local + token[:, None] * l3 + column[None, :], mask=inside, other=0.0).to(tl.float32)
        product = tl.dot(feature, known, input_precision="ieee")
        wide = feature.to(tl.float32)
        weight, square = _sums(wide * z[None, :], product * product)
        weight += EPSILON
        scale = _scale(weight, square, NORM, REAL)
        read = product * scale[:, None]
        along, of_row = _sums(read * slope, (read - own) * slope)
        of_openness += of_row
        along *= openness
        of_read = openness * slope
        if NORM:
            of_read -= read * (along / REAL)[:, None]
            of_weight = -NORM_EPSILON * weight * scale * scale * along
        else:
            of_weight = -scale * along
        of_read = (of_read * scale[:, None]).to(known.dtype)
        at = token[:, None] * o3 + column[None, :]
        tl.store(of_product + at, of_read, mask=inside)
        tl.store(of_local + at, ((1 - openness) * slope).to(of_local.dtype.element_ty), mask=inside)
        of_feature = tl.dot(of_read, tl.trans(known), input_precision="ieee") + of_weight[:, None] * z[None, :]
        of_z += tl.sum(wide * of_weight[:, None], 0)
        of_x = of_feature * tl.minimum(wide, 1.0)
        tl.store(of_query + at, of_x.to(of_query.dtype.element_ty), mask=inside)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    tl.store(of_gate + row * chunks + chunk, tl.sum(of_openness) * openness * (1 - openness))
    if there:
        tl.store(of_normaliser + ((reads * heads + head) * chunks + chunk) * DIM + column, of_z, mask=column < DIM)


@triton.jit
def _recall_matrix_slopes(
    query, of_product, of_matrix, q0, q1, q2, q3, p0, p1, p2, p3, blocks, heads, first, tokens,
    DIM: tl.constexpr, REAL: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of its own, as a matrix summed up leaves no registers for the rest."""
    row = tl.program_id(0).to(tl.int64)
    reads, head = row // heads, row % heads
    batch, block = reads // (blocks - first), reads % (blocks - first) + first
    column = tl.arange(0, WIDTH)
    real = _real(column, DIM, REAL)
    query += batch * q0 + block * q1 + head * q2
    of_product += batch * p0 + block * p1 + head * p2
    of_known = tl.zeros([WIDTH, WIDTH], tl.float32)
    for start in range(0, tokens, TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (column < DIM)[None, :]
        x = tl.load(query + token[:, None] * q3 + column[None, :], mask=inside, other=0.0)
        slope = tl.load(of_product + token[:, None] * p3 + column[None, :], mask=inside, other=0.0)
        of_known = tl.dot(tl.trans(_sigma(x, inside & real[None, :])), slope, of_known, input_precision="ieee")
    at = row * DIM * DIM + column[:, None] * DIM + column[None, :]
    tl.store(of_matrix + at, of_known, mask=(column < DIM)[:, None] & (column < DIM)[None, :])


@triton.jit
def _fold_kernel(
    key, value, normaliser, added, known, k0, k1, k2, k3, v0, v1, v2, v3, heads, folded, tokens,
    DIM: tl.constexpr, REAL: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, head, block = row // folded // heads, row // folded % heads, row % folded
    column = tl.arange(0, WIDTH)
    real = _real(column, DIM, REAL)
    key += batch * k0 + head * k1 + block * k2
    value += batch * v0 + head * v1 + block * v2
    z = tl.load(normaliser + row * DIM + column, mask=column < DIM, other=0.0)
    sum_added, sum_known = tl.zeros([WIDTH, WIDTH], tl.float32), tl.zeros([WIDTH, WIDTH], tl.float32)
    for start in range(0, tokens, TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (column < DIM)[None, :]
        x = tl.load(key + token[:, None] * k3 + column[None, :], mask=inside, other=0.0)
        feature = _sigma(x, inside & real[None, :])
        wide = feature.to(tl.float32)
        scaled = (wide / (tl.sum(wide * z[None, :], 1) + EPSILON)[:, None]).to(feature.dtype)
        turned = tl.trans(feature)
        own = tl.load(value + token[:, None] * v3 + column[None, :], mask=inside, other=0.0)
        sum_added = tl.dot(turned, own, sum_added, input_precision="ieee")
        sum_known = tl.dot(turned, scaled, sum_known, input_precision="ieee")
    at = row * DIM * DIM + column[:, None] * DIM + column[None, :]
    inside = (column < DIM)[:, None] & (column < DIM)[None, :]
    tl.store(added + at, sum_added, mask=inside)
    tl.store(known + at, sum_known, mask=inside)


@triton.jit
def _fold_slopes(
    of_added, twice_known, key, value, normaliser, of_key, of_value, of_normaliser,
    k0, k1, k2, k3, v0, v1, v2, v3, o0, o1, o2, o3, heads, blocks, folded, tokens,
    CHUNK: tl.constexpr, DIM: tl.constexpr, REAL: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`twice_known` is the gradient of G plus its transpose: G is symmetric in what it is made of."""
    row, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK
    batch, head, block = row // blocks // heads, row // blocks % heads, row % blocks
    column = tl.arange(0, WIDTH)
    real = _real(column, DIM, REAL)
    key += batch * k0 + head * k1 + block * k2
    value += batch * v0 + head * v1 + block * v2
    of_key += batch * o0 + head * o1 + block * o2
    of_value += batch * o0 + head * o1 + block * o2
    there = block < folded  # gradients of others are zero, as is all they are made of
    own_row = row // blocks * folded + block
    z = tl.load(normaliser + own_row * DIM + column, mask=(column < DIM) & there, other=0.0)
    slope = _square(of_added + own_row * DIM * DIM, column, there, DIM)
    twice = _square(twice_known + own_row * DIM * DIM, column, there, DIM)
    of_z = tl.zeros([WIDTH], tl.float32)
    for start in range(begin, tl.minimum(begin + CHUNK, tokens), TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (column < DIM)[None, :]
        x = tl.load(key + token[:, None] * k3 + column[None, :], mask=inside, other=0.0)
        own = tl.load(value + token[:, None] * v3 + column[None, :], mask=inside, other=0.0)
        feature = _sigma(x, inside & real[None, :])
        at = token[:, None] * o3 + column[None, :]
        of_own = tl.dot(feature, slope, input_precision="ieee")
        tl.store(of_value + at, of_own.to(of_value.dtype.element_ty), mask=inside)
        wide = feature.to(tl.float32)
        turned = tl.dot(feature, twice, input_precision="ieee")
        weight, along = _sums(wide * z[None, :], wide * turned)
        share = 1 / (weight + EPSILON)
        of_weight = -0.5 * share * share * along
        of_z += tl.sum(wide * of_weight[:, None], 0)
        of_feature = tl.dot(own, tl.trans(slope), input_precision="ieee")
        of_feature += share[:, None] * turned + of_weight[:, None] * z[None, :]
        of_x = of_feature * tl.minimum(wide, 1.0)
        tl.store(of_key + at, of_x.to(of_key.dtype.element_ty), mask=inside)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    if there:
        tl.store(of_normaliser + (own_row * chunks + chunk) * DIM + column, of_z, mask=column < DIM)
