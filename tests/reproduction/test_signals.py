"""The table of synthetic signals, in the paper's convention and in ours."""

import json
from pathlib import Path

import pytest
import torch

from elastic_memory.evaluation import signals
from elastic_memory.reproduction.tables import NAMES, load


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    torch.set_num_threads(1)  # matrices of order 32: threads only wait for each other
    table = load("signals").run("smoke", out)
    return table, json.loads((out / "signals.json").read_text())["rows"], out


def test_the_noise_is_the_papers_draw():
    torch.testing.assert_close(
        signals.noise()[:4], torch.tensor([1.926915, 1.487284, 0.900717, -2.105521]).double(), rtol=0, atol=1e-6
    )


def test_all_nine_rows_agree_to_the_printed_digits(results):
    table, rows, _ = results
    assert len(rows) == 9
    for row, (*_, printed) in zip(rows, load("signals").ROWS, strict=True):
        ours = f"{row['paper_convention']:.1e}" if "e" in printed else f"{row['paper_convention']:.2f}"
        assert float(ours) == float(printed), row
    assert [cells[3] for cells in table.rows] == [printed for *_, printed in load("signals").ROWS]


def test_reference_values_in_more_digits(results):
    expected = [1.187e-5, 2.267e-4, 9.849e-4, 3.338e-3, 2.946e-3, 4.783e-4, 0.9730, 0.9002, 0.7177]
    assert [row["paper_convention"] for row in results[1]] == pytest.approx(expected, rel=5e-4)


def test_ours_measures_compression_instead_of_misalignment(results):
    ours = [row["ours"] for row in results[1]]
    assert [f"{value:.1e}" for value in ours[:3]] == ["5.0e-10", "1.8e-08", "1.1e-07"]
    assert ours[6:] == pytest.approx([0.9695, 0.8726, 0.5198], abs=1e-4)


def test_table_json_and_picture_are_written(results):
    _, _, out = results
    assert sorted(path.name for path in out.iterdir()) == ["signals.json", "signals.md", "signals.png"]
    assert "| 5 sine waves | 32 | bilinear | 4.8e-4 |" in (out / "signals.md").read_text()


def test_every_experiment_can_be_loaded():
    assert "signals" in NAMES
    for name in NAMES:
        assert hasattr(load(name), "EXPERIMENT") != callable(getattr(load(name), "run", None))


def test_the_page_holds_the_table_as_reproduced(results):
    root = Path(__file__).parents[2]
    table = results[0].markdown()
    assert (root / "results" / "signals.md").read_text() == table
    assert f"<!-- signals -->\n{table}<!-- /signals -->" in (root / "docs" / "mathematics.md").read_text()
