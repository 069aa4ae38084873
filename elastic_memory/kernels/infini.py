"""Infini-Transformer's memory in training: what all blocks read and what they add.

Plain code passes over queries, keys, values and what is read a dozen times in float32. Here tokens are as narrow as
activations: products are torch's, and what stands between two of them is one kernel that reads and writes each number
once; what is divided and normalised exists only inside. With the products inside too there would be fewer passes,
but matrices of a head leave a kernel so few registers that it waits for memory instead of keeping it busy. Where a
block is summed up it pays, as little is written. Operations of their own, so that compiled graphs can hold them.

Weights sigma(x) z are products as well: z is one more column of the matrix that sigma(x) is multiplied by. A program
takes some tokens of one block in one head, or all where it sums them up. Tensors of others may be strided, except along
the last axis; those in between are contiguous, a block of a head after the other.

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
SPARE = tl.constexpr(8)  # columns for z, which needs one: rows then begin where 16 bytes do, if those of heads do
TILE, LONG_TILE = 32, 64  # tokens of a program, as an H200 likes them; long where features are made or folded
COLUMNS = 16  # of a matrix, where one program goes from block to block


def features(
    x: Float[Tensor, "batch block head token dim"], real: int
) -> tuple[Float[Tensor, "batch block head token dim"], Float[Tensor, "batch block head dim"]]:
    """sigma(x), zero beyond the `real` features of a head, and its sums over tokens."""
    return _features(x, real)


def recall(
    feature: Float[Tensor, "batch block head token dim"],
    local: Float[Tensor, "batch block head token dim"],
    matrix: Float[Tensor, "batch read kv_head dim dim"],
    normaliser: Float[Tensor, "batch read kv_head dim"],
    gate: Float[Tensor, " head"],
    real: int,
    norm: bool,
) -> Float[Tensor, "batch block head token dim"]:
    """local + g (sigma(q) M / sigma(q) z - local), what is read normalised if `norm`; first blocks without M: local."""
    (blocks, heads), (reads, kv_heads) = feature.shape[1:3], matrix.shape[1:3]
    known = _with_column(matrix, normaliser).repeat_interleave(heads // kv_heads, dim=2)
    return _recall(feature, local, F.pad(known, (0, 0) * 3 + (blocks - reads, 0)), gate, blocks - reads, real, norm)


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


# What is made of matrices is made by plain code outside of operations, which a compiler joins.
def _with_column(matrix: Tensor, normaliser: Tensor) -> Tensor:
    return torch.cat((matrix, F.pad(normaliser[..., None], (0, SPARE.value - 1))), dim=-1)


def _width(dim: int) -> dict[str, int]:
    return {"DIM": dim, "WIDTH": max(16, triton.next_power_of_2(dim)), "num_warps": 4}


def _sizes(dim: int, tile: int = TILE) -> dict[str, int]:
    return _width(dim) | {"TILE": tile}


def _laid_out(x: Tensor) -> Tensor:
    """[batch, block, head, token, dim], heads of a token side by side as projections want them."""
    batch, blocks, heads, tokens, dim = x.shape
    return x.new_empty(batch, blocks, tokens, heads, dim).transpose(2, 3)


def _strided(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _times(left: Tensor, right: Tensor, wide: bool = False) -> Tensor:
    """Products of matrices, one for each block of a head; in float32 if `wide`."""
    left, right, shape = left.flatten(0, 2), right.flatten(0, 2), left.shape[:3]
    # On GPUs alone torch makes float32 of narrower numbers; the interpreter's are that wide.
    product = torch.bmm(left, right, out_dtype=torch.float32) if wide and left.is_cuda else torch.bmm(left, right)
    return product.unflatten(0, shape)


@torch.library.custom_op("elastic_memory::infini_features", mutates_args=())
def _features(x: Tensor, real: int) -> tuple[Tensor, Tensor]:
    x, (batch, blocks, heads, tokens, dim) = _strided(x), x.shape
    tiles = triton.cdiv(tokens, LONG_TILE)
    result, sums = x.new_empty(x.shape), x.new_empty(batch, blocks, heads, tiles, dim, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _features_kernel[(batch * blocks * heads, tiles)](
            x, result, sums, *x.stride()[:4], blocks, heads, tokens, REAL=real, **_sizes(dim, LONG_TILE)
        )
    return result, sums.sum(3)


@torch.library.custom_op("elastic_memory::infini_recall", mutates_args=())
def _recall(feature: Tensor, local: Tensor, known: Tensor, gate: Tensor, first: int, real: int, norm: bool) -> Tensor:
    """`known`: [M, z] for each head of each block, zeros before the `first` that reads."""
    local, mixed = _strided(local), _laid_out(local)
    batch, blocks, heads, tokens, dim = local.shape
    product = _times(feature, known.to(feature.dtype))
    with torch.cuda.device_of(local):
        _combine[(batch * blocks * heads, triton.cdiv(tokens, TILE))](
            local, product, gate, mixed, *local.stride()[:4], *mixed.stride()[:4], blocks, heads, first, tokens,
            NORM=norm, REAL=real, **_sizes(dim),
        )  # fmt: skip
    return mixed


@torch.library.custom_op("elastic_memory::infini_recall_backward", mutates_args=())
def _recall_backward(
    gradient: Tensor, feature: Tensor, local: Tensor, known: Tensor, gate: Tensor, first: int, real: int, norm: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradient, local, of_local = _strided(gradient), _strided(local), _laid_out(local)
    batch, blocks, heads, tokens, dim = local.shape
    narrow, tiles = known.to(feature.dtype), triton.cdiv(tokens, TILE)
    product, of_gate = _times(feature, narrow), known.new_empty(batch, blocks, heads, tiles)
    of_product = torch.empty_like(product)
    with torch.cuda.device_of(local):
        _slopes[(batch * blocks * heads, tiles)](
            gradient, local, product, gate, of_local, of_product, of_gate, *gradient.stride()[:4], *local.stride()[:4],
            *of_local.stride()[:4], blocks, heads, first, tokens, NORM=norm, REAL=real, **_sizes(dim),
        )  # fmt: skip
    of_known = _times(feature.mT, of_product, wide=True)
    return _times(of_product, narrow.mT), of_local, of_known, of_gate.sum((0, 1, 3))


@torch.library.custom_op("elastic_memory::infini_fold", mutates_args=())
def _fold(feature: Tensor, value: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    value, normaliser = _strided(value), normaliser.contiguous()
    batch, folded, heads, dim = normaliser.shape
    added, known = (normaliser.new_empty(batch, folded, heads, dim, dim) for _ in range(2))
    # As many warps as on Hopper keep both sums in registers.
    with torch.cuda.device_of(value):
        _fold_kernel[(batch * heads * folded,)](
            feature, value, normaliser, added, known, *value.stride()[:4], feature.shape[1], heads, folded,
            feature.shape[3], **_sizes(dim, LONG_TILE) | {"num_warps": 8, "num_stages": 3},
        )  # fmt: skip
    return added, known


@torch.library.custom_op("elastic_memory::infini_fold_backward", mutates_args=())
def _fold_backward(slopes: Tensor, feature: Tensor, value: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`slopes`: gradients of U and, twice, of G, and z, for all blocks."""
    normaliser = normaliser.contiguous()
    batch, blocks, heads, tokens, dim = feature.shape
    folded, tiles = normaliser.shape[1], triton.cdiv(tokens, TILE)
    product, of_added = _times(feature, slopes), slopes[..., :dim]
    # Head after head, as those of a token stand side by side: values of whole blocks are not copied.
    through_added = feature.new_empty(heads, batch, blocks, tokens, dim)
    for head, own in enumerate(through_added):
        torch.bmm(value[:, :, head].flatten(0, 1), of_added[:, :, head].flatten(0, 1).mT, out=own.flatten(0, 1))
    of_feature = torch.empty_like(feature)
    of_normaliser = normaliser.new_empty(batch, folded, heads, tiles, dim)
    with torch.cuda.device_of(feature):
        _key_slopes[(batch * blocks * heads, tiles)](
            product, through_added, feature, normaliser, of_feature, of_normaliser, batch, blocks, heads, folded,
            tokens, **_sizes(dim),
        )  # fmt: skip
    return of_feature, product[..., :dim], of_normaliser.sum(3)


