"""`elastic demo` with two steps a model: the whole way once, and what a second call finds done."""

import json
import os
import re
import signal
import sys

import pytest

from elastic_memory import cli
from elastic_memory.commands import demo as module

TOKENS = 2 * module.STEP


def demo(monkeypatch, capsys, out):
    monkeypatch.setattr(module, "HELD_OUT_ROWS", 4)
    monkeypatch.setattr(module, "ORDERS", (4, 8))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["elastic", "demo", "--out", str(out), "--tokens", str(TOKENS)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0, capsys.readouterr().out


def runs(out):
    return {path.parent.name: path for path in out.glob("runs/*/result.json")}


def test_from_text_to_a_report_and_again_without_doing_it_twice(tmp_path, monkeypatch, capsys):
    from elastic_memory.training import session

    code, shown = demo(monkeypatch, capsys, tmp_path)
    assert code == 0

    first, second = sorted(runs(tmp_path), reverse=True)
    assert first.startswith("transformer++-") and second.startswith("elastic-")
    results = {name: json.loads(path.read_text()) for name, path in runs(tmp_path).items()}
    assert results[first]["sample_order"] == results[second]["sample_order"], "both learn from the same samples"
    assert {result["tokens"] for result in results.values()} == {TOKENS}

    protocol = f"P0, L={module.MODEL_BLOCK}, T={module.LENGTH}, reset=sample, n={module.LENGTH - 1} x 4"
    assert f"PPL by block [{protocol}]" in " ".join(shown.split())
    lines = [line.split() for line in shown.splitlines() if re.fullmatch(r"\s+(all|\d+)\s+[\d.]+\s+[\d.]+\s*", line)]
    blocks = [str(block) for block in range(module.LENGTH // module.MODEL_BLOCK)]
    assert [label for label, *_ in lines] == ["all", *blocks]
    measured = [json.loads((tmp_path / "results" / f"{name}.json").read_text()) for name in (first, second)]
    told = [float(cell) for cell in lines[0][1:]]
    assert told == pytest.approx([it["metrics"]["ppl"]["P0"]["ppl"] for it in measured], abs=1e-3)

    page = (tmp_path / "report.html").read_text()
    assert page.count("<img ") == 1, "the memory at work"
    assert "Perplexity by block, memory carried" in page and "Loss while training" in page
    assert protocol in page and first in page and second in page

    monkeypatch.setattr(session, "build_model", lambda recipe: pytest.fail("a finished run is trained again"))
    (tmp_path / "report.html").unlink()
    (tmp_path / "results" / f"{second}.json").unlink()
    code, again = demo(monkeypatch, capsys, tmp_path)
    assert code == 0
    assert again.splitlines()[-20:] == shown.splitlines()[-20:]
    assert (tmp_path / "report.html").read_text() == page


def test_an_interrupted_demo_goes_on(tmp_path, monkeypatch, capsys, disturb):
    def interrupt(model, out):
        os.kill(os.getpid(), signal.SIGTERM)
        return out

    disturb([1], interrupt)
    code, _ = demo(monkeypatch, capsys, tmp_path)
    assert code != 0 and not runs(tmp_path)
    code, _ = demo(monkeypatch, capsys, tmp_path)
    assert code == 0
    starts = {json.loads(path.read_text())["starts"] for path in runs(tmp_path).values()}
    assert starts == {1, 2}, "the interrupted run went on, the other one started once"
    assert (tmp_path / "report.html").is_file()
