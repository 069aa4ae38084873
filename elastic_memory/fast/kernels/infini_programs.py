"""Triton programs of `infini.py`: one takes some tokens of one block in one head, or all of them where it sums them up.

Quotients and norms exist only inside, and so do products with a head's matrices. These take 64 tokens at a time: on
Hopper the matrices then lie in shared memory and a row in one warp; fewer tokens leave a program so few registers that
it waits for memory. Sums over tokens need a program of their own.
"""

# Constants of the compiled program are in capitals, as Triton has it.
# ruff: noqa: N803

import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-6)  # of normalisers
NORM_EPSILON = tl.constexpr(1e-5)


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _sums(x, y):
    """Row sums of x and y in one reduction, so that both have the layout of products."""
    return tl.reduce((x, y), 1, _both)


@triton.jit
def _place(row, blocks, heads, s0, s1, s2):
    """Where a block of a head begins; `row` counts heads, then blocks, then rows of the batch."""
    return row // heads // blocks * s0 + row // heads % blocks * s1 + row % heads * s2


@triton.jit
def _square(matrix, row, column, there, DIM: tl.constexpr):
    """A matrix of a head, or zeros if it is not there."""
    inside = (column < DIM) & there
    at = (row * DIM + column[:, None]) * DIM + column[None, :]
    return tl.load(matrix + at, mask=inside[:, None] & inside[None, :], other=0.0)


