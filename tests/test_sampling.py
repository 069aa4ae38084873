"""Samplings: the paper's two rules to the letter, tilings that tile, and errors that say what fits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_memory.sampling import SAMPLINGS, sample_points

points, histories = st.integers(1, 600), st.integers(1, 10**7)
quick = settings(deadline=None, max_examples=60)


def test_uniform_is_the_papers_rule():
    assert sample_points("uniform", 4, 4096).tolist() == [0, 0.25, 0.5, 0.75]


def test_exponential_is_the_papers_rule():
    u = sample_points("exponential", 5, 4096, decay=0.5)
    assert u.tolist() == [1 - 0.5**4, 1 - 0.5**3, 0.75, 0.5, 0]


@given(points, histories)
@quick
def test_the_newest_exponential_point_lies_one_token_before_now(count, history):
    u = sample_points("exponential", count, history)
    assert u[-1] == 0
    assert bool((u[:-1] >= u[1:]).all())
    if count > 1:
        assert (1 - u[0]).item() * history == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("name", SAMPLINGS)
@given(points, histories)
@quick
def test_every_sampling_fits_every_history(name, count, history):
    assert sample_points(name, count, history).dtype == torch.float64


@pytest.mark.parametrize("name", ["uniform_cells", "geometric_cells"])
@given(points, histories)
@quick
def test_cells_tile_the_history(name, count, history):
    cells = sample_points(name, count, history)
    assert cells.shape == (count, 2)
    assert cells[0, 0] == 0
    assert cells[-1, 1] == 1
    assert torch.equal(cells[1:, 0], cells[:-1, 1])


@given(points, histories)
@quick
def test_geometric_cells_grow_from_one_token(count, history):
    widths = sample_points("geometric_cells", count, history).diff(dim=1).flatten() * history
    if count == 1 or history <= count:
        assert torch.allclose(widths, torch.full_like(widths, history / count), rtol=1e-6)
    else:
        assert widths[-1].item() == pytest.approx(1, rel=1e-6)
        growth = (widths[:-1] / widths[1:]).numpy()
        assert growth == pytest.approx([growth.mean()] * (count - 1), rel=1e-5)


def test_midpoints_are_the_middles_of_uniform_cells():
    assert torch.allclose(sample_points("midpoints", 7, 100), sample_points("uniform_cells", 7, 100).mean(1))


def test_a_function_of_ones_own_with_its_own_options():
    def late(points, history, since=0.5):
        return torch.linspace(since, 1, points)

    assert sample_points(late, 3, 10).tolist() == [0.5, 0.75, 1]
    assert sample_points(late, 2, 10, since=0.0).tolist() == [0, 1]
    constant = lambda points, history, **options: [options["at"]] * points  # noqa: E731
    assert sample_points(constant, 2, 10, at=0.25).tolist() == [0.25] * 2


@pytest.mark.parametrize(
    ("sampling", "options", "says"),
    [
        ("unifrom", {}, "did you mean 'uniform'"),
        ("zzz", {}, "known: uniform, exponential"),
        ("exponential", {"dekay": 0.5}, "did you mean 'decay'"),
        ("uniform", {"decay": 0.5}, "takes none"),
        ("exponential", {"decay": 1.5}, "decay 1.5"),
        ("exponential", {"decay": math.nan}, "decay nan"),
        (lambda points, history: torch.zeros(points + 1), {}, r"shape \[5\]: it must be \[4\] or \[4, 2\]"),
        (lambda points, history: torch.full((points,), 1.5), {}, "returned 1.5"),
        (lambda points, history: torch.full((points,), math.nan), {}, "returned nan"),
        (lambda points, history: torch.zeros(points, 2), {}, "empty cell"),
    ],
)
def test_bad_input_is_named(sampling, options, says):
    with pytest.raises(ValueError, match=says):
        sample_points(sampling, 4, 100, **options)


def test_no_points_or_no_history():
    with pytest.raises(ValueError, match="0 points"):
        sample_points("uniform", 0, 100)
    with pytest.raises(ValueError, match="0 tokens"):
        sample_points("uniform", 4, 0)
