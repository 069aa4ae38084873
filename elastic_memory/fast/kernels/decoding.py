"""One token of each row through a Llama layer, in five kernels. A decoding step is bound by memory bandwidth, so what
counts is few bytes and few launches.

1. `project`: RMS norm, then queries, keys and values in one small buffer.
2. `attend`: rotates query and new key, writes the new column of the cache, and attends to what the row sees. A row's
   columns are cut into splits, one program each: every one leaves its own softmax and the logarithm of its sum.
3. `merge`: merges the splits, output projection, residual; without splits `contract` does it.
4. `expand`: RMS norm, gate and up products, SiLU(gate) * up.
5. `contract`: down product, residual.

Products read each weight once and share the units (rows of the weight) among programs. One row is multiplied and summed
on a tile as long as the row; more rows go through tensor cores, piece by piece. The norm's factor is the same for a
whole row: with a single row it is applied after the product, so that a program reads its input once, not twice. Several
rows have a separate kernel for the norm, as tensor cores load their operands directly from memory.

On Hopper and later a kernel starts before the previous one has ended (`EARLY`): its launch, and with one row the load
of its weights, overlap with that one. Nothing that a kernel writes may be touched by the next before `_wait`.
"""

# Constants of the compiled program are in capitals, as Triton has it.
# ruff: noqa: N803, N806

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from elastic_memory.shapes import Tensor

LOG2E = 1.4426950408889634
PROGRAMS = 256  # about two for each multiprocessor of an H200: rows are split until there are as many
SPLITS = 16  # at most: every program of the output projection reads them all


@triton.jit
def _begin(EARLY: tl.constexpr):
    """Let the next kernel start."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def _wait(EARLY: tl.constexpr):
    """Wait until the previous kernel has ended."""
    if EARLY:
        gdc_wait()


@triton.jit
def _tile(weight, unit, column, known, real, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Part of a weight where the unit is `known` and the column `real`: transposed for tensor cores, else as stored."""
    if ROWS > 1:
        place, inside = unit[None, :] * COLUMNS + column[:, None], known[None, :] & real[:, None]
    else:
        place, inside = unit[:, None] * COLUMNS + column[None, :], known[:, None] & real[None, :]
    return tl.load(weight + place, mask=inside, other=0.0)


@triton.jit
def _add_product(total, x, tile):
    """total [row, unit] + x [row, column] times a tile of the weight."""
    if x.shape[0] > 1:
        total = tl.dot(x, tile, total, input_precision="ieee")
    else:
        total += tl.sum(x.to(tl.float32) * tile.to(tl.float32), axis=1)[None, :]
    return total


@triton.jit
def _rows_of(x, row, column, batch, COLUMNS: tl.constexpr):
    """Load part of a matrix of `batch` rows."""
    inside = (row < batch)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(x + row[:, None] * COLUMNS + column[None, :], mask=inside, other=0.0)


