import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from transformers import get_cosine_schedule_with_warmup

from elastic_memory.training.recipe import Stability
from elastic_memory.training.spikes import Restart, Watch, learning_rate_factor

RULE = Stability(window=16, sigmas=6.0, patience=3)
losses = st.floats(1.0, 2.0)


@given(st.lists(losses, min_size=40, max_size=60), st.sampled_from([math.nan, math.inf, -math.inf]), st.booleans())
def test_non_finite_numbers_never_count_and_leave_no_trace(history, bad, in_gradient):
    clean, soiled = Watch(RULE), Watch(RULE)
    for i, loss in enumerate(history):
        if i == 20:
            judged = soiled.judge(loss, bad) if in_gradient else soiled.judge(bad, 1.0)
            assert judged == ("non-finite gradient" if in_gradient else "non-finite loss")
            assert soiled.bad_in_a_row == 1
        assert clean.judge(loss, 1.0) == soiled.judge(loss, 1.0)
    assert list(clean.applied) == list(soiled.applied)


@given(st.lists(losses, min_size=4, max_size=60))
def test_a_spike_is_refused_and_three_in_a_row_restart(history):
    watch = Watch(RULE)
    for loss in history:
        watch.judge(loss, 1.0)
    mean = sum(watch.applied) / len(watch.applied)
    spread = math.sqrt(sum((loss - mean) ** 2 for loss in watch.applied) / len(watch.applied))
    assert watch.judge(mean + 5.9 * spread - 1e-9, 1.0) is None
    watch.applied.pop()
    for count in (1, 2, 3):
        assert "loss spike" in str(watch.judge(10 * mean + 6.1 * spread, 1.0))
        assert watch.must_restart == (count == 3)
    watch.judge(mean, 1.0)
    assert watch.bad_in_a_row == 0


def test_there_is_no_rule_for_spikes_before_a_quarter_of_the_window_is_known():
    watch = Watch(RULE)
    assert [watch.judge(loss, 1.0) for loss in (1.0, 1.0, 1.0, 50.0)] == [None] * 4


@given(st.integers(2, 300), st.integers(1, 50))
def test_the_learning_rate_is_transformers_cosine(steps, warmup):
    optimizer = optim.SGD([nn.Parameter()], lr=1.0)
    theirs = get_cosine_schedule_with_warmup(optimizer, warmup, steps)
    for step in range(steps):
        assert learning_rate_factor(step, steps, [Restart(0, warmup)]) == pytest.approx(
            theirs.get_last_lr()[0], abs=1e-9
        )
        optimizer.step()
        theirs.step()


def test_a_restart_climbs_again_from_zero_to_the_same_curve():
    first, again = Restart(0, 10), Restart(100, 20)
    factors = [learning_rate_factor(step, 1000, [first, again]) for step in range(1000)]
    plain = [learning_rate_factor(step, 1000, [first]) for step in range(1000)]
    assert factors[:100] == plain[:100]
    assert factors[100] == 0
    assert factors[110] == pytest.approx(plain[110] / 2)
    assert factors[120:] == plain[120:]


def test_a_restart_from_scratch_is_the_papers():
    assert [learning_rate_factor(s, 100, [Restart(0, 5), Restart(0, 10)]) for s in range(100)] == [
        learning_rate_factor(s, 100, [Restart(0, 10)]) for s in range(100)
    ]
