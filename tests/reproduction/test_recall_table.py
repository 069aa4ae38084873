"""The table of recall: one record per model, never trained twice, and a mean over seeds."""

import json
import statistics

import pytest

from elastic_memory.common.strict import read_json
from elastic_memory.evaluation.recall import DISTANCES
from elastic_memory.memory import MEMORIES
from elastic_memory.reproduction.tables import recall


@pytest.fixture
def quick(monkeypatch):
    rows = {"Transformer++": {"memory": "none"}, "Elastic": {"memory": "elastic"}, "Dyadic": {"memory": "dyadic"}}
    plan = recall.PLANS["small"] | {"rows": rows, "seeds": 2, "steps": 2, "batch": 2, "samples": 2}
    monkeypatch.setitem(recall.PLANS, "small", plan)
    monkeypatch.setattr(recall, "DISTANCES", (1, 2))
    return plan


def test_every_memory_has_a_row_and_can_be_built():
    memories = {settings["memory"] for settings in recall.ALL_MODELS.values()}
    assert memories == set(MEMORIES)
    for settings in recall.ALL_MODELS.values():
        recall.build(settings, recall.TINY)


def test_memories_of_one_size():
    floats = {row: recall._floats(recall.build(settings, recall.TINY)) for row, settings in recall.ALL_MODELS.items()}
    assert floats.pop("Full attention") is None and floats.pop("Transformer++") == 0
    assert floats.pop("Dyadic") <= floats["Elastic, uniform"]  # whole segments do not fill it
    assert floats.pop("Infini") <= floats["Elastic, uniform"]
    assert set(floats.values()) == {8192}


def test_records_tables_and_means(quick, tmp_path):
    table = recall.run("small", tmp_path, seeds=1)
    assert "3 runs are still to come" in table.note
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert len(before) == 3

    table = recall.run("small", tmp_path)
    assert "still to come" not in table.note and len(list((tmp_path / "runs").iterdir())) == 6
    assert before == {path: path.stat().st_mtime_ns for path in before}  # nothing is trained twice
    names = [row[0] for row in table.rows]  # a dyadic bank cannot grow after training
    assert names == [
        "passkey: Transformer++",
        "passkey: Elastic",
        "passkey: Elastic, 8x at test time",
        "passkey: Dyadic",
    ]
    assert [row[1] for row in table.rows[1:3]] == ["8,192", "65,536"]

    record = read_json(tmp_path / "runs" / "recall-small-passkey-elastic-seed2.json")
    assert {"commit", "date", "python", "torch", "device"} <= record["environment"].keys()
    held = [read_json(path)["answers"] for path in sorted((tmp_path / "runs").glob("*-elastic-*"))]
    seeds = [one["accuracy"] for answers in held for one in answers if one["distance"] == 2 and one["row"] == "Elastic"]
    rows = json.loads((tmp_path / "recall-small.json").read_text())["rows"]
    (row,) = [row for row in rows if row["row"] == "Elastic" and row["distance"] == 2]
    assert row["seeds"] == seeds and row["accuracy"] == pytest.approx(statistics.fmean(seeds))


def test_a_record_of_another_plan_is_refused(quick, tmp_path, monkeypatch):
    recall.run("small", tmp_path, seeds=1)
    monkeypatch.setitem(recall.PLANS, "small", quick | {"steps": 3})
    with pytest.raises(ValueError, match="record of another plan"):
        recall.run("small", tmp_path, minutes=0)


def test_seeds_differ_and_a_cell_shows_their_spread(quick, tmp_path):
    recall.run("small", tmp_path)
    losses = {read_json(path)["loss"] for path in (tmp_path / "runs").glob("*-elastic-*")}
    assert len(losses) == 2
    assert recall._cell([0.5, 1.0]) == "75% ± 35" and recall._cell([0.5]) == "50%"


def test_time_that_is_up_counts_nothing_by_halves(tmp_path):
    table = recall.run("smoke", tmp_path, minutes=0.03, parallel=2)
    assert not list((tmp_path / "runs").glob("*")) and "2 runs are still to come" in table.note
    assert len(DISTANCES) == len(table.columns) - 3