@triton.jit
def _open(gate, row, blocks, heads, first):
    """How far a gate is open: 0 in blocks that read nothing."""
    return tl.where(row // heads % blocks >= first, tl.sigmoid(tl.load(gate + row % heads).to(tl.float32)), 0.0)


@triton.jit
def _scale(weight, square, NORM: tl.constexpr, REAL: tl.constexpr):
    """What a row of sigma(q) M, whose squares sum up to `square`, is multiplied by.

    It is divided by the weight sigma(q) z; normalised after that, the weight matters only to the epsilon.
    """
    return tl.rsqrt(square / REAL + NORM_EPSILON * weight * weight) if NORM else 1 / weight


@triton.jit
def mix_kernel(
    feature, local, matrix, normaliser, gate, mixed, f0, f1, f2, f3, l0, l1, l2, l3, m0, m1, m2, m3,
    blocks, heads, first, tokens, NORM: tl.constexpr, REAL: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What all tokens of a block read, mixed with their own attention."""
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
def mix_gradient_kernel(
    gradient, feature, local, matrix, normaliser, gate, of_feature, of_local, of_product, of_weight, of_gate,
    g0, g1, g2, g3, f0, f1, f2, f3, l0, l1, l2, l3, o0, o1, o2, o3, blocks, heads, first, tokens,
    NORM: tl.constexpr, REAL: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of `mix_kernel` by token: features, local, products, weights and the gate."""
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
        grad = tl.load(gradient + token[:, None] * g3 + column[None, :], mask=inside, other=0.0)
        own = tl.load(local + token[:, None] * l3 + column[None, :], mask=inside, other=0.0)
        at = token[:, None] * o3 + column[None, :]
        tl.store(of_local + at, ((1 - openness) * grad.to(tl.float32)).to(x.dtype), mask=inside)
        of_openness -= tl.sum(own.to(tl.float32) * grad.to(tl.float32), 1)
        product = tl.dot(x, known)
        weight, square = _sums(x.to(tl.float32) * z[None, :], product * product)
        weight += EPSILON
        scale = _scale(weight, square, NORM, REAL)
        along = scale * tl.sum(product * grad.to(tl.float32), 1)
        of_openness += along
        along *= openness
        if NORM:
            turn = scale * scale * along
            of_row = -NORM_EPSILON * weight * turn
            turn /= REAL
        else:
            turn = 0.0 * scale
            of_row = -scale * along
        change = (openness * scale)[:, None] * grad.to(tl.float32) - turn[:, None] * product
        tl.store(of_product + at, change.to(x.dtype), mask=inside)
        tl.store(of_weight + row * tokens + token, of_row, mask=token < tokens)
        of_x = tl.dot(change.to(x.dtype), tl.trans(known)) + of_row[:, None] * z[None, :]
        tl.store(of_feature + at, of_x.to(x.dtype), mask=inside)
    of_openness *= openness * (1 - openness)
    tl.store(of_gate + row * tl.num_programs(1) + tl.program_id(1), tl.sum(of_openness))


@triton.jit
def matrix_gradient_kernel(
    feature, of_product, of_weight, of_matrix, of_normaliser, f0, f1, f2, f3, p0, p1, p2, p3, blocks, heads, tokens,
    TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of the matrix and normaliser that a block read: sums over its tokens."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    feature += _place(row, blocks, heads, f0, f1, f2)
    of_product += _place(row, blocks, heads, p0, p1, p2)
    of_known, of_z = tl.zeros([WIDTH, WIDTH], tl.float32), tl.zeros([TILE, WIDTH], tl.float32)
    for start in range(0, tokens, TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < tokens)[:, None] & (column < DIM)[None, :]
        x = tl.load(feature + token[:, None] * f3 + column[None, :], mask=inside, other=0.0)
        grad = tl.load(of_product + token[:, None] * p3 + column[None, :], mask=inside, other=0.0)
        of_row = tl.load(of_weight + row * tokens + token, mask=token < tokens, other=0.0)
        of_known = tl.dot(tl.trans(x), grad, of_known)
        of_z += x.to(tl.float32) * of_row[:, None]
    inside = column < DIM
    at = (row * DIM + column[:, None]) * DIM + column[None, :]
    tl.store(of_matrix + at, of_known, mask=inside[:, None] & inside[None, :])
    tl.store(of_normaliser + row * DIM + column, tl.sum(of_z, 0), mask=inside)


@triton.jit
def fold_kernel(
    feature, value, normaliser, added, known, f0, f1, f2, f3, v0, v1, v2, v3, heads, folded, tokens,
    TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """U and G of a block: sums over its tokens."""
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
        wide, transposed = x.to(tl.float32), tl.trans(x)
        scaled = (wide / (tl.sum(wide * z[None, :], 1) + EPSILON)[:, None]).to(x.dtype)
        sum_added = tl.dot(transposed, own, sum_added)
        sum_known = tl.dot(transposed, scaled, sum_known)
    inside = column < DIM
    at = (row * DIM + column[:, None]) * DIM + column[None, :]
    tl.store(added + at, sum_added, mask=inside[:, None] & inside[None, :])
    tl.store(known + at, sum_known, mask=inside[:, None] & inside[None, :])


@triton.jit
def fold_gradient_kernel(
    of_added, of_known, feature, value, normaliser, of_feature, of_value, of_normaliser,
    f0, f1, f2, f3, v0, v1, v2, v3, o0, o1, o2, o3, blocks, heads, folded, tokens,
    CHUNK: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of `fold_kernel` by token: features, values and parts of the normaliser's."""
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
        wide, grad = x.to(tl.float32), tl.dot(x, twice)
        weight, along = _sums(wide * z[None, :], wide * grad)
        share = 1 / (weight + EPSILON)
        of_weight = -0.5 * share * share * along
        of_z += tl.sum(wide * of_weight[:, None], 0)
        grad = tl.dot(own, tl.trans(added), share[:, None] * grad + of_weight[:, None] * z[None, :])
        at = token[:, None] * o3 + column[None, :]
        tl.store(of_feature + at, grad.to(x.dtype), mask=inside)
        tl.store(of_value + at, tl.dot(x, added).to(x.dtype), mask=inside)
    tile = own_row * tl.num_programs(1) + tl.program_id(1)
    tl.store(of_normaliser + tile * DIM + column, of_z, mask=(column < DIM) & there)


@triton.jit
def chain_kernel(
    known, added, matrices, heads, count,
    BACK: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """M <- (I - G) M + U, for some columns of a head; BACK: from the last block on, each by the G of the next."""
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
