"""Infini-Transformer's memory in training: what all blocks read and what they add.

Plain code passes over queries, keys, values and what is read a dozen times in float32. Here tokens are as narrow as
activations: products are torch's, and what stands between two of them is one kernel that reads and writes each number
once; weights and norms exist only inside. With the products inside too there would be fewer passes, but matrices of a
head leave a kernel so few registers that it waits for memory instead of keeping it busy. Where a block is summed up
it pays, as little is written. Operations of their own, so that compiled graphs can hold them.

A program takes some tokens of one block in one head, or all where it sums them up. Tensors that come and go may be
strided, except along the last axis; those in between are contiguous, a block of a head after the other.
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
TILE = 64  # tokens of a program


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


def _sizes(dim: int, features: int) -> dict[str, int]:
    return {"DIM": dim, "REAL": features, "WIDTH": max(16, triton.next_power_of_2(dim)), "TILE": TILE, "num_warps": 8}


def _laid_out(x: Tensor) -> Tensor:
    """[batch, block, head, token, dim], heads of a token side by side as projections want them."""
    batch, blocks, heads, tokens, dim = x.shape
    return x.new_empty(batch, blocks, tokens, heads, dim).transpose(2, 3)


def _strided(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _contiguous(x: Tensor, features: int | None = None) -> Tensor:
    """sigma(x), or x itself, with its axes in order."""
    x, (batch, first, second, tokens, dim) = _strided(x), x.shape
    result, sizes = x.new_empty(x.shape), _sizes(dim, features or dim)
    with torch.cuda.device_of(x):
        _copy[(batch * first * second, triton.cdiv(tokens, TILE))](
            x, result, *x.stride()[:4], first, second, tokens, SIGMA=features is not None, **sizes
        )
    return result


def _times(left: Tensor, right: Tensor, wide: bool = False) -> Tensor:
    """Products of matrices, one for each block of a head; in float32 if `wide`."""
    left, right, shape = left.flatten(0, 2), right.flatten(0, 2), left.shape[:3]
    # On GPUs alone torch makes float32 of narrower numbers; the interpreter's are that wide.
    product = torch.bmm(left, right, out_dtype=torch.float32) if wide and left.is_cuda else torch.bmm(left, right)
    return product.unflatten(0, shape)


def _read(query: Tensor, matrix: Tensor, features: int) -> tuple[Tensor, Tensor, Tensor]:
    """sigma(q) of the blocks that read, a matrix for each of their heads, and the products of both."""
    feature = _contiguous(query[:, query.shape[1] - matrix.shape[1] :], features)
    known = matrix.to(query.dtype).repeat_interleave(query.shape[2] // matrix.shape[2], dim=2)
    return feature, known, _times(feature, known)


@torch.library.custom_op("elastic_memory::infini_recall", mutates_args=())
def _recall(
    query: Tensor, local: Tensor, matrix: Tensor, normaliser: Tensor, gate: Tensor, features: int, norm: bool
) -> Tensor:
    local, normaliser = _strided(local), normaliser.contiguous()
    batch, blocks, heads, tokens, dim = query.shape
    feature, _, product = _read(query, matrix, features)
    mixed = _laid_out(local)
    with torch.cuda.device_of(query):
        _combine[(batch * blocks * heads, triton.cdiv(tokens, TILE))](
            local, feature, product, normaliser, gate, mixed, *local.stride()[:4], *mixed.stride()[:4], blocks, heads,
            matrix.shape[2], blocks - matrix.shape[1], tokens, NORM=norm, **_sizes(dim, features),
        )  # fmt: skip
    return mixed


@torch.library.custom_op("elastic_memory::infini_recall_backward", mutates_args=())
def _recall_backward(
    gradient: Tensor, query: Tensor, local: Tensor, matrix: Tensor, normaliser: Tensor, gate: Tensor, features: int,
    norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients; of matrix and normaliser for each head that reads, of normaliser and gate for each program."""
    gradient, local, normaliser = _strided(gradient), _strided(local), normaliser.contiguous()
    batch, blocks, heads, tokens, dim = query.shape
    reads, kv_heads, tiles = *matrix.shape[1:3], triton.cdiv(tokens, TILE)
    feature, known, product = _read(query, matrix, features)
    of_query, of_local, of_product = _laid_out(query), _laid_out(local), torch.empty_like(product)
    of_weight = normaliser.new_empty(batch, reads, heads, tokens)
    of_normaliser = normaliser.new_empty(batch, reads, heads, tiles, dim)
    of_gate = normaliser.new_empty(batch, blocks, heads, tiles)
    grid, sizes = (batch * blocks * heads, tiles), _sizes(dim, features)
    with torch.cuda.device_of(query):
        _slopes[grid](
            gradient, local, feature, product, normaliser, gate, of_local, of_product, of_weight, of_gate,
            *gradient.stride()[:4], *local.stride()[:4], *of_local.stride()[:4], blocks, heads, kv_heads,
            blocks - reads, tokens, NORM=norm, **sizes,
        )  # fmt: skip
        of_matrix, of_feature = _times(feature.mT, of_product, wide=True), _times(of_product, known.mT)
        _query_slopes[grid](
            of_feature, feature, of_weight, normaliser, of_query, of_normaliser, *of_query.stride()[:4], blocks, heads,
            kv_heads, blocks - reads, tokens, **sizes,
        )  # fmt: skip
    return of_query, of_local, of_matrix, of_normaliser, of_gate


