"""HiPPO-LegS in closed form: the mathematics of the memory, in float64.

The history is a function on [0, t]: token k is its value on [k, k+1). The memory state holds its first `order`
coefficients in the basis phi_n(u) = sqrt(2n+1) P_n(2u-1), orthonormal on the unit interval, u = x/t. Zero-order hold is
exact for such step functions, so what the paper builds from one matrix per token needs no token loop at all:

    transition      P[n,m] = r * integral of phi_n(r u) phi_m(u), r = start/end       state at start -> state at end
    projection      K[n,k] = Phi_n((k+1)/t) - Phi_n(k/t), Phi_n' = phi_n              tokens -> state
    basis           R[j,n] = phi_n(u_j)                                               state -> reconstruction at u_j
    join            C = P(r) C_first + S P(1-r) S C_second, S = diag((-1)^n)          states of parts -> of the whole

Any start and end are possible: there is no longest history. See docs/equations.md for the paper's own formulas.
"""

import itertools
import math
from collections.abc import Iterator
from numbers import Integral, Real

import torch

from elastic_memory.common.speedups import find
from elastic_memory.shapes import Float, Tensor

METHODS = ("zoh", "forward", "backward", "bilinear")

# Numbers per operation of a recurrence. A GPU needs few long launches; a CPU as many as fit its caches and stay below
# the threshold of multithreading.
AT_ONCE = {"cpu": 2**15, "cuda": 2**22}

Device = torch.device | str | int | None

fast = find("hippo")


def legs(order: int, *, device: Device = None) -> tuple[Float[Tensor, "order order"], Float[Tensor, " order"]]:
    """A and B of c'(t) = (-A c + B f) / t (eq. 3), the differential equation of a growing history's coefficients."""
    _check_order(order)
    root = torch.arange(1, 2 * order, 2, dtype=torch.float64, device=device).sqrt()
    diagonal = torch.arange(1, order + 1, dtype=torch.float64, device=device)
    return torch.outer(root, root).tril(-1) + torch.diag(diagonal), root


def step(
    order: int, time: int | float, method: str = "zoh", *, device: Device = None
) -> tuple[Float[Tensor, "order order"], Float[Tensor, " order"]]:
    """One token of the recurrence (eq. 4), from `time` to `time + 1`: `state = A_bar @ state + B_bar * token`.

    At time 0 there is nothing to carry and the state becomes the constant function through the token, whatever the
    method: the limit of zero-order hold, where the formulas themselves divide by zero.
    """
    _check_order(order)
    _check_times(time, time)
    if method not in METHODS:
        raise ValueError(f"method {method!r}: the discretisations are {', '.join(METHODS)}")
    identity = torch.eye(order, dtype=torch.float64, device=device)
    if time == 0:
        return torch.zeros_like(identity), identity[0]
    if method == "zoh":
        carry = transition(order, time, time + 1, device=device)
        # A^-1 (I - carry) B, because A commutes with its power and A^-1 B = e_0.
        return carry, identity[0] - carry[:, 0]
    a, b = legs(order, device=device)
    before, after = {"forward": (1.0, 0.0), "backward": (0.0, 1.0), "bilinear": (0.5, 0.5)}[method]
    both = torch.cat([identity - before * a / time, b[:, None] / time], dim=1)
    both = torch.linalg.solve_triangular(identity + after * a / time, both, upper=False)
    return both[:, :-1], both[:, -1]


def transition(
    order: int, start: int | float, end: int | float, *, device: Device = None
) -> Float[Tensor, "order order"]:
    """P of eq. 6, which carries the state from time `start` to time `end`: (start/end)^A, lower triangular."""
    _check_order(order)
    _check_times(start, end)
    ratio = start / end if start < end else 1.0
    return transitions(order, torch.tensor([ratio], dtype=torch.float64, device=device))[0]


def transitions(
    order: int, ratios: Float[Tensor, " ratio"], dtype: torch.dtype = torch.float64
) -> Float[Tensor, "ratio order order"]:
    """r^A for several ratios r = start/end in [0, 1] at once, in O(order^2) each, cast last.

    Row n holds the coefficients of phi_n(r u) in the basis phi_m(u). In z = 2u - 1 that is phi_n at r z + r - 1, and
    z phi_m = b_m phi_{m-1} + b_{m+1} phi_{m+1}; so Legendre's three-term recurrence carries rows n-1 and n to row n+1.
    """
    kernels = fast and fast.kernels_on(ratios.device)
    if kernels:
        return kernels.transitions(order, ratios, dtype)
    power = ratios.new_zeros(len(ratios), order, order)
    power[:, 0, 0] = ratios
    b = [m / math.sqrt(4 * m**2 - 1) for m in range(1, order)]
    shift, reach = (ratios - 1)[:, None], ratios[:, None] * ratios.new_tensor(b)
    for n in range(order - 1):
        last, new = power[:, n, : n + 1], power[:, n + 1, : n + 2]
        torch.mul(last, shift, out=new[:, : n + 1])
        new[:, 1:].addcmul_(last, reach[:, : n + 1])
        if n:
            new[:, :n].addcmul_(last[:, 1:], reach[:, :n])
            new[:, :n].sub_(power[:, n - 1, :n], alpha=b[n - 1])
        new.div_(b[n])
    return power.to(dtype)


