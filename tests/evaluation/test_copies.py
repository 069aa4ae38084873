"""Recall of spans that come twice."""

import pytest
import torch

from elastic_memory.evaluation.copies import PERIOD, copy_losses, with_copies


@pytest.mark.parametrize("distance", [8, 32, 104, 128])
def test_copies_are_at_their_distance(distance):
    row = torch.arange(1000)
    text, starts = with_copies(row, distance, 8)
    assert len(text) == len(row) and starts
    copied = torch.zeros(len(row), dtype=torch.bool)
    for start in starts:
        assert (start + 8) % (PERIOD * 8) == 0
        assert torch.equal(text[start : start + 8], text[start - distance : start - distance + 8])
        copied[start : start + 8] = True
    fresh = text[~copied]
    assert torch.equal(fresh, row[: len(fresh)])  # the rest is the text as it was, nothing left out


def test_a_distance_at_which_copies_meet_copies_is_refused():
    with pytest.raises(ValueError, match=r"distance 96: .* choose a distance"):
        with_copies(torch.arange(1000), 96, 8)


def test_losses_of_copies_and_of_the_same_spans_elsewhere():
    """A reader that has seen a token within 100 tokens knows it; others cost 1."""

    def read(ids):
        known = [[float(t not in row[max(0, i - 100) : i]) for i, t in enumerate(row)] for row in ids.tolist()]
        return torch.tensor(known)[:, 1:]

    rows = [torch.arange(1000), torch.arange(1000, 2000), torch.arange(2000, 3000)]
    for distance, wanted in ((32, 0.0), (128, 1.0)):
        found = copy_losses(read, rows, distance, 8)
        assert list(found) == ["0", "1", "2"]
        for other, copy, tokens in found.values():
            assert other == tokens and copy == wanted * tokens and tokens % 6 == 0 and tokens > 0


def test_hard_spans_are_hard_in_both_texts():
    """A reader that remembers nothing: a span costs the same wherever it stands, and nothing is recalled."""
    rows = [torch.arange(1000), torch.arange(1000, 2000), torch.arange(2000, 3000)]
    found = copy_losses(lambda ids: ids[:, 1:].double(), rows, 32, 8)
    assert all(other == copy > 0 for other, copy, _ in found.values())
    assert len({other for other, *_ in found.values()}) == 3
    with pytest.raises(ValueError, match=r"1 rows: .* at least two"):
        copy_losses(lambda ids: ids[:, 1:].double(), rows[:1], 32, 8)
