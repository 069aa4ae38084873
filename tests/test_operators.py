"""The bank: both algorithms against each other and against the oracle, for any split, length and sampling."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_memory import hippo, operators
from elastic_memory.operators import Bank, Direct, Recurrent
from elastic_memory.sampling import SAMPLINGS
from tests.oracles import hippo as oracle

CPU, DOUBLE = torch.device("cpu"), torch.float64
quick = settings(deadline=None, max_examples=25)
samplings = st.sampled_from(list(SAMPLINGS))


def close(actual, expected, within: float) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=0, atol=within)


def stream(bank: Bank, signal: torch.Tensor, blocks: list[int], dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    """The reading after the last block, by the streaming algorithm."""
    state, time = torch.zeros(bank.order, signal.shape[1], dtype=dtype), 0
    for block in blocks:
        step = bank.step(time, time + block, CPU, dtype)
        state = step.transition @ state + step.projection @ signal[time : time + block].to(dtype)
        time += block
    return bank.reconstruction(time, CPU, dtype) @ state


def walk(plan: Recurrent, signal: torch.Tensor, size: int) -> list[torch.Tensor]:
    """All readings of a recurrent plan, by the indices its docstring gives."""
    blocks = signal.split(size)
    state = plan.projections[0] @ blocks[0]
    readings = [plan.reconstructions[0] @ state]
    for i in range(2, len(blocks)):
        state = plan.transitions[i - 2] @ state + plan.projections[i - 1] @ blocks[i - 1]
        readings.append(plan.reconstructions[i - 1 if len(plan.reconstructions) > 1 else 0] @ state)
    return readings


@given(st.integers(1, 40), st.integers(1, 20), samplings, st.integers(1, 60))
@quick
def test_the_direct_operator_is_reading_times_projection(order, points, sampling, history):
    bank = Bank(order, points, sampling)
    reader = oracle.read(order, bank.sample_points(history).numpy())
    close(bank.reconstruction(history, CPU, DOUBLE), reader, 1e-11)
    weights = bank.direct(history, CPU, DOUBLE)
    close(weights, reader @ oracle.kernel(order, 0, history, history), 1e-11)
    close(weights.sum(1), np.ones(points), 1e-12)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("order", [127, 128, 129, 300])
def test_panels_and_pieces_leave_no_seam(order, sampling, monkeypatch):
    monkeypatch.setitem(operators.SWEEP, "cpu", 1000)
    bank = Bank(order, 9, sampling)
    weights = operators._direct.__wrapped__(bank, (700, 4321, 1, 999, 1000), CPU, DOUBLE)
    for history, weight in zip((700, 4321, 1, 999, 1000), weights, strict=True):
        close(weight, bank.reconstruction(history, CPU, DOUBLE) @ hippo.projection(order, 0, history), 1e-12)


@given(st.integers(1, 40), samplings, st.lists(st.integers(1, 50), min_size=1, max_size=6))
@quick
def test_any_split_into_blocks_reads_the_same(order, sampling, blocks):
    bank = Bank(order, 7, sampling)
    signal = torch.randn(sum(blocks), 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(order))
    expected = bank.direct(len(signal), CPU, DOUBLE) @ signal
    close(stream(bank, signal, blocks), expected, 1e-11)
    close(stream(bank, signal, [len(signal)]), expected, 1e-11)


@given(st.integers(1, 64), st.integers(0, 10**7 - 4096), st.integers(1, 2048), st.integers(1, 2048))
@quick
def test_far_out_one_long_step_equals_two(order, start, first, second):
    bank = Bank(order, 5)
    one, two = (
        bank.step(start, start + first, CPU, DOUBLE),
        bank.step(start + first, start + first + second, CPU, DOUBLE),
    )
    both = bank.step(start, start + first + second, CPU, DOUBLE)
    close(two.transition @ one.transition, both.transition, 1e-11)
    close(torch.cat([two.transition @ one.projection, two.projection], dim=1), both.projection, 1e-12)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("size", "blocks"), [(16, 6), (33, 2), (1, 9), (64, 3)])
def test_both_algorithms_of_a_plan_agree(sampling, size, blocks):
    bank = Bank(24, 10, sampling)
    direct = bank.plan(size, blocks, CPU, DOUBLE, algorithm="direct")
    recurrent = bank.plan(size, blocks, CPU, DOUBLE, algorithm="recurrent")
    assert isinstance(direct, Direct)
    assert isinstance(recurrent, Recurrent)
    assert [tuple(weight.shape) for weight in direct.weights] == [(10, size * i) for i in range(1, blocks)]
    signal = torch.randn(size * blocks, 3, dtype=DOUBLE)
    readings = walk(recurrent, signal, size)
    for weight, reading in zip(direct.weights, readings, strict=True):
        close(weight @ signal[: weight.shape[1]], reading, 1e-11)


def test_gradients_agree_on_both_algorithms():
    bank, gradients = Bank(24, 10, "exponential"), []
    for algorithm in ("direct", "recurrent"):
        signal = torch.randn(96, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)).requires_grad_()
        plan = bank.plan(16, 6, CPU, DOUBLE, algorithm=algorithm)
        readings = (
            [weight @ signal[: weight.shape[1]] for weight in plan.weights]
            if isinstance(plan, Direct)
            else walk(plan, signal, 16)
        )
        torch.cat(readings).square().sum().backward()
        gradients.append(signal.grad)
    close(gradients[0], gradients[1], 1e-10)


def test_a_single_block_needs_nothing():
    bank = Bank(8, 4)
    assert bank.plan(16, 1, CPU, algorithm="direct").weights == ()
    assert [len(part) for part in bank.plan(16, 1, CPU, algorithm="recurrent")] == [0, 0, 0]


def test_uniform_reads_every_history_with_one_matrix():
    assert len(Bank(8, 4, "uniform").plan(16, 6, CPU, algorithm="recurrent").reconstructions) == 1
    assert len(Bank(8, 4, "exponential").plan(16, 6, CPU, algorithm="recurrent").reconstructions) == 5


def test_the_cheaper_algorithm_is_taken():
    cost = Bank(540, 512).cost(2048, 16, width=1440)
    assert {algorithm: round(flops / 1e9) for algorithm, flops in cost.items()} == {"direct": 362, "recurrent": 71}
    assert round(Bank(2160, 512).cost(2048, 16, width=1440)["recurrent"] / 1e9) == 427
    assert isinstance(Bank(8, 32).plan(64, 5, CPU), Recurrent)
    assert isinstance(Bank(300, 32).plan(64, 5, CPU), Direct)


def test_a_float32_stream_of_16_blocks_stays_close_to_the_direct_operator():
    bank = Bank(540, 512, "exponential")
    signal = torch.randn(16 * 2048, 4, generator=torch.Generator().manual_seed(2))
    expected = bank.direct(len(signal), CPU, DOUBLE) @ signal.double()
    reading = stream(bank, signal, [2048] * 16, torch.float32)
    assert (reading - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matrices_are_cast_last(dtype):
    bank = Bank(140, 4, "exponential")
    assert torch.equal(bank.step(15, 16, CPU, dtype).transition, hippo.transition(140, 15, 16).to(dtype))
    assert torch.equal(bank.direct(300, CPU, dtype), bank.direct(300, CPU, DOUBLE).to(dtype))
    for algorithm in ("direct", "recurrent"):
        exact = [part for part in bank.plan(50, 4, CPU, DOUBLE, algorithm=algorithm)]
        # what is carried from block to block stays wide
        kept = dtype if algorithm == "direct" else torch.promote_types(dtype, torch.float32)
        for cast, full in zip(bank.plan(50, 4, CPU, dtype, algorithm=algorithm), exact, strict=True):
            for ours, theirs in zip(cast, full, strict=True):
                assert torch.equal(ours, theirs.to(kept))


def test_equal_banks_share_and_old_blocks_are_forgotten():
    first = Bank(16, 4, "exponential", (("decay", 0.9),)).step(0, 8, CPU)
    assert Bank(16, 4, "exponential", (("decay", 0.9),)).step(0, 8, "cpu") is first
    forgotten = weakref.ref(first.transition)
    del first
    for start in range(8, 8 * 18, 8):  # a stretch of sixteen blocks is kept, and no more
        Bank(16, 4).step(start, start + 8, CPU)
    gc.collect()
    assert forgotten() is None


@pytest.mark.parametrize("streams", [[(17, 0), (18, 0)], [(17, 0), (17, 1)], [(17, 0), (17, 40)]])
def test_two_streams_in_turns_do_not_rob_each_other(streams, monkeypatch):
    """Two models, or two rows of one: stretches are built once or twice each, not for every block; two are kept."""
    built, transitions, alive = [], hippo.transitions, []
    monkeypatch.setattr(hippo, "transitions", lambda order, *others: built.append(order) or transitions(order, *others))
    for block in range(64):
        for order, ahead in streams:
            start = 8 * (block + ahead)
            alive.append(weakref.ref(Bank(order, 4).step(start, start + 8, CPU).transition))
    assert len(built) <= 10
    gc.collect()
    assert len({id(one()) for one in alive if one() is not None}) <= 2 * 16


def test_matrices_first_asked_for_in_inference_mode_serve_training():
    with torch.inference_mode():
        step = Bank(19, 4).step(0, 8, CPU)
    signal = torch.randn(8, 2, requires_grad=True)
    (step.projection @ signal).sum().backward()
    assert signal.grad is not None
    assert not step.projection.requires_grad


def test_a_sampling_of_ones_own():
    bank = Bank(16, 3, lambda points, history: torch.linspace(0.5, 1, points))
    close(bank.reconstruction(100, CPU, DOUBLE), oracle.read(16, np.linspace(0.5, 1, 3)), 1e-12)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Bank(0, 4), "order 0"),
        (lambda: Bank(4, 0), "0 points"),
        (lambda: Bank(4, 10**9), "1,000,000,000 points: give 1 to 1,048,576"),
        (lambda: Bank(10**9, 4), "order 1,000,000,000"),
        (lambda: Bank(4, 4, "exponental"), "did you mean 'exponential'"),
        (lambda: Bank(4, 4, "uniform", (("decay", 0.5),)), "takes none"),
        (lambda: Bank(4, 4).plan(8, 2, CPU, algorithm="scenic"), "direct or recurrent"),
        (lambda: Bank(4, 4).plan(0, 2, CPU), "2 blocks of 0 tokens"),
        (lambda: Bank(4, 4).step(8, 4, CPU), "from time 8 to time 4"),
        (lambda: Bank(4, 4).reconstruction(0, CPU), "0 tokens"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_pieces_cover_every_token_once():
    for most, histories in itertools.product((1, 7, 64), ((5,), (3, 70, 1), (1,) * 20)):
        pieces = [piece for group in operators._pieces(histories, most) for piece in group]
        for which, history in enumerate(histories):
            covered = [k for w, first, last in pieces if w == which for k in range(first, last)]
            assert covered == list(range(history))


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_gpu_builds_the_same_matrices(sampling):
    bank = Bank(300, 32, sampling)
    for algorithm in ("direct", "recurrent"):
        here, there = (bank.plan(256, 5, device, DOUBLE, algorithm=algorithm) for device in ("cpu", "cuda"))
        for ours, theirs in zip(here, there, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                close(other.cpu(), one, 1e-11)


@pytest.mark.gpu
def test_the_largest_bank_takes_at_most_twice_what_it_returns():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = Bank(8640, 512, "exponential").plan(2048, 16, "cuda").weights
    returned = sum(weight.numel() * weight.element_size() for weight in weights)
    assert torch.cuda.max_memory_allocated() - before < 2 * returned
    close(weights[-1].sum(1).cpu(), np.ones(512), 1e-4)


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 200), samplings)
@quick
def test_a_stream_that_began_anywhere_reads_and_writes_the_same(order, size, start, sampling):
    """Operators of blocks that do not stand at multiples of their size, built for several blocks at once."""
    bank = Bank(order, 5, sampling)
    for begin in range(start, start + 20 * size, size):
        step, end = bank.step(begin, begin + size, CPU, DOUBLE, every=size), begin + size
        close(step.transition, hippo.transition(order, begin, end), 1e-12)
        close(step.projection, hippo.projection(order, begin, end), 1e-12)
        close(bank.reconstruction(end, CPU, DOUBLE, every=size), bank.reconstruction(end, CPU, DOUBLE), 1e-12)


def test_a_stream_that_began_anywhere_builds_for_several_blocks_at_once(monkeypatch):
    built = []
    real = hippo.transitions
    monkeypatch.setattr(hippo, "transitions", lambda *args: built.append(1) or real(*args))
    for begin in range(5, 5 + 32 * 8, 8):
        Bank(23, 4).step(begin, begin + 8, CPU, every=8)
    assert len(built) == 2