@torch.library.custom_op("elastic_memory::infini_fold", mutates_args=())
def _fold(key: Tensor, value: Tensor, normaliser: Tensor, features: int) -> tuple[Tensor, Tensor]:
    key, value, normaliser = _strided(key), _strided(value), normaliser.contiguous()
    batch, heads, folded, dim = normaliser.shape
    added, known = (normaliser.new_empty(batch, heads, folded, dim, dim) for _ in range(2))
    # As many warps as on Hopper keep both sums in registers.
    with torch.cuda.device_of(key):
        _fold_kernel[(batch * heads * folded,)](
            key, value, normaliser, added, known, *key.stride()[:4], *value.stride()[:4], heads, folded, key.shape[3],
            **_sizes(dim, features) | {"num_warps": 16, "num_stages": 3},
        )  # fmt: skip
    return added, known


@torch.library.custom_op("elastic_memory::infini_fold_backward", mutates_args=())
def _fold_backward(
    of_added: Tensor, of_known: Tensor, key: Tensor, value: Tensor, normaliser: Tensor, features: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients; of normaliser for each program. G is symmetric in what it is made of: its gradient comes twice."""
    normaliser = normaliser.contiguous()
    batch, heads, blocks, tokens, dim = key.shape
    folded, tiles = normaliser.shape[2], triton.cdiv(tokens, TILE)
    missing = (0, 0, 0, 0, 0, blocks - folded)
    of_added, twice = (F.pad(x.to(key.dtype), missing) for x in (of_added, of_known + of_known.mT))
    feature, own = _contiguous(key, features), _contiguous(value)
    both = _times(feature, torch.cat((of_added, twice), dim=-1))
    of_feature = _times(own, of_added.mT)
    of_key = _laid_out(key.transpose(1, 2)).transpose(1, 2)
    of_normaliser = normaliser.new_empty(batch, heads, folded, tiles, dim)
    with torch.cuda.device_of(key):
        _key_slopes[(batch * heads * blocks, tiles)](
            both, of_feature, feature, normaliser, of_key, of_normaliser, *of_key.stride()[:4], heads, blocks, folded,
            tokens, **_sizes(dim, features),
        )  # fmt: skip
    return of_key, both[..., :dim], of_normaliser


@_recall.register_fake
def _(query: Tensor, local: Tensor, *_: Any) -> Tensor:
    return _laid_out(local)


@_recall_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, local: Tensor, matrix: Tensor, normaliser: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    batch, blocks, heads, tokens, dim = query.shape
    reads, tiles = matrix.shape[1], triton.cdiv(tokens, TILE)
    of_matrix = normaliser.new_empty(batch, reads, heads, dim, dim)
    of_normaliser = normaliser.new_empty(batch, reads, heads, tiles, dim)
    of_gate = normaliser.new_empty(batch, blocks, heads, tiles)
    return _laid_out(query), _laid_out(local), of_matrix, of_normaliser, of_gate


@_fold.register_fake
def _(key: Tensor, value: Tensor, normaliser: Tensor, features: int) -> tuple[Tensor, Tensor]:
    added, known = (normaliser.new_empty(*normaliser.shape, normaliser.shape[-1]) for _ in range(2))
    return added, known


@_fold_backward.register_fake
def _(
    of_added: Tensor, of_known: Tensor, key: Tensor, value: Tensor, normaliser: Tensor, features: int
) -> tuple[Tensor, Tensor, Tensor]:
    of_key, dim = _laid_out(key.transpose(1, 2)).transpose(1, 2), key.shape[-1]
    of_value = value.new_empty(*value.shape[:-1], 2 * dim)[..., :dim]
    tiles = triton.cdiv(key.shape[3], TILE)
    return of_key, of_value, normaliser.new_empty(*normaliser.shape[:3], tiles, normaliser.shape[3])


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
def _place(row, first, second, s0, s1, s2):
    """Where a block of a head begins: its row counts through three axes, of which the last two have these sizes."""
    return row // second // first * s0 + row // second % first * s1 + row % second * s2


@triton.jit
def _tile(tokens, DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The program's tokens, the columns of a head, and which of both there are."""
    token, column = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    return token, column, (token < tokens)[:, None] & (column < DIM)[None, :]


@triton.jit
def _reading(normaliser, row, blocks, heads, kv_heads, first, column, DIM: tl.constexpr):
    """Whether a block reads, its row among those that do, and z; of one that does not, zeros."""
    batch, block, head = row // heads // blocks, row // heads % blocks, row % heads
    there, reads = block >= first, batch * (blocks - first) + block - first
    which = reads * kv_heads + head // (heads // kv_heads)
    z = tl.load(normaliser + which * DIM + column, mask=(column < DIM) & there, other=0.0)
    return there, reads * heads + head, z


@triton.jit
def _copy(
    x, result, x0, x1, x2, x3, first, second, tokens, SIGMA: tl.constexpr,
    DIM: tl.constexpr, REAL: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token, column, inside = _tile(tokens, DIM, WIDTH, TILE)
    at = _place(row, first, second, x0, x1, x2) + token[:, None] * x3 + column[None, :]
    own = tl.load(x + at, mask=inside, other=0.0)
    if SIGMA:
        own = _sigma(own, inside & _real(column, DIM, REAL)[None, :])
    tl.store(result + (row * tokens + token[:, None]) * DIM + column[None, :], own, mask=inside)


@triton.jit
def _combine(
    local, feature, product, normaliser, gate, mixed, l0, l1, l2, l3, m0, m1, m2, m3,
    blocks, heads, kv_heads, first, tokens, NORM: tl.constexpr,
    DIM: tl.constexpr, REAL: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """local + g (read - local); a block that reads nothing has a closed gate."""
    row = tl.program_id(0).to(tl.int64)
    token, column, inside = _tile(tokens, DIM, WIDTH, TILE)
    there, own_row, z = _reading(normaliser, row, blocks, heads, kv_heads, first, column, DIM)
    openness = tl.where(there, tl.sigmoid(tl.load(gate + row % heads).to(tl.float32)), 0.0)
    at = (own_row * tokens + token[:, None]) * DIM + column[None, :]
    wide = tl.load(feature + at, mask=inside & there, other=0.0).to(tl.float32)
    read = tl.load(product + at, mask=inside & there, other=0.0).to(tl.float32)
    beside = _place(row, blocks, heads, l0, l1, l2) + token[:, None] * l3 + column[None, :]
    own = tl.load(local + beside, mask=inside, other=0.0).to(tl.float32)
    weight, square = _sums(wide * z[None, :], read * read)
    read *= _scale(weight + EPSILON, square, NORM, REAL)[:, None]
    own += openness * (read - own)
    to = _place(row, blocks, heads, m0, m1, m2) + token[:, None] * m3 + column[None, :]
    tl.store(mixed + to, own.to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def _slopes(
    gradient, local, feature, product, normaliser, gate, of_local, of_product, of_weight, of_gate,
    g0, g1, g2, g3, l0, l1, l2, l3, o0, o1, o2, o3, blocks, heads, kv_heads, first, tokens, NORM: tl.constexpr,
    DIM: tl.constexpr, REAL: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of `_combine`: of what it mixes, and of the weights it divides by."""
    row = tl.program_id(0).to(tl.int64)
    token, column, inside = _tile(tokens, DIM, WIDTH, TILE)
    there, own_row, z = _reading(normaliser, row, blocks, heads, kv_heads, first, column, DIM)
    openness = tl.where(there, tl.sigmoid(tl.load(gate + row % heads).to(tl.float32)), 0.0)
    at = (own_row * tokens + token[:, None]) * DIM + column[None, :]
    wide = tl.load(feature + at, mask=inside & there, other=0.0).to(tl.float32)
    read = tl.load(product + at, mask=inside & there, other=0.0).to(tl.float32)
    above = _place(row, blocks, heads, g0, g1, g2) + token[:, None] * g3 + column[None, :]
    slope = tl.load(gradient + above, mask=inside, other=0.0).to(tl.float32)
    beside = _place(row, blocks, heads, l0, l1, l2) + token[:, None] * l3 + column[None, :]
    own = tl.load(local + beside, mask=inside, other=0.0).to(tl.float32)
    to = _place(row, blocks, heads, o0, o1, o2) + token[:, None] * o3 + column[None, :]
    tl.store(of_local + to, ((1 - openness) * slope).to(of_local.dtype.element_ty), mask=inside)
    weight, square = _sums(wide * z[None, :], read * read)
    weight += EPSILON
    scale = _scale(weight, square, NORM, REAL)
    read *= scale[:, None]
    along, of_row = _sums(read * slope, (read - own) * slope)
    along *= openness
    of_read = openness * slope
    if NORM:
        of_read -= read * (along / REAL)[:, None]
        of_own_weight = -NORM_EPSILON * weight * scale * scale * along
    else:
        of_own_weight = -scale * along
    of_read *= scale[:, None]
    tl.store(of_product + at, of_read.to(of_product.dtype.element_ty), mask=inside & there)
    tl.store(of_weight + own_row * tokens + token, of_own_weight, mask=(token < tokens) & there)
    of_openness = tl.sum(of_row) * openness * (1 - openness)
    tl.store(of_gate + row * tl.num_programs(1) + tl.program_id(1), of_openness)


@triton.jit
def _query_slopes(
    of_feature, feature, of_weight, normaliser, of_query, of_normaliser, o0, o1, o2, o3,
    blocks, heads, kv_heads, first, tokens,
    DIM: tl.constexpr, REAL: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Through weights and features; a block that reads nothing has none."""
    row = tl.program_id(0).to(tl.int64)
    token, column, inside = _tile(tokens, DIM, WIDTH, TILE)
    there, own_row, z = _reading(normaliser, row, blocks, heads, kv_heads, first, column, DIM)
    at = (own_row * tokens + token[:, None]) * DIM + column[None, :]
    wide = tl.load(feature + at, mask=inside & there, other=0.0).to(tl.float32)
    slope = tl.load(of_feature + at, mask=inside & there, other=0.0).to(tl.float32)
    of_own_weight = tl.load(of_weight + own_row * tokens + token, mask=(token < tokens) & there, other=0.0)
    of_x = (slope + of_own_weight[:, None] * z[None, :]) * tl.minimum(wide, 1.0)
    to = _place(row, blocks, heads, o0, o1, o2) + token[:, None] * o3 + column[None, :]
    tl.store(of_query + to, of_x.to(of_query.dtype.element_ty), mask=inside)
    of_z = tl.sum(wide * of_own_weight[:, None], 0)
    tile = own_row * tl.num_programs(1) + tl.program_id(1)
    tl.store(of_normaliser + tile * DIM + column, of_z, mask=(column < DIM) & there)


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
def _key_slopes(
    both, of_feature, feature, normaliser, of_key, of_normaliser, o0, o1, o2, o3, heads, blocks, folded, tokens,
    DIM: tl.constexpr, REAL: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of what is folded; behind the gradients of values, `both` has features by twice the gradient of G."""
    row = tl.program_id(0).to(tl.int64)
    token, column, inside = _tile(tokens, DIM, WIDTH, TILE)
    there, own_row = row % blocks < folded, row // blocks * folded + row % blocks
    z = tl.load(normaliser + own_row * DIM + column, mask=(column < DIM) & there, other=0.0)
    line = row * tokens + token[:, None]
    wide = tl.load(feature + line * DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
    turned = tl.load(both + (2 * line + 1) * DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(of_feature + line * DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
    weight, along = _sums(wide * z[None, :], wide * turned)
    share = 1 / (weight + EPSILON)
    of_weight = -0.5 * share * share * along
    of_x = (slope + share[:, None] * turned + of_weight[:, None] * z[None, :]) * tl.minimum(wide, 1.0)
    to = _place(row, heads, blocks, o0, o1, o2) + token[:, None] * o3 + column[None, :]
    tl.store(of_key + to, of_x.to(of_key.dtype.element_ty), mask=inside)
    of_z = tl.sum(wide * of_weight[:, None], 0)
    tile = own_row * tl.num_programs(1) + tl.program_id(1)
    tl.store(of_normaliser + tile * DIM + column, of_z, mask=(column < DIM) & there)