def projection(
    order: int, start: int, end: int, until: int | None = None, *, device: Device = None
) -> Float[Tensor, "order token"]:
    """The HiPPO kernel K of eq. 6: what tokens `start` .. `end - 1` add to the state at time `until`, default `end`."""
    _check_order(order)
    _check_times(start, end)
    if not (isinstance(start, Integral) and isinstance(end, Integral)):
        raise ValueError(f"tokens {start} to {end}: a projection runs over whole tokens")
    until = end if until is None else until
    _check_times(end, until)
    edges = torch.arange(start, end + 1, dtype=torch.float64, device=device) / (until or 1)
    return projections(order, edges)


def projections(
    order: int, edges: Float[Tensor, "... edge"], dtype: torch.dtype = torch.float64
) -> Float[Tensor, "... order token"]:
    """Integrals of phi_n between neighbouring points: the kernels of any number of blocks in one pass, cast last."""
    kernel = edges.new_empty(*edges.shape[:-1], order, edges.shape[-1] - 1, dtype=dtype)
    by_row = kernel.movedim(-2, 0)
    for rows, areas in _antiderivatives(order, edges.flatten()):
        areas = areas.unflatten(1, edges.shape)
        torch.sub(areas[..., 1:], areas[..., :-1], out=by_row[rows])
    return kernel


def basis(order: int, u: Tensor | list[float], *, device: Device = None) -> Float[Tensor, "point order"]:
    """R of eq. 7: phi_n at the points `u` of the history, 0 its beginning and 1 now."""
    _check_order(order)
    u = _check_points(u, device)
    values = next(legendre(u, order - 1))[1:]
    return values.mul_(_roots(order, u.device)).T


def integral(order: int, u: Tensor | list[float], *, device: Device = None) -> Float[Tensor, "point order"]:
    """Phi_n, the integral of phi_n from 0 to `u`: what projections and averages over cells are made of."""
    _check_order(order)
    u = _check_points(u, device)
    values = u.new_empty(order, len(u))
    for rows, areas in _antiderivatives(order, u):
        values[rows] = areas
    return values.T


