"""HiPPO the slow, obvious way: matrix exponentials token by token, quadrature, polynomials one at a time."""

import functools
import math

import numpy as np
from scipy.linalg import expm
from scipy.special import eval_legendre


def legs(order: int) -> tuple[np.ndarray, np.ndarray]:
    a = np.zeros((order, order))
    for n in range(order):
        a[n, n] = n + 1
        for k in range(n):
            a[n, k] = math.sqrt((2 * n + 1) * (2 * k + 1))
    return a, np.array([math.sqrt(2 * n + 1) for n in range(order)])


def power(order: int, start: float, end: float) -> np.ndarray:
    """(start/end)^A, as the paper writes it."""
    a, _ = legs(order)
    return expm(a * math.log(start / end)) if start else np.zeros((order, order))


def step(order: int, time: int, method: str) -> tuple[np.ndarray, np.ndarray]:
    a, b = legs(order)
    eye = np.eye(order)
    if time == 0:
        return 0 * eye, eye[0]
    if method == "zoh":
        carry = power(order, time, time + 1)
        return carry, np.linalg.inv(a) @ (eye - carry) @ b
    if method == "forward":
        return eye - a / time, b / time
    if method == "backward":
        inverse = np.linalg.inv(eye + a / time)
        return inverse, inverse @ b / time
    inverse = np.linalg.inv(eye + a / (2 * time))
    return inverse @ (eye - a / (2 * time)), inverse @ b / time


def recur(state: np.ndarray, signal: np.ndarray, start: int, method: str = "zoh") -> np.ndarray:
    """The recurrence of eq. 4, one token after another, from the state at time `start`."""
    for time, token in enumerate(signal, start=start):
        carry, gain = step(len(state), time, method)
        state = carry @ state + gain[:, None] * token
    return state


gauss = functools.cache(np.polynomial.legendre.leggauss)


def phi(n: int, u: np.ndarray) -> np.ndarray:
    return math.sqrt(2 * n + 1) * eval_legendre(n, 2 * u - 1)


def mean(n: int, left: float, right: float) -> float:
    """The mean of phi_n over a cell, by enough Gauss-Legendre points to be exact."""
    nodes, weights = gauss(n // 2 + 1)
    return float(weights @ phi(n, left + (right - left) * (nodes + 1) / 2)) / 2


def kernel(order: int, start: int, end: int, until: int) -> np.ndarray:
    """What tokens start .. end-1 add to the state at time `until`: integrals of phi_n over their cells."""
    return np.array([[mean(n, k / until, (k + 1) / until) / until for k in range(start, end)] for n in range(order)])


def read(order: int, points: np.ndarray) -> np.ndarray:
    """R at points, or averaged over cells."""
    if points.ndim == 1:
        return np.stack([phi(n, points) for n in range(order)], axis=1)
    return np.array([[mean(n, left, right) for n in range(order)] for left, right in points])