@triton.jit
def _put(out, result, row, unit, batch, UNITS: tl.constexpr):
    """Store part of a matrix of `batch` rows."""
    inside = (row < batch)[:, None] & (unit < UNITS)[None, :]
    tl.store(out + row[:, None] * UNITS + unit[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _normed(x, gain, column, squares, WIDTH: tl.constexpr):
    """x times the norm's weight, and the squares that its factor is made of."""
    wide = x.to(tl.float32)
    gains = tl.load(gain + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    return (wide * gains[None, :]).to(x.dtype), squares + wide * wide


@triton.jit
def _project(
    hidden, gain, epsilon, q_weight, k_weight, v_weight, out, batch,
    WIDTH: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    part = tl.program_id(1)
    weight = tl.where(part == 0, q_weight, tl.where(part == 1, k_weight, v_weight))
    units = tl.where(part == 0, QUERY, KEY)
    first = tl.where(part == 0, 0, tl.where(part == 1, QUERY, QUERY + KEY))
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    if tl.program_id(0) * UNITS < units:
        total, squares = tl.zeros((ROWS, UNITS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
        if ROWS > 1:
            _wait(EARLY)
        for start in range(0, WIDTH, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            tile = _tile(weight, unit, column, unit < units, column < WIDTH, WIDTH, ROWS)
            if ROWS == 1:
                _wait(EARLY)
            x = _rows_of(hidden, row, column, batch, WIDTH)
            if ROWS == 1:
                x, squares = _normed(x, gain, column, squares, WIDTH)
            total = _add_product(total, x, tile)
        if ROWS == 1:
            total *= tl.rsqrt(tl.sum(squares, 1) / WIDTH + epsilon)[:, None]
        place = row[:, None] * (QUERY + 2 * KEY) + first + unit[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=(row < batch)[:, None] & (unit < units)[None, :])


@triton.jit
def _rotated(x, cos, sin, head, d, DIM: tl.constexpr, inside):
    """Heads of `x` after rotary positions: feature i of the first half is paired with feature i of the second."""
    HALF: tl.constexpr = DIM // 2
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    here = tl.load(x + head * DIM + d, mask=inside, other=0.0).to(tl.float32)
    there = tl.load(x + head * DIM + partner, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + d, mask=d < DIM, other=0.0).to(tl.float32)
    sine = tl.load(sin + d, mask=d < DIM, other=0.0).to(tl.float32)
    return (here * cosine + tl.where(d < HALF, -there, there) * sine).to(x.dtype.element_ty)


@triton.jit
def _attend(
    qkv, cos, sin, positions, counts, closed, keys, values, raw, mixed, sums, scale, batch, room, front, memory, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, KEEP_RAW: tl.constexpr, SPLITS: tl.constexpr,
    MEMBERS: tl.constexpr, FEATURES: tl.constexpr, KEYS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    d, member = tl.arange(0, FEATURES), tl.arange(0, MEMBERS)
    head, kv_row = kv_head * GROUP + member, row.to(tl.int64) * KV_HEADS + kv_head
    real = (member < GROUP)[:, None] & (d < DIM)[None, :]
    # What the row sees: its columns of memory, then those from `first` to the new one. Settled before the step began.
    position, count = tl.load(positions + row).to(tl.int32), tl.load(counts + row).to(tl.int32)
    first = front - tl.minimum(tl.minimum(tl.load(closed + row), front - memory).to(tl.int32), window - 1 - position)
    new = front + position
    seen = count + new - first
    begin, end = seen * split // SPLITS, seen * (split + 1) // SPLITS
    _wait(EARLY)
    qkv += row * (HEADS + 2 * KV_HEADS) * DIM
    cos += position * DIM
    sin += position * DIM
    query = _rotated(qkv, cos, sin, head[:, None], d[None, :], DIM, real)
    keys += kv_row * room * DIM
    values += kv_row * room * DIM

    top = tl.full((MEMBERS,), float("-inf"), tl.float32)
    total = tl.zeros((MEMBERS,), tl.float32)
    mix = tl.zeros((MEMBERS, FEATURES), tl.float32)
    if split == SPLITS - 1:  # the new column is its own; nobody else touches it
        key = _rotated(qkv, cos, sin, HEADS + kv_head, d, DIM, d < DIM)
        value = tl.load(qkv + (HEADS + KV_HEADS + kv_head) * DIM + d, mask=d < DIM, other=0.0)
        tl.store(keys + new * DIM + d, key, mask=d < DIM)
        tl.store(values + new * DIM + d, value, mask=d < DIM)
        if KEEP_RAW:
            plain = tl.load(qkv + (HEADS + kv_head) * DIM + d, mask=d < DIM, other=0.0)
            tl.store(raw + kv_row * (room - front) * DIM + position * DIM + d, plain, mask=d < DIM)
        top = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], axis=1) * scale
        total += 1.0
        mix += value.to(tl.float32)[None, :]
    for start in range(begin, end, KEYS):
        index = start + tl.arange(0, KEYS)
        column = tl.where(index < count, index, index - count + first)
        inside = index < end
        known = tl.load(keys + column[None, :] * DIM + d[:, None], mask=inside[None, :] & (d < DIM)[:, None], other=0.0)
        score = tl.dot(query, known, input_precision="ieee") * scale
        score = tl.where(inside[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        share, fade = tl.exp2(score - higher[:, None]), tl.exp2(top - higher)
        total = total * fade + tl.sum(share, axis=1)
        held = tl.load(
            values + column[:, None] * DIM + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0
        )
        mix = tl.dot(share.to(held.dtype), held, mix * fade[:, None], input_precision="ieee")
        top = higher

    # A split without columns says minus infinity, which weighs nothing.
    place = (split * batch + row) * HEADS + head
    tl.store(sums + place, top + tl.log2(total), mask=member < GROUP)
    mix /= tl.where(total > 0, total, 1.0)[:, None]
    tl.store(mixed + place[:, None] * DIM + d[None, :], mix.to(mixed.dtype.element_ty), mask=real)


@triton.jit
def _merge(
    mixed, sums, weight, residual, out, batch,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    UNITS: tl.constexpr, TOGETHER: tl.constexpr, FEATURES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    row = tl.program_id(1)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    total = tl.zeros((1, UNITS), tl.float32)
    for start in range(0, HEADS, TOGETHER):
        index = tl.arange(0, TOGETHER * FEATURES)
        column, real = (start + index // FEATURES) * DIM + index % FEATURES, index % FEATURES < DIM
        real &= start + index // FEATURES < HEADS
        tile = _tile(weight, unit, column, unit < WIDTH, real, HEADS * DIM, 1)
        _wait(EARLY)
        head, d = start + tl.arange(0, TOGETHER), tl.arange(0, FEATURES)
        inside = (head < HEADS)[:, None] & (d < DIM)[None, :]
        top, whole = tl.full((TOGETHER,), -1e30, tl.float32), tl.zeros((TOGETHER,), tl.float32)
        x = tl.zeros((TOGETHER, FEATURES), tl.float32)
        for split in tl.static_range(SPLITS):
            place = (split * batch + row) * HEADS + head
            size = tl.load(sums + place, mask=head < HEADS, other=0.0)
            part = tl.load(mixed + place[:, None] * DIM + d[None, :], mask=inside, other=0.0)
            higher = tl.maximum(top, size)
            fade, share = tl.exp2(top - higher), tl.exp2(size - higher)
            x = x * fade[:, None] + part.to(tl.float32) * share[:, None]
            top, whole = higher, whole * fade + share
        x = (x / whole[:, None]).to(mixed.dtype.element_ty)
        total = _add_product(total, x.reshape(1, TOGETHER * FEATURES), tile)
    row += tl.arange(0, 1)
    total += _rows_of(residual, row, unit, batch, WIDTH).to(tl.float32)
    _put(out, total, row, unit, batch, WIDTH)


@triton.jit
def _expand(
    hidden, gain, epsilon, gate_weight, up_weight, out, batch,
    WIDTH: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    gate, up = tl.zeros((ROWS, UNITS), tl.float32), tl.zeros((ROWS, UNITS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    if ROWS > 1:
        _wait(EARLY)
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        gate_tile = _tile(gate_weight, unit, column, unit < INNER, column < WIDTH, WIDTH, ROWS)
        up_tile = _tile(up_weight, unit, column, unit < INNER, column < WIDTH, WIDTH, ROWS)
        if ROWS == 1:
            _wait(EARLY)
        x = _rows_of(hidden, row, column, batch, WIDTH)
        if ROWS == 1:
            x, squares = _normed(x, gain, column, squares, WIDTH)
        gate, up = _add_product(gate, x, gate_tile), _add_product(up, x, up_tile)
    if ROWS == 1:
        factor = tl.rsqrt(tl.sum(squares, 1) / WIDTH + epsilon)[:, None]
        gate, up = gate * factor, up * factor
    _put(out, gate * tl.sigmoid(gate) * up, row, unit, batch, INNER)


@triton.jit
def _contract(
    x, weight, residual, out, batch,
    INNER: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _begin(EARLY)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    total = tl.zeros((ROWS, UNITS), tl.float32)
    if ROWS > 1:
        _wait(EARLY)
    for start in range(0, INNER, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        tile = _tile(weight, unit, column, unit < WIDTH, column < INNER, INNER, ROWS)
        if ROWS == 1:
            _wait(EARLY)
        total = _add_product(total, _rows_of(x, row, column, batch, INNER), tile)
    total += _rows_of(residual, row, unit, batch, WIDTH).to(tl.float32)
    _put(out, total, row, unit, batch, WIDTH)


def _early(x: Tensor) -> dict[str, Any]:
    """Launch options: whether kernels may overlap."""
    early = x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] >= 9
    return {"EARLY": early} | ({"launch_pdl": True} if early else {})


def _cut(batch: int, columns: int) -> dict[str, int]:
    """The tiles of a product with `columns` terms: one row at full length, or enough rows for tensor cores."""
    if batch == 1:
        return {"ROWS": 1, "UNITS": 8, "COLUMNS": min(triton.next_power_of_2(columns), 2048), "num_warps": 4}
    rows = min(_padded(batch), 64)
    return {"ROWS": rows, "UNITS": 16, "COLUMNS": min(_padded(columns), 128), "num_warps": 4, "num_stages": 4}


def _padded(size: int) -> int:
    """The size of a tile's side: a power of 2, and at least 16 for tensor cores."""
    return max(triton.next_power_of_2(size), 16)


def _grid(batch: int, units: int, cut: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(units, cut["UNITS"]), triton.cdiv(batch, cut["ROWS"])


def _normed_rows(hidden: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """The RMS norm of several rows; a single row is normalised inside the product."""
    return hidden if len(hidden) == 1 else torch.nn.functional.rms_norm(hidden, gain.shape, gain, epsilon)


def project(
    hidden: Tensor, gain: Tensor, epsilon: float, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor
) -> Tensor:
    """Queries, keys and values of hidden states [batch, 1, width], side by side: [batch, features]."""
    batch, width, query, key = len(hidden), hidden.shape[-1], len(q_weight), len(k_weight)
    hidden = _normed_rows(hidden, gain, epsilon)
    out, cut = hidden.new_empty(batch, query + 2 * key), _cut(batch, width)
    blocks, groups = _grid(batch, query, cut)
    _project[blocks, 3, groups](
        hidden, gain, epsilon, q_weight, k_weight, v_weight, out, batch, width, query, key, **cut, **_early(hidden)
    )
    return out


def attend(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor, Tensor],
    buffers: dict[str, Tensor],
    front: int,
    memory: int,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention to a cache, which gets its new column here: each split's output, and the log2 of its softmax sum.

    `rope` are cosines and sines by position, [token, dim]; `rows` say of each row its position, its columns of memory,
    and how many tokens came before its block; `buffers` are [batch, kv_head, column, dim], with `memory` columns of
    memory and then those before the block that it may see in the first `front` of them. A token sees the newest
    `window` of the tokens there.
    """
    batch, kv_heads, room, dim = buffers["key"].shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    splits = min(triton.next_power_of_2(triton.cdiv(PROGRAMS, batch * kv_heads)), SPLITS)
    stages = 2 if splits == 1 else 3  # many rows keep the chip busy by their number: smaller programs, more of them
    mixed, sums = qkv.new_empty(splits, batch, heads, dim), qkv.new_empty(splits, batch, heads, dtype=torch.float32)
    _attend[batch, kv_heads, splits](
        qkv, *rope, *rows, buffers["key"], buffers["value"], buffers.get("raw"), mixed, sums, scale * LOG2E, batch,
        room, front, memory, window, heads, heads // kv_heads, dim, "raw" in buffers, splits,
        MEMBERS=_padded(heads // kv_heads), FEATURES=_padded(dim),
        KEYS=64 * 2 // qkv.element_size(), num_warps=4, num_stages=stages, **_early(qkv),
    )  # fmt: skip
    return mixed, sums


def merge(mixed: Tensor, sums: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """The output projection of the merged splits, added to `residual` [batch, 1, width]."""
    splits, batch, heads, dim = mixed.shape
    if splits == 1:
        return contract(mixed.view(batch, heads * dim), weight, residual)
    out, cut = torch.empty_like(residual), _cut(1, heads * dim)
    features = _padded(dim)
    _merge[triton.cdiv(len(weight), cut["UNITS"]), batch](
        mixed, sums, weight, residual, out, batch, len(weight), heads, dim, splits, cut["UNITS"],
        max(cut["COLUMNS"] // features, 1), features, num_warps=cut["num_warps"], **_early(mixed),
    )  # fmt: skip
    return out


def expand(hidden: Tensor, gain: Tensor, epsilon: float, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """The MLP's inner units, SiLU(gate) * up, of hidden states [batch, 1, width]: [batch, unit]."""
    batch, (inner, width) = len(hidden), gate_weight.shape
    hidden = _normed_rows(hidden, gain, epsilon)
    out, cut = hidden.new_empty(batch, inner), _cut(batch, width)
    _expand[_grid(batch, inner, cut)](
        hidden, gain, epsilon, gate_weight, up_weight, out, batch, width, inner, **cut, **_early(hidden)
    )
    return out


def contract(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """The product of `x` [batch, unit] with `weight`, added to `residual` [batch, 1, width]."""
    (batch, inner), out = x.shape, torch.empty_like(residual)
    cut = _cut(batch, inner)
    _contract[_grid(batch, len(weight), cut)](x, weight, residual, out, batch, inner, len(weight), **cut, **_early(x))
    return out
