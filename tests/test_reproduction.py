"""Tables that need trained models, at a size that trains one in a second; and the paper's numbers in them."""

import io
import json
import os
import random
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import elastic_memory as em
from elastic_memory.commands import reproduce as command
from elastic_memory.data import prepare, samples
from elastic_memory.evaluation.loading import load_model
from elastic_memory.report.page import collect
from elastic_memory.reproduction import experiment as module
from elastic_memory.reproduction import lab, planning, tiers
from elastic_memory.reproduction.experiment import SHOWS, Experiment
from elastic_memory.reproduction.lab import Lab, Trained
from elastic_memory.reproduction.tables import load, wanted
from elastic_memory.training import session
from elastic_memory.training.build import build_config

TABLES = ["main", "memory-scaling", "model-scaling", "injection", "corruption", "reconstruction"]
CORPORA = ["books", "proofs", "edu"]
REDUCED = replace(
    tiers.TIERS["smoke"],
    recipe={
        "training.tokens": 512, "training.length": 128, "training.batch_tokens": 256, "execution.micro_batch": 2,
        "model.config.block_size": 32, "model.config.num_hidden_layers": 2,
    },
    rows=2,
    probed=1,
)  # fmt: skip
MINI = Experiment(
    name="mini",
    title="Two models",
    columns={"PPL": {"shows": "ppl"}, "Long.": {"shows": "longppl"}},
    rows={"none": ({"memory": "none"}, "1.5 & 2.5"), "queue": ({"memory": "memorizing"}, "1.25 & 2")},
)


