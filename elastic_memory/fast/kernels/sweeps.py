"""The loops over n of `hippo` in one launch each, in float64.

Each launch costs a few microseconds; a loop over 8,640 polynomials in plain torch has tens of thousands of them. Here
every thread runs its whole recurrence, and no thread waits for another.
"""

# Constants of the compiled program are in capitals, as Triton has it.
# ruff: noqa: N803

import torch
import triton
import triton.language as tl

from elastic_memory.shapes import Float, Tensor

LANES = 64  # points or columns per program, one to a thread: few, so that short sweeps too occupy the whole chip
WARPS = LANES // 32

# Numbers below SMALL are kept as multiples of it and written as 0 (see `_column`).
SMALL = tl.constexpr(2.0**-500)
LARGE = tl.constexpr(2.0**500)


def climb(panel: Float[Tensor, "row point"], u: Float[Tensor, " point"], degree: int) -> None:
    """Fill all rows but the first two with P_degree, P_{degree+1}, ... at 2u - 1; the first two hold those before."""
    rows, points = panel.shape
    if points and rows > 2:
        with torch.cuda.device_of(u):
            _climb[(triton.cdiv(points, LANES),)](u, panel, degree, rows - 2, points, LANES=LANES, num_warps=WARPS)


@triton.jit(do_not_specialize=["degree", "rows", "points"])
def _climb(u, panel, degree, rows, points, LANES: tl.constexpr):
    point = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = point < points
    z = 2 * tl.load(u + point, mask=inside, other=0.0) - 1
    row = panel + point
    below = tl.load(row, mask=inside, other=0.0)
    row += points
    here = tl.load(row, mask=inside, other=0.0)
    n = degree.to(tl.float64)
    while n < degree + rows:
        above = (1 - n) / n * below + (2 * n - 1) / n * (z * here)
        row += points
        tl.store(row, above, mask=inside)
        below, here = here, above
        n += 1


def transitions(
    order: int, ratios: Float[Tensor, " ratio"], dtype: torch.dtype = torch.float64
) -> Float[Tensor, "ratio order order"]:
    """r^A for several ratios, column by column.

    Row by row, as `hippo.transitions` goes, every entry needs its neighbours. Down a column it needs only those above:
    P[n,m] = sqrt((2n+1)(2m+1)) r^(m+1) J / (n+m+1) with J the Jacobi polynomial of degree n-m to (-1, 2m+1) at 2r - 1,
    which has a three-term recurrence of its own. For U[n,m] = P[n,m] sqrt(2m+1) / sqrt(2n+1) and L_n = n (n+1) it reads

        (n-1) (L_n - L_m) U[n] = (2n-1) (L_{n-1} (2r-1) - L_m) U[n-1] - n (L_{n-2} - L_m) U[n-2],

    from U[m,m] = r^(m+1) and U[m+1,m] = -(2m+1) (1-r) U[m,m] on.
    """
    power = ratios.new_empty(len(ratios), order, order, dtype=dtype)
    if len(ratios):
        grid = (triton.cdiv(order, LANES), len(ratios))
        with torch.cuda.device_of(ratios):
            _column[grid](ratios.contiguous(), power, order, LANES=LANES, num_warps=WARPS)
    return power


@triton.jit(do_not_specialize=["order"])
def _column(ratios, power, order, LANES: tl.constexpr):
    """One column per thread, from the top: r, r^2, ... down to its diagonal, U from there on.

    r^(m+1) may lie far below the smallest float64 and the column still grow to 1 further down. So a thread counts how
    many factors LARGE its numbers have been raised by, and takes them back as they grow.
    """
    column = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = column < order
    which = tl.program_id(1).to(tl.int64)
    r = tl.load(ratios + which)
    entry = power + which * order * order + column
    m = column.to(tl.float64)
    own = m * (m + 1)
    below = tl.zeros([LANES], tl.float64)
    here = below + r
    raised = tl.zeros([LANES], tl.int32)
    n = r * 0
    while n < order:
        shown = (n >= m) & (raised == 0)
        tl.store(entry, tl.where(shown, here * tl.sqrt((2 * n + 1) / (2 * m + 1)), 0.0), mask=inside)
        entry += order
        n += 1
        last = (n - 1) * n
        # L_{n-1} (2r-1) - L_m, written so that nothing is lost where r is almost 1.
        gain = (2 * n - 1) * ((last - own) - 2 * last * (1 - r))
        following = gain * here - n * ((n - 2) * (n - 1) - own) * below
        following = following / tl.where(n > m + 1, (n - 1) * (n * (n + 1) - own), 1.0)
        following = tl.where(n == m + 1, -(2 * m + 1) * (1 - r) * here, following)
        below, here = here, tl.where(n > m, following, r * here)

        tiny = (n <= m) & (tl.abs(here) < SMALL)
        grown = (raised > 0) & (tl.abs(here) > 1)
        factor = tl.where(tiny, LARGE, tl.where(grown, SMALL, 1.0))
        below, here = below * factor, here * factor
        raised += tiny.to(tl.int32) - grown.to(tl.int32)
