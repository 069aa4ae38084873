"""`elastic report`: what a folder holds is on the page, and the page holds all it needs."""

import base64
import hashlib
import html
import json
import os
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_memory import cli
from elastic_memory.report.charts import short_names
from elastic_memory.report.page import collect, page, perplexity_by_block
from elastic_memory.report.tables import Table

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PROTOCOL = "P0, L=8, T=24, reset=sample, n=23 x 2"


def evaluation(checkpoint, blocks, protocol=PROTOCOL, by_position=(), **metrics):
    blocks, position = list(blocks), list(by_position)
    mean = sum(blocks) / len(blocks)
    ppl = {"P0": {"ppl": mean, "by_block": blocks, "by_position": position, "protocol": protocol}}
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
    assert text.count("<img ") == 1, "the table's own picture"
    assert base64.b64encode(PIXEL).decode() in text
    assert "config.json" not in text and "manifest.json" not in text and "a card" not in text


def charts_of(text):
    """What the scripts of a page draw, by section."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_charts_hold_what_was_measured(folder):
    charts = charts_of(page(folder))
    by_block, sizes = charts["evaluation"][0], [chart["title"] for chart in charts["evaluation"]]
    assert by_block["marks"] == [{"from": -0.5, "to": 0.5, "label": "block 0"}] and PROTOCOL in by_block["note"]
    assert {one["name"]: one["y"] for one in by_block["series"]} == {
        "elastic-1": [5.0, 4.0, 3.25], "none-2": [5.0, 4.9, 4.875]
    }  # fmt: skip
    assert sizes == ["Perplexity by block, memory carried"], "nothing else was recorded"
    (loss,) = charts["training"]
    assert loss["series"][0]["x"] == [10, 20] and loss["series"][0]["y"] == [3.0, None], "a loss of nan is a gap"


def test_the_page_asks_for_nothing(folder):
    """No address, and a browser runs only the scripts and styles whose hashes the page's own policy names."""
    text = page(folder)
    sources = re.findall(
        r'\s(?:src|href|action|data)\s*=\s*"([^"]{0,10})', re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    )
    assert sources and all(source == "data:image" or source.startswith("#") for source in sources)
    assert not re.search(r"<link|<iframe|@import|url\(|<script[^>]* src", text)
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["connect-src"] == rules["form-action"] == "'none'" and "unsafe" not in policy
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        inline = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in inline]
        assert inline and rules[rule].split() == [f"'sha256-{one}'" for one in hashes]


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
    charts_of(found)


def test_text_cannot_end_the_data(folder):
    evil = "</script><script>alert(1)</script><!--<script>"
    write(folder / "evaluations" / "a.json", evaluation(evil, [5.0, 4.0]))
    found = page(folder, evil)
    assert evil not in found and "<script>alert" not in found
    assert "<" not in re.search(r'id="data">(.*?)</script>\n', found, re.DOTALL)[1], "nothing that could be a tag"
    assert charts_of(found)["evaluation"][0]["series"][0]["name"] == evil


def test_one_file_and_one_run(folder):
    for path, shown, absent in (
        (folder / "evaluations" / "a.json", "3.250", "none-2"),
        (folder / "recall.md", "99%", "3.250"),
        (folder / "recall.json", "99%", "3.250"),
        (folder / "runs" / "elastic-1", "2.125", "99%"),
    ):
        text = page(path)
        assert shown in text and absent not in text, path


def test_both_protocols_give_what_memory_gains(tmp_path):
    both = evaluation("elastic-1", [5.0, 4.0], by_position=[4.5, 4.25])
    both["metrics"]["ppl"]["P4"] = {"ppl": 5.0, "by_block": [5.0, 5.0], "protocol": PROTOCOL.replace("P0", "P4")}
    both["memory"] = [{"layer": 1, "memory": "elastic", "carried_floats": 640}]
    write(tmp_path / "a.json", both)
    write(tmp_path / "b.json", evaluation("none-2", [5.0, 5.0]) | {"memory": []})
    gain, by_block, position, size = charts_of(page(tmp_path))["evaluation"]
    assert by_block["title"] == "Perplexity by block, memory carried", "that of P4 is in the gain and in the table"
    assert gain["title"] == "What memory gains, by block" and gain["series"][0]["y"] == [0.0, 0.25]
    assert position["series"][0]["x"] == [0.25, 0.75] and position["series"][0]["y"] == [4.5, 4.25]
    assert [(one["name"], one["x"], one["y"]) for one in size["series"]] == [
        ("elastic-1", [640], [4.5]), ("none-2", [0], [5.0])
    ]  # fmt: skip