@pytest.fixture(scope="module", autouse=True)
def reduced():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiers.TIERS, "smoke", REDUCED)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Rows of 128 bytes; the same ones for every corpus, so that one run serves all three."""
    folder, out = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("data")
    words = ["the", "sea", "kept", "its", "own", "slow", "book", "of", "days", "and", "ships"]
    for i in range(12):
        draw = random.Random(i)
        (folder / f"{i}.txt").write_text(" ".join(draw.choice(words) for _ in range(200)))
    for corpus in CORPORA:
        prepare(folder, out / corpus, tokenizer="bytes", length=128, shares=(0.6, 0.2, 0.2))
    return out


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """One folder for all tables: what they have in common is trained once."""
    return tmp_path_factory.mktemp("results")


def runs(out: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in out.glob("runs/*/result.json")}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_papers_rows_and_columns_and_is_not_made_twice(name, data, out, monkeypatch):
    experiment = load(name).EXPERIMENT
    table = experiment.run("smoke", out, data)
    assert list(table.columns) == [experiment.corner, *experiment.columns]
    assert [row[0] for row in table.rows] == list(experiment.rows)
    number = r"\d+(\.\d+M?)?"
    for row, (_, printed) in zip(table.rows, experiment.rows.values(), strict=True):
        for text, paper in zip(row[1:], printed.split("&"), strict=True):
            ours, theirs = re.fullmatch(rf"((?:{number}|-)(?: / -)?) \[(.+)\]", text).group(1, 3)
            assert theirs == paper.strip()
            assert ours.count("/") == theirs.count("/")
    assert "figures mean nothing" in table.note and "still to come" not in table.note
    written = json.loads((out / f"{name}-smoke.json").read_text())
    assert (written["table"], written["tier"]) == (name, "smoke") and "commit" in written
    assert (out / f"{name}-smoke.md").read_text() == table.markdown()
    assert collect(out).tables[f"{name}-smoke.md"].rows == [list(row) for row in table.rows], (
        "`elastic report` shows it"
    )

    monkeypatch.setattr(session, "build_model", lambda recipe: pytest.fail("trained again"))
    monkeypatch.setattr(lab, "load_model", lambda path: pytest.fail("measured again"))
    again = experiment.run("smoke", out, data)
    assert again == table


def test_tables_share_their_models(data, tmp_path):
    made = Lab("smoke", tmp_path, data)
    names = {
        table: {made.run(cell.model).folder.name for *_, cell, _ in load(table).EXPERIMENT.cells()}
        for table in TABLES
    }
    large = names["main"] | names["memory-scaling"] | names["model-scaling"]
    assert len(large) == 6 + 4 * 4 + 6 * 2
    assert all(names[table] < large for table in ("injection", "corruption", "reconstruction"))


def test_a_cell_holds_what_the_library_measures(data, out):
    load("corruption").run("smoke", out, data)
    cells = json.loads((out / "corruption-smoke.json").read_text())["cells"]
    cell = next(c for c in cells if c["row"] == "Elastic Memory, uniform" and c["column"] == "hardly 50%")
    model, rows = load_model(str(out / "runs" / cell["run"])), samples(data / "proof-pile", "test")
    spread = [rows[0], rows[len(rows) // 2]]
    with em.evaluation.corrupted(model, 0.5, layers="all"):
        expected = em.evaluation.perplexity(model, spread)
    assert model.config.sampling == "uniform"
    assert cell["values"]["ppl"] == pytest.approx(expected.ppl, rel=1e-6)
    assert cell["measured"]["ppl"]["protocol"] == f"{expected.protocol}, corrupt=0.5 in all layers"
    assert cell["seed"] == 42 and cell["measured"]["ppl"]["device"] == "cpu" and cell["values"]["longppl"] is None


def test_an_injected_sampling_reads_the_same_model_otherwise(data, out):
    injection = load("injection").EXPERIMENT
    columns = {"memory 16x": injection.columns["memory 16x"]}
    rows = {name: (settings, "1.00 / 1.00") for name, (settings, _) in injection.rows.items() if "unif" in name[:4]}
    replace(injection, name="injected", columns=columns, rows=rows).run("smoke", out, data)
    one, other = json.loads((out / "injected-smoke.json").read_text())["cells"]
    assert one["run"] == other["run"] and one["values"]["ppl"] != other["values"]["ppl"]
    assert other["measured"]["ppl"]["protocol"].endswith(", sampling=exponential")


def test_interrupted_it_leaves_what_it_has_and_goes_on(data, tmp_path, disturb):
    interrupted = []

    def interrupt(model, out):
        if model.config.memory != "none" and not interrupted:
            interrupted.append(model)
            os.kill(os.getpid(), signal.SIGTERM)
        return out

    disturb(range(1, 1000), interrupt)
    with pytest.raises(SystemExit):
        MINI.run("smoke", tmp_path, data)
    assert "1 of 2 numbers are still to come" in (tmp_path / "mini-smoke.md").read_text()
    assert len(runs(tmp_path)) == 1
    table = MINI.run("smoke", tmp_path, data)
    assert "still to come" not in table.note
    assert sorted(result["starts"] for result in runs(tmp_path).values()) == [1, 2]


def test_longppl_by_a_reference_that_was_given_or_trained(data, tmp_path, monkeypatch):
    every = em.evaluation.Settings(trunc_len=16, sliding_window=8, alpha=-100.0, beta=-100.0)
    monkeypatch.setattr(lab.Settings, "scaled", lambda length: every)
    table = MINI.run("smoke", tmp_path, data)
    assert [row[2] for row in table.rows] == ["- [2.5]", "- [2]"] and "--reference" in table.note
    reference = next(tmp_path.glob("runs/smoke-none-*"))
    given = MINI.run("smoke", tmp_path, data, reference=str(reference))
    console = Console(width=500, record=True, file=io.StringIO())
    console.print(given.rich())
    assert "LongPPL[reference=" in given.note and "LongPPL[reference=" in console.export_text()
    assert all(re.fullmatch(r"\d+(\.\d)? \[.+\]", row[2]) for row in given.rows)
    monkeypatch.setitem(tiers.TIERS, "smoke", replace(REDUCED, reference="infini"))
    own = MINI.run("smoke", tmp_path, data)
    assert len(runs(tmp_path)) == 3 and all("-" not in row[2] for row in own.rows)


def test_smoke_brings_its_own_text(tmp_path):
    one = replace(MINI, rows={"none": MINI.rows["none"]})
    assert one.run("smoke", tmp_path).rows[0][1].endswith(" [1.5]")
    assert samples(tmp_path / "data" / "stdlib-128", "test").manifest["tokenizer"]["name"] == "bytes"


def test_bad_input_is_refused_before_anything_is_trained(data, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "build_model", lambda recipe: pytest.fail("trained"))
    main = load("main").run
    with pytest.raises(FileNotFoundError, match=r"elastic prepare pg19 .*--length 8192 .*; elastic prepare proof-pile"):
        main("small", tmp_path)
    partly = tmp_path / "partly"
    shutil.copytree(data / "pg19", partly / "pg19")
    with pytest.raises(FileNotFoundError, match=f"rows in {partly}/proof-pile, {partly}/fineweb-edu: elastic"):
        main("smoke", tmp_path, partly)
    with pytest.raises(FileNotFoundError, match="holds no model"):
        main("smoke", tmp_path, data, reference=str(partly))
    with pytest.raises(ValueError, match="prepare with --length 8192"):
        main("small", tmp_path, data)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="is one process"):
        main("smoke", tmp_path, data)


def test_files_that_are_not_its_own_are_not_written_over(data, tmp_path):
    path = tmp_path / "mini-smoke.json"
    path.write_text(json.dumps({"table": "mini", "tier": "paper"}))
    with pytest.raises(ValueError, match=r"mini-smoke\.json holds other results .*'paper'"):
        MINI.run("smoke", tmp_path, data)
    path.write_text('{"table": "mini"')
    with pytest.raises(ValueError, match=r"mini-smoke\.json: not readable as JSON .*remove it"):
        MINI.run("smoke", tmp_path, data)
    path.unlink()
    MINI.run("smoke", tmp_path, data)
    kept = next(tmp_path.glob("runs/smoke-none-*/evaluations/ppl-*.json"))
    kept.write_text(kept.read_text()[:100])
    with pytest.raises(ValueError, match=r"ppl-\w+\.json: not readable as JSON .*remove it"):
        MINI.run("smoke", tmp_path, data)
    kept.unlink()
    assert "still to come" not in MINI.run("smoke", tmp_path, data).note


@pytest.mark.parametrize("tier", tiers.TIERS)
@pytest.mark.parametrize("name", TABLES)
def test_every_model_of_every_table_can_be_built(name, tier, tmp_path):
    made = Lab(tier, tmp_path)
    for model in {cell.model for *_, cell, _ in load(name).EXPERIMENT.cells()}:
        config = build_config(made.recipe(model))
        assert config.memory == model.memory and (model.sampling is None or config.sampling == model.sampling)


@pytest.mark.parametrize("name", ["main", "memory-scaling", "model-scaling", "reconstruction"])
def test_the_papers_models_have_the_papers_counts(name, tmp_path):
    made, checked = Lab("paper", tmp_path), 0
    for row, column, cell, paper in load(name).EXPERIMENT.cells():
        if not reproduction.SHOWS[cell.shows]:
            found = reproduction._number(made.counted(cell.model)[cell.shows], 0)
            # eight gates in one layer, where the paper has eight in each (docs/choices.md)
            assert found == ("8" if cell.memory == "memorizing" and cell.shows == "added" else paper), (row, column)
            checked += 1
    assert checked


def test_the_small_tier_has_a_reference_of_its_own(tmp_path):
    made = Lab("small", tmp_path)
    own = made.own_reference("pg19")
    assert own.corpus == "pg19" and build_config(made.recipe(own)).local_attention == "full"


def test_models_of_two_and_four_times_the_parameters(tmp_path):
    from elastic_memory.training.build import count_parameters

    for tier in ("small", "paper"):
        made = Lab(tier, tmp_path)
        one, two, four = (
            count_parameters(build_config(made.recipe(Trained(memory="none", size=size))))
            for size in ("1x", "2x", "4x")
        )
        assert two / one == pytest.approx(2, rel=0.05) and four / one == pytest.approx(4, rel=0.05)


# Labels of the paper's tables, and the columns of ours that stand in each.
PRINTED = {
    "main": {"table:main_results": range(8)},
    "memory-scaling": {"table:scaling_memory": range(15)},
    "model-scaling": {"table:scaling_model": range(9)},
    "injection": {"table:inject_main": [0, 1, 2], "table:inject_scaling": [1, 3, 4, 5, 6, 7, 8]},
    "corruption": {"tab:corruption_results": range(7)},
    "reconstruction": {"tab:reconstruction": range(5)},
}


@pytest.mark.parametrize("name", TABLES)
def test_the_papers_numbers_are_those_it_prints(name):
    if "ELASTIC_SHARED" not in os.environ:
        pytest.skip("ELASTIC_SHARED names no folder with paper/")
    text = (Path(os.environ["ELASTIC_SHARED"]) / "paper" / "elastic-memory.tex").read_text()
    ours = [[cell.strip() for cell in printed.split("&")] for _, printed in load(name).EXPERIMENT.rows.values()]
    for label, columns in PRINTED[name].items():
        body = text.split(f"\\label{{{label}}}")[1].split("\\bottomrule")[0].split("\\midrule", 1)[1]
        lines = [line for line in body.splitlines() if "&" in line]
        theirs = [[_plain(cell) for cell in line.split("&")[1:]] for line in lines]
        assert [[row[column] for column in columns] for row in ours] == theirs, label


def _plain(cell: str) -> str:
    """What a reader sees of a cell: no bold, no underline, no end of line."""
    return re.sub(r"\\(textbf|underline)\{([^}]*)\}", r"\2", cell).replace("\\\\", "").strip()


def test_the_command_lists_and_passes_on(tmp_path, monkeypatch, capsys):
    command.reproduce("list")
    listed = capsys.readouterr().out
    assert all(re.search(rf"^{name} +\S", listed, re.MULTILINE) for name in [*TABLES, "signals", "speed"])
    with pytest.raises(ValueError, match="'signals' has no use for --data"):
        command.reproduce("signals", data=tmp_path, out=tmp_path)
    with pytest.raises(FileNotFoundError, match=f"rows in {tmp_path}/proof-pile"):
        command.reproduce("corruption", data=tmp_path, out=tmp_path)


def test_cells_of_several_commits_are_told_apart():
    speed = load("speed")
    cells = {"Transformer++|1x": {"commit": "a"}, "Melodi|1x": {"commit": "a"}, "Melodi|2x": {"commit": "a"}}
    assert speed._measured_at(cells) == "a"
    cells |= {"Melodi|400m": {"commit": "b"}, "Infini-Transformer|1x": {"commit": "b"}}
    assert speed._measured_at(cells) == "a (Transformer++, Melodi at 1x 2x); b (Infini-Transformer, Melodi at 400m)"
