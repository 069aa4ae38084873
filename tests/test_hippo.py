"""The mathematics against matrix exponentials, quadrature and published numbers (float64)."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_memory import hippo
from tests.oracles import hippo as oracle

ROOT3, ROOT5, ROOT7 = math.sqrt(3), math.sqrt(5), math.sqrt(7)
orders = st.integers(1, 40)
times = st.integers(0, 10**7)
quick = settings(deadline=None, max_examples=40)


def close(actual, expected, within: float) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=within)


def sines(count: int, length: int = 1024) -> torch.Tensor:
    time = torch.arange(length, dtype=torch.float64) / length
    return sum(torch.sin(2 * math.pi * i * time) for i in range(1, count + 1))


def test_legs_as_printed():
    a, b = hippo.legs(4)
    close(b, [1, ROOT3, ROOT5, ROOT7], 1e-15)
    close(a[3], [ROOT7, ROOT3 * ROOT7, ROOT5 * ROOT7, 4], 1e-14)
    close(torch.linalg.solve(a, b), [1, 0, 0, 0], 1e-14)


@pytest.mark.parametrize(
    ("time", "method", "carry", "gain"),
    [
        (1, "zoh", [[0.5, 0, 0], [-0.433012701892, 0.25, 0], [0, -0.484122918276, 0.125]], [0.5, 0.433012701892, 0]),
        (
            2,
            "zoh",
            [
                [0.666666666667, 0, 0],
                [-0.384900179460, 0.444444444444, 0],
                [-0.165634665000, -0.573775310549, 0.296296296296],
            ],
            [0.333333333333, 0.384900179460, 0.165634665000],
        ),
        (
            1,
            "bilinear",
            [[0.333333333333, 0, 0], [-0.577350269190, 0, 0], [-0.149071198500, -0.774596669241, -0.2]],
            [0.666666666667, 0.577350269190, 0.149071198500],
        ),
        (
            1,
            "backward",
            [[0.5, 0, 0], [-0.288675134595, 0.333333333333, 0], [0, -0.322748612184, 0.25]],
            [0.5, 0.288675134595, 0],
        ),
    ],
)
def test_steps_as_published(time, method, carry, gain):
    ours = hippo.step(3, time, method)
    close(ours[0], carry, 1e-12)
    close(ours[1], gain, 1e-12)


@pytest.mark.parametrize(
    ("method", "late", "early"),
    [
        ("forward", [2.5, 1.443375672974, 0], [3.0, 1.154700538379, 0]),
        ("backward", [2.0, 1.154700538379, 0], [2.5, 0.866025403784, 0]),
        (
            "bilinear",
            [2.222222222222, 1.347150628109, -0.054853038409],
            [2.714285714286, 1.072221928495, -0.063887656500],
        ),
        ("zoh", [2.0, 1.385640646055, 0], [2.5, 1.082531754731, 0]),
    ],
)
def test_states_as_published(method, late, early):
    signal = torch.tensor([1.0, 2, 3, 4])
    close(hippo.compress(signal, 3, method, origin=1), late, 1e-12)
    close(hippo.compress(signal, 3, method, origin=0), early, 1e-12)


@pytest.mark.parametrize(
    ("method", "origin", "first", "norm"),
    [
        ("forward", 1, [0, -1.260072236988, -0.004775184725, -0.407737505508], 1.607036145636),
        ("backward", 1, [0, -1.255162071033, -0.009466838944, -0.395878438820], 1.557330797926),
        ("bilinear", 1, [0, -1.257613559453, -0.007134841835, -0.401759936529], 1.580775730199),
        ("zoh", 1, [0, -1.256386619395, -0.009494564787, -0.398198096373], 1.580339247614),
        ("zoh", 0, [0, -1.258841697694, -0.004761204034, -0.405350859788], 1.581111583501),
    ],
)
def test_five_sines_as_published(method, origin, first, norm):
    state = hippo.compress(sines(5), 32, method, origin)
    close(state[:4], first, 1e-11)
    assert state.norm().item() == pytest.approx(norm, abs=1e-11)


@given(orders, times, times)
@quick
def test_a_transition_is_the_matrix_power(order, one, other):
    start, end = sorted((one, other + 1))
    close(hippo.transition(order, start, end), oracle.power(order, start, end), 1e-11)


@pytest.mark.parametrize(("start", "end"), [(1, 2), (15, 16), (10**6, 10**6 + 1)])
def test_a_transition_is_the_matrix_power_at_order_512(start, end):
    close(hippo.transition(512, start, end), oracle.power(512, start, end), 1e-10)


@given(st.integers(1, 200), st.lists(times, min_size=3, max_size=3))
@quick
def test_transitions_compose(order, times):
    first, second, third = sorted(times)
    once = hippo.transition(order, first, third)
    close(hippo.transition(order, second, third) @ hippo.transition(order, first, second), once, 1e-11)


@pytest.mark.parametrize(("order", "start", "end"), [(540, 1, 2), (2160, 15, 16), (2160, 9_998_848, 10_000_896)])
def test_a_transition_shrinks_by_the_root_of_the_ratio(order, start, end):
    carry = hippo.transition(order, start, end)
    assert torch.linalg.matrix_norm(carry, 2).item() == pytest.approx(math.sqrt(start / end), abs=1e-9)
    assert not carry.triu(1).any()


def test_nothing_is_carried_from_time_zero_and_all_of_it_over_no_time():
    close(hippo.transition(5, 0, 7), np.zeros((5, 5)), 0)
    close(hippo.transition(5, 7, 7), np.eye(5), 0)
    close(hippo.transition(5, 0, 0), np.eye(5), 0)
    assert hippo.projection(5, 3, 3).shape == hippo.projection(5, 0, 0).shape == (5, 0)


@given(st.integers(1, 64), st.integers(0, 10**7 - 50), st.integers(1, 12), st.integers(0, 30))
@quick
def test_projections_are_integrals_over_tokens(order, start, tokens, later):
    end, until = start + tokens, start + tokens + later
    expected = oracle.kernel(order, start, end, until)
    close(hippo.projection(order, start, end, until), expected, 1e-13)
    if not later:
        close(hippo.projection(order, start, end), expected, 1e-13)


@given(orders, st.integers(1, 3000))
@quick
def test_the_first_row_of_a_whole_history_sums_to_one(order, tokens):
    kernel = hippo.projection(order, 0, tokens)
    close(kernel.sum(1), [1.0] + [0.0] * (order - 1), 1e-13)


@given(st.integers(1, 64), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 1))
@settings(deadline=None, max_examples=15)
def test_uneven_blocks_equal_the_token_recurrence(order, blocks, origin):
    signal = np.random.default_rng(order).standard_normal((sum(blocks), 2))
    state, time = torch.zeros(order, 2, dtype=torch.float64), origin
    for block in blocks:
        tokens = torch.from_numpy(signal[time - origin : time - origin + block])
        carry, kernel = hippo.transition(order, time, time + block), hippo.projection(order, time, time + block)
        state, time = carry @ state + kernel @ tokens, time + block
    expected = oracle.recur(np.zeros((order, 2)), signal, origin)
    close(state, expected, 1e-12)
    close(hippo.compress(torch.from_numpy(signal), order, origin=origin), expected, 1e-12)


@pytest.mark.parametrize("method", hippo.METHODS)
@pytest.mark.parametrize("origin", [0, 1])
def test_every_method_equals_its_recurrence(method, origin):
    signal = np.random.default_rng(0).standard_normal((20, 3))
    expected = oracle.recur(np.zeros((6, 3)), signal, origin, method)
    close(hippo.compress(torch.from_numpy(signal), 6, method, origin), expected, 1e-9)


def test_a_signal_longer_than_one_chunk_is_compressed_whole():
    signal = torch.randn(70_000, dtype=torch.float64)
    close(hippo.compress(signal, 300), hippo.projection(300, 0, len(signal)) @ signal, 1e-13)


@given(st.integers(1, 200), st.lists(st.floats(0, 1), min_size=1, max_size=20))
@quick
def test_basis_and_integral_against_the_polynomials_themselves(order, u):
    u = np.array(u)
    close(hippo.basis(order, torch.from_numpy(u)), oracle.read(order, u), 1e-9)
    areas = [[oracle.mean(n, 0, right) * right for n in range(order)] for right in u]
    close(hippo.integral(order, torch.from_numpy(u)), areas, 1e-11)


def test_the_basis_is_orthonormal():
    nodes, weights = np.polynomial.legendre.leggauss(400)
    values = hippo.basis(400, torch.from_numpy((nodes + 1) / 2))
    close(values.T @ (torch.from_numpy(weights / 2)[:, None] * values), np.eye(400), 1e-11)


@given(orders, st.integers(1, 300), st.floats(-1e3, 1e3))
@quick
def test_a_constant_history_is_remembered_exactly(order, tokens, value):
    state = hippo.compress(torch.full((tokens, 2, 3), value, dtype=torch.float64), order)
    assert state.shape == (order, 2, 3)
    back = hippo.reconstruct(state, torch.rand(7))
    close(back, np.full((7, 2, 3), value), 1e-9)


def test_more_order_never_remembers_less():
    signal = torch.randn(512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # |signal|^2 / T minus |state|^2 is the squared distance of the history from its reconstruction.
    lost = [(signal.square().mean() - hippo.compress(signal, n).square().sum()).item() for n in (1, 8, 64, 256, 512)]
    assert lost == sorted(lost, reverse=True)
    assert 0 < lost[-1] < 0.5 * lost[0]


def test_results_are_float64_on_the_device_asked_for():
    signal = torch.randn(8, 2, dtype=torch.bfloat16)
    assert hippo.compress(signal, 4).dtype == hippo.reconstruct(hippo.compress(signal, 4).float(), [0.5]).dtype
    for result in (
        *hippo.legs(3, device="meta"),
        hippo.transition(3, 1, 2, device="meta"),
        hippo.projection(3, 1, 2, device="meta"),
    ):
        assert result.dtype == torch.float64
        assert result.device.type == "meta"


SIGNAL = torch.ones(4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: hippo.legs(0), "order 0"),
        (lambda: hippo.transition(-1, 0, 1), "order -1"),
        (lambda: hippo.transition(2.5, 0, 1), "order 2.5"),
        (lambda: hippo.transition(2, 3, 1), "from time 3 to time 1"),
        (lambda: hippo.transition(2, -3, 1), "time -3"),
        (lambda: hippo.transition(2, 1, math.nan), "time nan"),
        (lambda: hippo.transition(2, 1, math.inf), "time inf"),
        (lambda: hippo.projection(2, 0, 4, until=3), "from time 4 to time 3"),
        (lambda: hippo.projection(2, 0.5, 4), "whole tokens"),
        (lambda: hippo.step(2, -1), "time -1"),
        (lambda: hippo.step(2, 1, "euler"), "zoh, forward, backward, bilinear"),
        (lambda: hippo.compress(SIGNAL, 2, "euler"), "zoh, forward, backward, bilinear"),
        (lambda: hippo.compress(SIGNAL, 2, origin=2), "origin 2"),
        (lambda: hippo.compress(SIGNAL.long(), 2), "torch.int64"),
        (lambda: hippo.compress([1.0, 2.0], 2), "list"),
        (lambda: hippo.compress(SIGNAL / 0, 2), "NaN or infinity"),
        (lambda: hippo.compress(SIGNAL[:0], 2), r"shape \[0\]"),
        (lambda: hippo.basis(2, [0.5, 1.5]), "point 1.5"),
        (lambda: hippo.basis(2, [math.nan]), "point nan"),
        (lambda: hippo.integral(2, [-0.5]), "point -0.5"),
        (lambda: hippo.basis(2, torch.zeros(2, 2)), r"shape \[2, 2\]"),
        (lambda: hippo.reconstruct(SIGNAL, [2.0]), "point 2.0"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def noise(tokens: int, seed: int = 0, features: int = 2) -> torch.Tensor:
    return torch.randn(tokens, features, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 80), st.lists(st.integers(0, 400), min_size=2, max_size=2), st.integers(0, 3))
@quick
def test_joined_states_are_the_state_of_both_signals(order, lengths, seed):
    """The oracle: compress the concatenated signal."""
    parts = noise(sum(lengths) + 1, seed).split([lengths[0] + 1, lengths[1]])
    states = [hippo.compress(part, order) if len(part) else torch.zeros(order, 2).double() for part in parts]
    close(hippo.join(*states, *map(len, parts)), hippo.compress(torch.cat(parts), order), 1e-12)


@given(st.integers(1, 60), st.lists(st.integers(1, 200), min_size=2, max_size=9), st.randoms(use_true_random=False))
@quick
def test_any_association_gives_one_state(order, lengths, dice):
    parts = noise(sum(lengths)).split(lengths)
    known = [(hippo.compress(part, order), len(part)) for part in parts]
    while len(known) > 1:
        place = dice.randrange(len(known) - 1)
        (first, before), (second, after) = known[place : place + 2]
        known[place : place + 2] = [(hippo.join(first, second, before, after), before + after)]
    close(known[0][0], hippo.compress(torch.cat(parts), order), 1e-12)


@given(st.sampled_from([1, 7, 33]), st.integers(2, 10**6), st.floats(0, 1))
@settings(deadline=None, max_examples=10)
def test_joined_states_of_long_signals(order, tokens, where):
    cut = min(max(1, int(tokens * where)), tokens - 1)
    signal = noise(tokens, features=1)
    states = [hippo.compress(part, order) for part in (signal[:cut], signal[cut:])]
    close(hippo.join(*states, cut, tokens - cut), hippo.compress(signal, order), 1e-12)


def test_a_join_at_the_papers_order_and_of_many_features():
    signal = noise(4000).reshape(4000, 2, 1)
    states = [hippo.compress(part, 540) for part in signal.split([1234, 2766])]
    joined = hippo.join(*states, 1234, 2766)
    assert joined.shape == (540, 2, 1)
    close(joined, hippo.compress(signal, 540), 1e-12)
    assert hippo.join(states[0].float(), states[1].float(), 1234, 2766).dtype == torch.float64


def test_a_thousand_parts_keep_their_precision():
    """States of float32, as memories keep them; the join itself adds nothing that could be seen."""
    lengths = [1 + 37 * n % 101 for n in range(1000)]
    parts = noise(sum(lengths), features=1).split(lengths)
    state, tokens = torch.zeros(24, 1).double(), 0
    for part in parts:
        state = hippo.join(state, hippo.compress(part, 24).float(), tokens, len(part))
        tokens += len(part)
    exact = hippo.compress(torch.cat(parts), 24)
    assert (state - exact).norm() / exact.norm() < 1e-7


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: hippo.join(SIGNAL, SIGNAL[:3], 5, 5), r"shapes \[4\] and \[3\]"),
        (lambda: hippo.join(SIGNAL, SIGNAL, -1, 5), "time -1"),
        (lambda: hippo.join(SIGNAL, SIGNAL, 1, math.nan), "time nan"),
        (lambda: hippo.join(SIGNAL, SIGNAL / 0, 1, 1), "NaN or infinity"),
    ],
)
def test_bad_input_of_a_join_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