def compress(
    signal: Float[Tensor, "token ..."], order: int, method: str = "zoh", origin: int = 0, *, device: Device = None
) -> Float[Tensor, "order ..."]:
    """The memory state after a whole signal, one state per feature.

    `origin` is the time of the first token: 0 as in the paper's formulas (the exact projection of the signal), 1 as in
    its table of synthetic signals (an empty token stands before the first; docs/choices.md, "origin").
    """
    _check_order(order)
    _check_signal(signal, "signal")
    if origin not in (0, 1):
        raise ValueError(f"origin {origin!r}: give 0 or 1, the time of the first token")
    device = signal.device if device is None else device
    tokens, features = len(signal), signal.reshape(len(signal), -1)
    state = torch.zeros(order, features.shape[1], dtype=torch.float64, device=device)
    if method == "zoh":
        chunk = max(1, 2**24 // order)  # the kernel of a long signal is never held whole
        for first in range(0, tokens, chunk):
            last = min(first + chunk, tokens)
            kernel = projection(order, first + origin, last + origin, until=tokens + origin, device=device)
            state += kernel @ features[first:last].to(device, torch.float64)
    else:
        for time, token in enumerate(features.to(device, torch.float64), start=origin):
            carry, gain = step(order, time, method, device=device)
            state = carry @ state + torch.outer(gain, token)
    return state.reshape(order, *signal.shape[1:])


def reconstruct(
    state: Float[Tensor, "order ..."], u: Tensor | list[float], *, device: Device = None
) -> Float[Tensor, "point ..."]:
    """The history that a state stands for (eq. 8), at the points `u`: 0 its beginning, 1 now."""
    _check_signal(state, "state")
    device = state.device if device is None else device
    coefficients = state.reshape(len(state), -1).to(device, torch.float64)
    return (basis(len(state), u, device=device) @ coefficients).reshape(-1, *state.shape[1:])


def join(
    first: Float[Tensor, "order ..."],
    second: Float[Tensor, "order ..."],
    tokens_first: int | float,
    tokens_second: int | float,
    *,
    device: Device = None,
) -> Float[Tensor, "order ..."]:
    """The state of one history after the other, from their states alone: exact, and associative."""
    for state, name in ((first, "first state"), (second, "second state")):
        _check_signal(state, name)
    if first.shape != second.shape:
        raise ValueError(
            f"states of shapes {list(first.shape)} and {list(second.shape)}: give states of the same shape"
        )
    device = first.device if device is None else device
    operators = joiners(len(first), tokens_first, tokens_second, device=device)
    parts = (state.reshape(len(state), -1).to(device, torch.float64) for state in (first, second))
    before, after = (operator @ part for operator, part in zip(operators, parts, strict=True))
    return (before + after).reshape(first.shape)


def joiners(
    order: int, tokens_first: int | float, tokens_second: int | float, *, device: Device = None
) -> tuple[Float[Tensor, "order order"], Float[Tensor, "order order"]]:
    """P(r) and S P(1-r) S, r the first history's share of the tokens: the operators of `join`.

    On a part of [0, 1] a polynomial of degree below `order` is one again, so nothing else of either history is needed.
    The second is the first seen from the other end, where phi_n(1 - u) = (-1)^n phi_n(u).
    """
    _check_order(order)
    _check_times(0, tokens_first)
    _check_times(0, tokens_second)
    both = tokens_first + tokens_second or 1
    shares = torch.tensor([tokens_first / both, tokens_second / both], dtype=torch.float64, device=device)
    first, second = transitions(order, shares)
    sign = 1 - 2 * (torch.arange(order, device=device) % 2)
    return first, sign[:, None] * second * sign


def legendre(u: Float[Tensor, " point"], rows: int, shared: int = 2) -> Iterator[Float[Tensor, "row point"]]:
    """P_{-1}, P_0, P_1, ... at 2u - 1 in endless panels, from which basis, integrals and projections are made.

    A panel is the last `shared` rows of the one before and `rows` more, in the same memory: it is overwritten when the
    next is asked for. P_{-1} = -1, which the recurrence never uses, makes Phi_0 = u an integral like all others.
    """
    panel, known = u.new_empty(shared + rows, len(u)), 2
    panel[0], panel[1] = -1, 1
    for first in itertools.count(-1, rows):
        _climb(panel[known - 2 :], u, first + known)
        yield panel
        for row in range(shared):
            panel[row] = panel[row + rows]
        known = shared


def _climb(panel: Float[Tensor, "row point"], u: Float[Tensor, " point"], degree: int) -> None:
    """Fill all rows but the first two: P_degree, P_{degree+1}, ..."""
    kernels = fast and fast.kernels_on(u.device)
    if kernels:
        return kernels.climb(panel, u, degree)
    z = 2 * u - 1
    below, here = panel[:2].unbind()
    for n, row in enumerate(panel[2:].unbind(), degree):
        torch.mul(below, (1 - n) / n, out=row).addcmul_(z, here, value=(2 * n - 1) / n)
        below, here = here, row


def _antiderivatives(order: int, u: Float[Tensor, " point"]) -> Iterator[tuple[slice, Float[Tensor, "row point"]]]:
    """Phi_0, Phi_1, ... at u, some rows at a time: Phi_n = (P_{n+1} - P_{n-1}) / (2 sqrt(2n+1))."""
    some = min(order, max(1, AT_ONCE.get(u.device.type, AT_ONCE["cpu"]) // max(1, len(u))))
    rows = some * -(-8 // some)  # at least 8: a panel repeats two rows of the last one
    twice = 2 * _roots(order, u.device)
    for begin, panel in zip(range(0, order, rows), legendre(u, rows), strict=False):
        for first in range(begin, min(begin + rows, order), some):
            last = min(first + some, order)
            below, above = panel[first - begin : last - begin], panel[first - begin + 2 : last - begin + 2]
            yield slice(first, last), (above - below).div_(twice[first:last])


def _roots(order: int, device: Device) -> Float[Tensor, "order 1"]:
    """sqrt(2n+1), as a column."""
    return torch.arange(1, 2 * order, 2, dtype=torch.float64, device=device).sqrt()[:, None]


def _check_order(order: int) -> None:
    if not isinstance(order, Integral) or order < 1:
        raise ValueError(f"order {order!r}: a memory state has a whole number of coefficients, at least 1")


def _check_times(start: int | float, end: int | float) -> None:
    for time in (start, end):
        if not isinstance(time, Real) or not math.isfinite(time) or time < 0:
            raise ValueError(f"time {time!r}: times are token counts, 0 or more")
    if start > end:
        raise ValueError(f"from time {start} to time {end}: the start must not be after the end")


def _check_points(u: Tensor | list[float], device: Device) -> Float[Tensor, " point"]:
    u = torch.as_tensor(u, dtype=torch.float64)
    if u.ndim != 1:
        raise ValueError(f"points of shape {list(u.shape)}: give a one-dimensional list")
    if u.numel() and not bool(((u >= 0) & (u <= 1)).all()):
        outside = u[~((u >= 0) & (u <= 1))][0].item()
        raise ValueError(f"point {outside}: give points between 0 (the first token) and 1 (now)")
    return u.to(device=device)  # after the checks, which would synchronise with a GPU


def _check_signal(signal: Tensor, name: str) -> None:
    if not isinstance(signal, Tensor) or not signal.is_floating_point():
        kind = signal.dtype if isinstance(signal, Tensor) else type(signal).__name__
        raise ValueError(f"{name} of {kind}: give a floating-point tensor (convert with .double())")
    if signal.ndim == 0 or not len(signal):
        raise ValueError(f"{name} of shape {list(signal.shape)}: give at least one entry along the first axis")
    if not bool(torch.isfinite(signal).all()):
        raise ValueError(f"{name} holds NaN or infinity: every entry must be finite")
