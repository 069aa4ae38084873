"""`elastic report`: what a folder holds is on the page, and the page holds all it needs."""

import base64
import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_memory import cli
from elastic_memory.report.page import collect, page, perplexity_by_block
from elastic_memory.report.tables import Table

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PROTOCOL = "P0, L=8, T=24, reset=sample, n=23 x 2"


def evaluation(checkpoint, blocks, protocol=PROTOCOL, **metrics):
    ppl = {"P0": {"ppl": sum(blocks) / len(blocks), "by_block": blocks, "protocol": protocol}}
    return {"checkpoint": checkpoint, "metrics": {"ppl": ppl, **metrics}}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def folder(tmp_path):
    """One of everything that the commands write."""
    table = Table("Recall <b>", ["model", "1"], [["a & b", "99%"]], "Read it so.")
    write(tmp_path / "recall.md", table.markdown())
    write(tmp_path / "recall.json", {"table": "recall", "rows": []})
    (tmp_path / "recall.png").write_bytes(PIXEL)
    key = {"longppl": 3.5, "protocol": "reference=large", "interval": [3.0, 4.0]}
    write(tmp_path / "evaluations" / "a.json", evaluation("elastic-1", [5.0, 4.0, 3.25], longppl=key))
    write(tmp_path / "evaluations" / "b.json", evaluation("none-2", [5.0, 4.9, 4.875]))
    run = tmp_path / "runs" / "elastic-1"
    write(run / "run.json", {})
    write(run / "metrics.jsonl", '{"tokens": 10, "loss": 3.0}\n{"tokens": 20, "loss": "nan"}\n{"tokens": 30, "lo')
    write(run / "result.json", {"name": "elastic-1", "tokens": 30, "final_loss": 2.125, "parameters": 12345})
    write(run / "model" / "README.md", "a card")
    write(run / "model" / "config.json", "{broken, and none of our business")
    write(tmp_path / "corpus" / "manifest.json", {"format": "rows"})
    write(tmp_path / "notes.txt", "buy milk")
    return tmp_path


def test_everything_is_on_the_page(folder):
    text = page(folder, "Week <1>")
    for shown in ("Week &lt;1&gt;", "Recall &lt;b&gt;", "a &amp; b", "99%", "Read it so.", "elastic-1", "none-2",
                  "3.250", "4.875", PROTOCOL, "reference=large", "3.500", "12,345", "2.125", "notes.txt"):  # fmt: skip
        assert shown in text, shown
    assert text.count("<img ") == 3, "perplexity by block, the loss, and the table's own picture"
    assert base64.b64encode(PIXEL).decode() in text
    assert "config.json" not in text and "manifest.json" not in text and "a card" not in text


def test_the_page_asks_for_nothing(folder):
    text = page(folder)
    sources = re.findall(r'(?:src|href|action|data)\s*=\s*"([^"]{0,10})', text)
    assert sources and all(source == "data:image" for source in sources)
    assert not re.search(r"<script|<link|<iframe|@import|url\(|https?://", text)


def test_protocols_are_not_mixed():
    other = PROTOCOL.replace("L=8", "L=12")
    tables = perplexity_by_block([evaluation("a", [2.0]), evaluation("b", [3.0, 2.5], other), evaluation("c", [4.0])])
    assert [table.title for table in tables] == [f"PPL by block [{PROTOCOL}]", f"PPL by block [{other}]"]
    assert [list(table.columns) for table in tables] == [["block", "a", "c"], ["block", "b"]]
    assert [list(row) for row in tables[0].rows] == [["all", "2.000", "4.000"], ["0", "2.000", "4.000"]]


words = st.text(st.characters(categories=["L", "N", "S", "P"], exclude_characters="|*"), min_size=1)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(words, min_size=n, max_size=n), min_size=1)), words)
def test_a_table_survives_markdown(tmp_path_factory, rows, title):
    folder = tmp_path_factory.mktemp("table")
    columns, *cells = rows
    (folder / "t.md").write_text(Table(title, columns, cells, "A note.").markdown(), encoding="utf-8")
    table = collect(folder).tables["t.md"]
    assert (table.title, list(table.columns), [list(row) for row in table.rows]) == (title, columns, cells)
    assert table.note == "A note."


@given(st.text())
def test_no_text_becomes_markup(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("markup")
    write(folder / "e.json", {"checkpoint": "<x>" + text, "metrics": {"probe": [{"<y>" + text: "<z>" + text}]}})
    found = page(folder, "<t>" + text)
    assert not re.search(r"<[xyzt]>", found)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "{", "a.json: not valid JSON"),
        ("a.json", '{"metrics": {"ppl": {"P0": {"ppl": NaN}}}}', "a.json: not valid JSON"),
        ("a.json", {"metrics": {}}, "a.json: not an evaluation"),
        ("a.json", {"checkpoint": "c", "metrics": {"ppl": [1]}}, "a.json: not an evaluation"),
        ("a.json", {"checkpoint": "c", "metrics": {"longppl": 3}}, "a.json: not an evaluation"),
        ("a.json", {"checkpoint": "c", "metrics": {"ppl": {"P0": {"ppl": 1}}}}, "a.json: the perplexity by P0 lacks"),
        ("a.json", evaluation("c", [1]) | {"checkpoint": None}, "a.json: not an evaluation"),
        ("a.md", "**T**\n\n| a | b |\n| --- | --- |\n| 1 |\n", "a.md: 2 columns, but a row has 1"),
        ("a.png", "GIF89a", "a.png: not a PNG"),
        ("metrics.jsonl", '{"tokens": 1, "loss": 2}\n{"tok\n', "metrics.jsonl line 2: not valid JSON"),
        ("metrics.jsonl", '{"step": 1}\n', "metrics.jsonl line 1: a step has `tokens` and `loss`"),
        ("metrics.jsonl", '{"tokens": 1, "loss": "low"}\n', "metrics.jsonl line 1: a step has `tokens` and `loss`"),
        ("notes.txt", "nothing of ours", "holds no results: expected tables"),
    ],
)  # fmt: skip
def test_bad_files_are_named(tmp_path, name, content, said):
    write(tmp_path / name, content)
    with pytest.raises(ValueError, match=re.escape(said)):
        page(tmp_path)


def test_no_folder_and_an_empty_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*gone"):
        page(tmp_path / "gone")
    with pytest.raises(ValueError, match="holds no results"):
        page(tmp_path)


def test_the_command(folder, monkeypatch, capsys):
    out = folder / "pages" / "report.html"
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["elastic", "report", str(folder), "--out", str(out)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
        assert out.read_text().startswith("<!doctype html>")
    assert "written to" in capsys.readouterr().out
