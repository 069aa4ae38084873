"""`elastic demo` with two steps a model: the whole way once, what a second call finds done, and an interruption."""

import json
import os
import re
import signal
import sys
from importlib import import_module

import pytest

from elastic_memory import cli
from elastic_memory.commands import demo as module

TOKENS = 2 * module.STEP
SMALL = {"HELD_OUT_ROWS": 4, "ORDERS": (4, 8), "RECALL_STEPS": 2, "QUESTIONS": 2, "DISTANCES": (1, 2), "BOOKS": 2}


def demo(monkeypatch, capsys, out):
    for name, value in SMALL.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["elastic", "demo", "--out", str(out), "--tokens", str(TOKENS), "--seed", "3"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    shown = capsys.readouterr()
    assert "shards" not in shown.err and "Loading weights" not in shown.err, "bars of what takes no time"
    return end.value.code or 0, shown.out


def runs(out):
    return {path.parent.name: path for path in out.glob("runs/*/result.json")}


def test_from_signals_to_a_report_and_again_without_doing_it_twice(tmp_path, monkeypatch, capsys):
    from elastic_memory.training import session

    code, shown = demo(monkeypatch, capsys, tmp_path)
    assert code == 0

    recorded = json.loads((tmp_path / "results" / "recall.json").read_text())
    assert len({row["row"] for row in recorded["rows"]}) == 3, "without memory, with it, and grown after training"
    assert len(list((tmp_path / "memories").iterdir())) == 2
    assert all(file.stat().st_size <= 20 * 1024 for file in (tmp_path / "memories").iterdir())
    assert re.search(r"book-0.memory.safetensors: said [A-P]{2}, asked after loading, answered [A-P?]{2}\n", shown)
    (elastic, without) = sorted(runs(tmp_path))  # with memory, without memory
    assert {json.loads(file.read_text())["tokens"] for file in runs(tmp_path).values()} == {TOKENS}
    measured = {
        name: json.loads((tmp_path / "results" / f"{name}.json").read_text())["metrics"]["ppl"]
        for name in (elastic, without)
    }
    kept, erased, other = measured[elastic]["P0"], measured[elastic]["P4"], measured[without]["P0"]
    words = " ".join(shown.split())
    for found in (kept, erased, other):
        assert f"{found['ppl']:.3f} {found['by_block'][0]:.3f}" in words
    assert kept["by_block"][0] == pytest.approx(erased["by_block"][0]), "block 0 has no memory"
    for name, found in (("its memory is erased", erased), ("trained without memory", other)):
        assert f"higher if {name} {found['ppl'] / kept['ppl'] - 1:.1%}, in" in words
    assert "What was seen" in words and "try next" in words
    explore = re.search(r"elastic (explore \S+ --text \S+) ", words)[1].split()
    monkeypatch.setattr(sys, "argv", ["elastic", *explore, "--out", str(tmp_path / "e.html"), "--no-open"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    (tmp_path / "e.html").unlink()
    page = (tmp_path / "report.html").read_text()
    assert elastic in page and without in page and "Recall by distance" in page

    again = "is trained again"
    monkeypatch.setattr(session, "build_model", lambda recipe: pytest.fail(again))
    monkeypatch.setattr(
        import_module("elastic_memory.evaluation.recall"), "learn", lambda *args, **options: pytest.fail(again)
    )
    (tmp_path / "report.html").unlink()
    code, second = demo(monkeypatch, capsys, tmp_path)
    assert code == 0
    assert second.splitlines()[-12:] == shown.splitlines()[-12:]
    assert (tmp_path / "report.html").read_text() == page


def test_an_interrupted_demo_resumes(tmp_path, monkeypatch, capsys, disturb):
    def interrupt(model, out):
        os.kill(os.getpid(), signal.SIGTERM)
        return out

    disturb([1], interrupt)
    code, _ = demo(monkeypatch, capsys, tmp_path)
    assert code != 0 and not runs(tmp_path)
    code, _ = demo(monkeypatch, capsys, tmp_path)
    assert code == 0
    assert [json.loads(path.read_text())["starts"] for _, path in sorted(runs(tmp_path).items())] == [1, 2]
    assert (tmp_path / "report.html").is_file()