@torch.library.custom_op("elastic_memory::infini_chain", mutates_args=())
def _chain(known: Tensor, added: Tensor) -> Tensor:
    return _links(known, added, back=False)


@torch.library.custom_op("elastic_memory::infini_chain_backward", mutates_args=())
def _chain_backward(gradient: Tensor, known: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """What reaches a matrix, and so U, goes on to the one before by (I - G)^T: the same chain, from its end on."""
    of_added = _links(known, gradient, back=True)
    before = F.pad(matrices[:, :-1], (0, 0) * 3 + (1, 0))
    return -_times(of_added, before.mT), of_added


def _links(known: Tensor, added: Tensor, back: bool) -> Tensor:
    known, added = known.contiguous(), added.contiguous()
    (batch, count, heads, dim, _), matrices = known.shape, torch.empty_like(added)
    with torch.cuda.device_of(known):
        _links_kernel[(batch * heads, triton.cdiv(dim, COLUMNS))](
            known, added, matrices, heads, count, BACK=back, COLUMNS=COLUMNS, num_stages=2, **_width(dim)
        )
    return matrices


@_chain.register_fake
def _(known: Tensor, added: Tensor) -> Tensor:
    return added.new_empty(added.shape)


@_chain_backward.register_fake
def _(gradient: Tensor, known: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
    return known.new_empty(known.shape), known.new_empty(known.shape)


@_features.register_fake
def _(x: Tensor, real: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(*x.shape[:3], x.shape[4], dtype=torch.float32)


@_recall.register_fake
def _(feature: Tensor, local: Tensor, *_: Any) -> Tensor:
    return _laid_out(local)


@_recall_backward.register_fake
def _(gradient: Tensor, feature: Tensor, local: Tensor, known: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(feature), _laid_out(local), known.new_empty(known.shape), known.new_empty(feature.shape[2])


@_fold.register_fake
def _(feature: Tensor, value: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    added, known = (normaliser.new_empty(*normaliser.shape, normaliser.shape[-1]) for _ in range(2))
    return added, known


@_fold_backward.register_fake
def _(slopes: Tensor, feature: Tensor, value: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    of_value = value.new_empty(*feature.shape[:-1], slopes.shape[-1])[..., : feature.shape[-1]]
    return torch.empty_like(feature), of_value, normaliser.new_empty(normaliser.shape)


def _remember(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.settings = [x for x in inputs if not isinstance(x, Tensor)]


def _remember_features(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0])


def _features_gradient(ctx: Any, of_feature: Tensor | None, of_sums: Tensor | None) -> tuple[Tensor, None]:
    """Plain code, which a compiler joins with what comes next. The slope is the feature where that is below 1."""
    (feature,) = ctx.saved_tensors
    slope: Any = 0 if of_feature is None else of_feature
    if of_sums is not None:
        slope = slope + of_sums[..., None, :]
    return (slope * feature.clamp(max=1)).to(feature.dtype), None


def _recall_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: recomputation unpacks them a single time
    *others, of_gate = _recall_backward(gradient, *saved, *ctx.settings)
    return *others, of_gate.to(saved[-1].dtype), None, None, None


def _fold_gradients(ctx: Any, of_added: Tensor, of_known: Tensor) -> tuple[Tensor | None, ...]:
    """G is symmetric in what it is made of: its gradient comes twice. Blocks that are not folded have none."""
    feature, value, normaliser = ctx.saved_tensors
    slopes = _with_column(torch.cat((of_added, of_known + of_known.mT), dim=-1), normaliser)
    missing = (0, 0) * 3 + (0, feature.shape[1] - normaliser.shape[1])
    return _fold_backward(F.pad(slopes, missing).to(feature.dtype), feature, value, normaliser)


def _remember_chain(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _chain_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return _chain_backward(gradient, *ctx.saved_tensors)


_chain.register_autograd(_chain_gradients, setup_context=_remember_chain)
_features.register_autograd(_features_gradient, setup_context=_remember_features)
_recall.register_autograd(_recall_gradients, setup_context=_remember)
_fold.register_autograd(_fold_gradients, setup_context=_remember)


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(x, y):
    """Of the rows of both: together, as warps wait for each other in every sum."""
    return tl.reduce((x, y), 1, _both)


@triton.jit
def _place(row, blocks, heads, s0, s1, s2):
    """Where a block of a head begins: its row counts through rows of a batch, their blocks, and the heads of those."""
    return row // heads // blocks * s0 + row // heads % blocks * s1 + row % heads * s2


@triton.jit
def _tile(tokens, DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The program's block of a head, its tokens, the columns of a head, and which of both there are."""
    token, column = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    return tl.program_id(0).to(tl.int64), token, column, (token < tokens)[:, None] & (column < DIM)[None, :]


@triton.jit
def _features_kernel(
    x, result, sums, x0, x1, x2, x3, blocks, heads, tokens, REAL: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """ELU + 1, and zero where nothing is."""
    row, token, column, inside = _tile(tokens, DIM, WIDTH, TILE)
    at = _place(row, blocks, heads, x0, x1, x2) + token[:, None] * x3 + column[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    real = inside & (column % (DIM // 2) < REAL // 2)[None, :]  # padding stands behind either half of a head
    feature = tl.where(real, tl.where(wide > 0, wide + 1, tl.exp(wide)), 0.0).to(result.dtype.element_ty)
    tl.store(result + (row * tokens + token[:, None]) * DIM + column[None, :], feature, mask=inside)
    to = (row * tl.num_programs(1) + tl.program_id(1)) * DIM + column
    tl.store(sums + to, tl.sum(feature.to(tl.float32), 0), mask=column < DIM)


@triton.jit
def _reading(
    local, product, gate, row, token, column, inside, l0, l1, l2, l3, blocks, heads, first, tokens,
    NORM: tl.constexpr, REAL: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """What is read, the weight it was divided by, and what it is multiplied by for that; the block's own; the gate.

    Normalised after the division, the weight matters only to the epsilon. A block that reads nothing has a closed gate.
    """
    line = (row * tokens + token) * (DIM + SPARE)
    read = tl.load(product + line[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(product + line + DIM, mask=token < tokens, other=0.0).to(tl.float32) + EPSILON
    beside = _place(row, blocks, heads, l0, l1, l2) + token[:, None] * l3 + column[None, :]
    own = tl.load(local + beside, mask=inside, other=0.0).to(tl.float32)
    openness = tl.where(row // heads % blocks >= first, tl.sigmoid(tl.load(gate + row % heads).to(tl.float32)), 0.0)
    scale = tl.rsqrt(tl.sum(read * read, 1) / REAL + NORM_EPSILON * weight * weight) if NORM else 1 / weight
    return read * scale[:, None], weight, scale, own, openness


@triton.jit
def _combine(
    local, product, gate, mixed, l0, l1, l2, l3, m0, m1, m2, m3, blocks, heads, first, tokens,
    NORM: tl.constexpr, REAL: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """local + g (read - local)."""
    row, token, column, inside = _tile(tokens, DIM, WIDTH, TILE)
    read, _, _, own, openness = _reading(
        local, product, gate, row, token, column, inside, l0, l1, l2, l3, blocks, heads, first, tokens, NORM, REAL, DIM
    )
    own += openness * (read - own)
    to = _place(row, blocks, heads, m0, m1, m2) + token[:, None] * m3 + column[None, :]
    tl.store(mixed + to, own.to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def _slopes(
    gradient, local, product, gate, of_local, of_product, of_gate,
    g0, g1, g2, g3, l0, l1, l2, l3, o0, o1, o2, o3, blocks, heads, first, tokens,
    NORM: tl.constexpr, REAL: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of `_combine`: of what it mixes, and of the weights it divides by."""
    row, token, column, inside = _tile(tokens, DIM, WIDTH, TILE)
    read, weight, scale, own, openness = _reading(
        local, product, gate, row, token, column, inside, l0, l1, l2, l3, blocks, heads, first, tokens, NORM, REAL, DIM
    )
    above = _place(row, blocks, heads, g0, g1, g2) + token[:, None] * g3 + column[None, :]
    slope = tl.load(gradient + above, mask=inside, other=0.0).to(tl.float32)
    to = _place(row, blocks, heads, o0, o1, o2) + token[:, None] * o3 + column[None, :]
    tl.store(of_local + to, ((1 - openness) * slope).to(of_local.dtype.element_ty), mask=inside)
    along, of_row = _sums(read * slope, (read - own) * slope)
    along *= openness
    of_read = openness * slope
    if NORM:
        of_read -= read * (along / REAL)[:, None]
        of_weight = -NORM_EPSILON * weight * scale * scale * along
    else:
        of_weight = -scale * along
    line, spare = (row * tokens + token[:, None]) * (DIM + SPARE), tl.arange(0, SPARE)[None, :]
    kind = of_product.dtype.element_ty
    tl.store(of_product + line + column[None, :], (of_read * scale[:, None]).to(kind), mask=inside)
    of_spare = tl.where(spare == 0, of_weight[:, None], 0.0)
    tl.store(of_product + line + DIM + spare, of_spare.to(kind), mask=(token < tokens)[:, None])
    of_openness = tl.sum(of_row) * openness * (1 - openness)
    tl.store(of_gate + row * tl.num_programs(1) + tl.program_id(1), of_openness)


@triton.jit
def _fold_kernel(
    feature, value, normaliser, added, known, v0, v1, v2, v3, blocks, heads, folded, tokens,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    feature += _place(row, folded, heads, blocks * heads, heads, 1) * tokens * DIM
    value += _place(row, folded, heads, v0, v1, v2)
    z = tl.load(normaliser + row * DIM + column, mask=column < DIM, other=0.0)
    sum_added, sum_known = tl.zeros([WIDTH, WIDTH], tl.float32), tl.zeros([WIDTH, WIDTH], tl.float32)
    for start in range(0, tokens, TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (column < DIM)[None, :]
        x = tl.load(feature + token[:, None] * DIM + column[None, :], mask=inside, other=0.0)
        own = tl.load(value + token[:, None] * v3 + column[None, :], mask=inside, other=0.0)
        wide, turned = x.to(tl.float32), tl.trans(x)
        scaled = (wide / (tl.sum(wide * z[None, :], 1) + EPSILON)[:, None]).to(x.dtype)
        sum_added = tl.dot(turned, own, sum_added, input_precision="ieee")
        sum_known = tl.dot(turned, scaled, sum_known, input_precision="ieee")
    at = row * DIM * DIM + column[:, None] * DIM + column[None, :]
    inside = (column < DIM)[:, None] & (column < DIM)[None, :]
    tl.store(added + at, sum_added, mask=inside)
    tl.store(known + at, sum_known, mask=inside)


@triton.jit
def _key_slopes(
    product, through_added, feature, normaliser, of_feature, of_normaliser, batch, blocks, heads, folded, tokens,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of features, which are in U and G. In `product` they are by U's gradient, by twice that of G, and by z."""
    row, token, column, inside = _tile(tokens, DIM, WIDTH, TILE)
    there, own_row = row // heads % blocks < folded, _place(row, blocks, heads, folded * heads, heads, 1)
    z = tl.load(normaliser + own_row * DIM + column, mask=(column < DIM) & there, other=0.0)
    at = (row * tokens + token[:, None]) * DIM + column[None, :]
    wide = tl.load(feature + at, mask=inside, other=0.0).to(tl.float32)
    line = (row * tokens + token) * (2 * DIM + SPARE)
    turned = tl.load(product + line[:, None] + DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(product + line + 2 * DIM, mask=token < tokens, other=0.0).to(tl.float32)
    heads_first = _place(row, blocks, heads, blocks, 1, batch * blocks)
    beside = (heads_first * tokens + token[:, None]) * DIM + column[None, :]
    slope = tl.load(through_added + beside, mask=inside, other=0.0).to(tl.float32)
    share = 1 / (weight + EPSILON)
    of_weight = -0.5 * share * share * tl.sum(wide * turned, 1)
    slope += share[:, None] * turned + of_weight[:, None] * z[None, :]
    tl.store(of_feature + at, slope.to(of_feature.dtype.element_ty), mask=inside)
    of_z = tl.sum(wide * of_weight[:, None], 0)
    tile = own_row * tl.num_programs(1) + tl.program_id(1)
    tl.store(of_normaliser + tile * DIM + column, of_z, mask=(column < DIM) & there)


@triton.jit
def _links_kernel(
    known, added, matrices, heads, count,
    BACK: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's matrices, which need no others. Backwards it is the next one's G, transposed."""
    row = tl.program_id(0).to(tl.int64)
    line, column = tl.arange(0, WIDTH), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (line < DIM)[:, None] & (column < DIM)[None, :]
    square = (line < DIM)[:, None] & (line < DIM)[None, :]
    of_known = line[None, :] * DIM + line[:, None] if BACK else line[:, None] * DIM + line[None, :]
    matrix = tl.zeros([WIDTH, COLUMNS], tl.float32)
    for step in range(count):
        index = count - 1 - step if BACK else step
        other = tl.minimum(index + 1, count - 1) if BACK else index  # at the end there is no matrix yet
        at = (row // heads * count + index) * heads + row % heads
        other_at = (row // heads * count + other) * heads + row % heads
        own = tl.load(known + other_at * DIM * DIM + of_known, mask=square, other=0.0)
        place = at * DIM * DIM + line[:, None] * DIM + column[None, :]
        more = tl.load(added + place, mask=inside, other=0.0)
        matrix += more - tl.dot(own, matrix)  # in TF32, as training has products of float32
        tl.store(matrices + place, matrix, mask=inside)