def test_other_data_is_another_chart(tmp_path):
    for name, data in (
        ("small-books-elastic", "a1"),
        ("small-books-none", "a1"),
        ("small-edu-none", "b2"),
        ("x", "c3"),
    ):
        write(tmp_path / f"{name}.json", evaluation(name, [5.0, 4.0]) | {"data": {"sha256": data}})
    found = {chart["title"]: chart["series"] for chart in charts_of(page(tmp_path))["evaluation"]}
    names = {title.rpartition(": ")[2]: [one["name"] for one in series] for title, series in found.items()}
    assert names == {"small-books": ["elastic", "none"], "data b2": ["small-edu-none"], "data c3": ["x"]}


def test_tables_by_block_are_folded_and_files_left_out_are_few(folder):
    for index in range(9):
        write(folder / f"note-{index}.txt", "milk")
    text = page(folder)
    assert text.index("<summary>Perplexity by block as tables") < text.index(f"PPL by block [{PROTOCOL}]")
    assert "note-0.txt, note-1.txt, note-2.txt, note-3.txt, note-4.txt and 5 more." in text


def test_corpora_are_compared_by_what_differs_from_the_first_row(tmp_path):
    values = {("none", "books"): (40.0, "10"), ("none", "edu"): (None, "20"),
              ("elastic", "books"): (39.0, "9"), ("elastic", "edu"): (19.0, "18")}  # fmt: skip
    cells = [
        {"row": row, "column": column, "values": {"ppl": ours}, "paper": paper}
        for (row, column), (ours, paper) in values.items()
    ]
    write(tmp_path / "t.json", {"table": "t", "title": "Main", "cells": cells})
    ours, theirs = charts_of(page(tmp_path))["paper"]
    assert ours["title"] == "Main: perplexity against none, ours" and ours["y"]["percent"]
    assert [one["y"] for one in ours["series"]] == [[0.0], pytest.approx([-0.025])], (
        "edu has nothing to be compared with"
    )
    assert [one["y"] for one in theirs["series"]] == [[0.0, 0.0], pytest.approx([-0.1, -0.1])]


def test_the_papers_values_stand_beside_ours(tmp_path):
    def cell(row, column, ours, paper):
        return {"row": row, "column": column, "paper": paper, "values": ours}

    pair = cell("A", "2x PPL", {"ppl": 9.5, "longppl": None}, "2.86 / 2.43")
    cells = [cell("A", "1x PPL", {"ppl": 9.75}, "3.31"), pair, cell("B", "1x PPL", {"ppl": None}, "2.96")]
    write(tmp_path / "t.json", {"table": "t", "title": "Scaling", "cells": cells})
    ours, theirs = charts_of(page(tmp_path))["paper"]
    assert [(one["name"], one["y"]) for one in ours["series"]] == [("A", [9.75, 9.5])]
    assert [(one["name"], one["y"]) for one in theirs["series"]] == [("A", [3.31, 2.86]), ("B", [2.96])]
    assert ours["x"]["categories"] == ["1x", "2x"] and ours["series"][0]["color"] == theirs["series"][0]["color"]


def test_recall_settings_and_environment(tmp_path):
    entry = {"row": "A", "task": "passkey", "distance": 2, "accuracy": 0.5}
    write(tmp_path / "recall.json", {"table": "recall", "rows": [entry, entry | {"distance": 1, "accuracy": 0.75}]})
    for name, rate in (("a", 1e-3), ("b", 5e-4)):
        recipe = {"name": name, "training": {"learning_rate": rate, "seed": 1}}
        result = {"name": name, "tokens": 8, "final_loss": 2.0, "recipe": recipe, "machine": {"device": "H200"}}
        write(tmp_path / f"{name}.json", result)
    text = page(tmp_path)
    (chart,) = charts_of(text)["recall"]
    assert (chart["series"][0]["x"], chart["series"][0]["y"]) == ([1, 2], [0.75, 0.5])
    cells = re.findall(r"<td>(.*?)</td>", text)
    assert cells[cells.index("training.learning_rate") :][:3] == ["training.learning_rate", "0.001", "0.0005"]
    assert cells[cells.index("training.seed") :][:2] == ["training.seed", "1"] and "H200" in cells


def test_names_are_as_short_as_they_can_be():
    names = ["small-proofs-none-seed1-03391199fd", "small-proofs-elastic-uniform-seed1-f40a9f26cf"]
    assert list(short_names(names).values()) == ["none-seed1", "elastic-uniform-seed1"]
    assert list(short_names(["a-0123456789", "a-9876543210"]).values()) == ["a-0123456789", "a-9876543210"]
    assert short_names(["elastic-1"]) == {"elastic-1": "elastic-1"}


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
        ("a.json", evaluation("c", [1], by_position=["low"]), "a.json: the perplexity by P0 lacks"),
        ("recall.json", {"table": "recall", "rows": [{"row": "A", "task": "t"}]}, "recall.json: recall has"),
        ("recall.json", {"table": "recall", "rows": [3]}, "recall.json: recall has"),
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


def documents():
    """One of each kind that a command writes, by file name."""
    machine = {"device": "cpu", "torch": "2"}
    both = evaluation("c", [5.0, 4.0], by_position=[4.5, 4.25], longppl={"longppl": 3.5, "protocol": "k"})
    both["metrics"]["ppl"]["P4"] = {"ppl": 5.0, "by_block": [5.0, 5.0], "protocol": "P4"}
    both["metrics"]["recall"] = [{"task": "passkey", "distance": 1, "accuracy": 0.5}]
    both |= {"memory": [{"layer": 1, "memory": "elastic", "carried_floats": 640}], "machine": machine}
    trained = {"name": "n", "tokens": 8, "steps": 2, "final_loss": 2.0, "curve": [[1, 2.5], [2, 2.0]]}
    trained |= {"recipe": {"training": {"seed": 1}}, "machine": machine, "parameters": 10}
    measured = [both | {"conditions": {"corrupt": 0.0, "sampling": None}}]
    cell = {"row": "A", "column": "1x PPL", "paper": "3.31 / 2.4", "values": {"ppl": 9.75, "longppl": None}}
    return {
        "evaluation.json": both,
        "training.json": trained,
        "record.json": {"trained": trained, "measured": measured, "tier": "smoke"},
        "table.json": {"table": "t", "title": "T", "cells": [cell, cell | {"row": "B"}]},
        "recall.json": {"table": "recall", "rows": [{"row": "A", "task": "t", "distance": 1, "accuracy": 0.5}]},
        "metrics.jsonl": {"tokens": 10, "loss": 3.0},
    }


ODD = [
    None,
    True,
    0,
    -1,
    1e308,
    10**90,
    10**400,
    "",
    "x",
    "\ud800",
    [],
    {},
    [1],
    [[]],
    {"a": {"b": []}},
    [None],
    float("inf"),
]


def places(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def changed(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if new is DROPPED and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


DROPPED = object()
deep = st.integers(1, 4000).map(lambda depth: "[" * depth + "]" * depth)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_odd_files_are_shown_or_named(tmp_path_factory, data):
    """Whatever stands at any place of a file: a page, or one line with the file's name."""
    name = data.draw(st.sampled_from(sorted(documents())))
    content = documents()[name]
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(list(places(content))))
        content = changed(content, path, data.draw(st.sampled_from([*ODD, DROPPED] if path else ODD)))
    text = json.dumps(content)
    if data.draw(st.integers(0, 9)) == 0:
        text = text.replace("[]", data.draw(deep), 1)
    if data.draw(st.integers(0, 9)) == 0:
        text = text[: data.draw(st.integers(0, len(text)))]
    folder = tmp_path_factory.mktemp("odd")
    write(folder / name, text + "\n")
    write(folder / "table.md", Table("T", ["a"], [["b"]]).markdown())
    try:
        shown = page(folder)
    except ValueError as error:
        assert name in str(error) and "\n" not in str(error), error
    else:
        charts_of(shown)
        shown.encode()


def test_huge_numbers_are_named(tmp_path):
    for number in ("1e999", "-1e999", "9" * 500, "9" * 5000):
        write(tmp_path / "a.json", f'{{"name": "n", "tokens": {number}, "final_loss": 1}}')
        with pytest.raises(ValueError, match=r"a\.json: not valid JSON"):
            page(tmp_path)


def test_a_pipe_among_results_is_left_alone(folder):
    os.mkfifo(folder / "a.json")
    assert "3.250" in page(folder)


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
