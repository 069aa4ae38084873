"""Tables that need trained models, at a size that trains one in a second; and the paper's numbers in them."""

import importlib
import io
import json
import os
import random
import re
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import elastic_memory as em
from elastic_memory.commands.reproduce import reproduce
from elastic_memory.common.locks import locked
from elastic_memory.data import prepare, samples
from elastic_memory.evaluation.loading import load_model
from elastic_memory.evaluation.longppl import FoundKeys
from elastic_memory.model.parameters import count_parameters
from elastic_memory.report.page import collect
from elastic_memory.report.tables import Table
from elastic_memory.reproduction import lab, tiers, worker
from elastic_memory.reproduction.experiment import SHOWS, Experiment, _number
from elastic_memory.reproduction.lab import Lab, Trained
from elastic_memory.reproduction.planning import status, tasks, to_do
from elastic_memory.reproduction.scheduler import IN_USE, Scheduler
from elastic_memory.reproduction.tables import NAMES, experiments, wanted
from elastic_memory.training import session
from elastic_memory.training.build import build_config

ROOT = Path(__file__).parents[2]
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


pytestmark = pytest.mark.usefixtures("brief_collections")


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
    """Rows of 128 bytes; the same ones for every corpus."""
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


def make(experiment: Experiment, out: Path, data: Path | None, reference: str | None = None, **options) -> Table:
    """Train and measure what a table needs, and write it."""
    work = Lab("smoke", out, data, reference)
    for model in experiment.models(work):
        pairs = [*wanted(model), *experiment.wanted(model)]
        work.complete(model, list(dict.fromkeys(pairs)), **options)
    return experiment.write(work)


def records(out: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in out.glob("runs/*.json")}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_papers_rows_and_columns_and_is_not_made_twice(name, data, out, monkeypatch):
    experiment = experiments()[name]
    table = make(experiment, out, data)
    assert [column.lower() for column in table.columns] == [
        column.format(books="books", proofs="proofs", edu="edu").lower()
        for column in (experiment.corner, *experiment.columns)
    ]
    number = r"\d+(\.\d+M?)?( \(-?\d+\.\d%\))?"
    for row, (_, printed) in zip(table.rows, experiment.rows.values(), strict=True):
        for text, paper in zip(row[1:], printed.split("&"), strict=True):
            brackets = "" if paper.strip() == "-" else rf" \[{re.escape(paper.strip())}\]"
            assert re.fullmatch(rf"((?:{number}|-)(?: / -)?){brackets}", text), text
    assert "figures mean nothing" in table.note
    missing = sum("longppl" in SHOWS[cell.shows] for *_, cell, _ in experiment.cells())
    assert (f"{missing} of" in table.note) == (missing > 0), "LongPPL has no reference here"
    written = json.loads((out / f"{name}-smoke.json").read_text())
    assert (written["table"], written["tier"]) == (name, "smoke")
    assert (out / f"{name}-smoke.md").read_text() == table.markdown()
    assert collect(out).tables[f"{name}-smoke.md"].rows == [list(row) for row in table.rows], (
        "`elastic report` shows it"
    )
    assert not [path for path in (out / "work").iterdir() if path.name not in ("data", "keys", "locks")], (
        "weights are gone"
    )

    monkeypatch.setattr(session, "build_model", lambda recipe: pytest.fail("trained again"))
    monkeypatch.setattr(lab, "load_model", lambda path: pytest.fail("measured again"))
    assert make(experiment, out, data) == table
    assert make(experiment, out, None) == table, "tables need their records only"


def test_tables_share_their_models(tmp_path):
    made = Lab("smoke", tmp_path)
    names = {table: {made.record(model).path.name for model in experiments()[table].models(made)} for table in TABLES}
    large = names["main"] | names["memory-scaling"] | names["model-scaling"]
    assert len(large) == 6 * 3 + 4 * 4 + 2 * 4 + 6 * 2
    assert all(names[table] < large for table in ("injection", "corruption", "reconstruction"))


def test_a_cell_holds_what_the_library_measures_and_where_it_comes_from(data, tmp_path):
    corruption = experiments()["corruption"]
    one = replace(corruption, rows={row: corruption.rows[row] for row in ("Elastic Memory, uniform",)})
    make(one, tmp_path, data, keep_weights=True)
    cells = json.loads((tmp_path / "corruption-smoke.json").read_text())["cells"]
    cell = next(c for c in cells if c["column"] == "hardly 50%")
    folder = next(path for path in (tmp_path / "work").iterdir() if (path / "result.json").exists())
    model, rows = load_model(str(folder)), samples(data / "proofs", "test")
    spread = [rows[0], rows[len(rows) // 2]]
    with em.evaluation.corrupted(model, 0.5, layers="all"):
        expected = em.evaluation.perplexity(model, spread)
    assert model.config.sampling == "uniform"
    (run,) = cell["runs"]
    assert cell["values"]["ppl"] == run["values"]["ppl"] == pytest.approx(expected.ppl, rel=1e-6)
    measured = run["measured"]["ppl"]
    assert measured["protocol"] == f"{expected.protocol}, corrupt=0.5 in all layers"
    assert measured["data"]["sha256"] == rows.fingerprint and {"commit", "date", "torch", "device"} <= measured.keys()
    assert run["seed"] == 42 and run["trained"].keys() >= {"commit", "date", "machine", "data", "restarts"}
    plain = next(c for c in cells if c["column"] == "Origin.")["runs"][0]["measured"]["ppl"]
    erased = em.evaluation.perplexity(model, spread, "P4").ppl / em.evaluation.perplexity(model, spread).ppl - 1
    assert plain["gain"] == pytest.approx(erased, abs=1e-6)


def test_an_injected_sampling_reads_the_same_model_otherwise(data, out):
    injection = experiments()["injection"]
    columns = {"memory 16x": injection.columns["memory 16x"]}
    rows = {name: (settings, "1.00 / 1.00") for name, (settings, _) in injection.rows.items() if "unif" in name[:4]}
    make(replace(injection, name="injected", columns=columns, rows=rows), out, data)
    one, other = json.loads((out / "injected-smoke.json").read_text())["cells"]
    (first,), (second,) = one["runs"], other["runs"]
    assert first["run"] == second["run"] and first["values"]["ppl"] != second["values"]["ppl"]
    assert second["measured"]["ppl"]["protocol"].endswith(", sampling=exponential")


def test_seeds_are_runs_of_their_own_and_cells_show_their_mean_and_spread(data, tmp_path, monkeypatch):
    monkeypatch.setitem(tiers.TIERS, "smoke", replace(REDUCED, seeds=(1, 2, 3)))
    one = replace(MINI, columns={"PPL": {"shows": "ppl"}}, rows={"none": ({"memory": "none"}, "1.500")})
    table = make(one, tmp_path, data)
    assert len(records(tmp_path)) == 2, "two seeds, unless a table says otherwise"
    found = [record["measured"][0]["metrics"]["ppl"]["P0"]["ppl"] for record in records(tmp_path).values()]
    mean, spread = (found[0] * found[1]) ** 0.5, abs(found[0] - found[1]) / 2**0.5
    assert table.rows[0][1] == f"{mean:.3f}±{spread:.3f} (0.0%) [1.500]" and spread > 0
    assert "seeds 1, 2 (mean ± standard deviation)" in table.note
    assert len(make(replace(one, seeds={"proofs": 3}), tmp_path, data).rows) == 1 and len(records(tmp_path)) == 3


def test_interrupted_it_leaves_what_it_has_and_continues(data, tmp_path, disturb):
    interrupted = []

    def interrupt(model, out):
        if model.config.memory != "none" and not interrupted:
            interrupted.append(model)
            os.kill(os.getpid(), signal.SIGTERM)
        return out

    disturb(range(1, 1000), interrupt)
    with pytest.raises(SystemExit):
        make(MINI, tmp_path, data)
    assert len(records(tmp_path)) == 1, "a run that is not finished does not count"
    assert "3 of 4 numbers are still to come" in MINI.write(Lab("smoke", tmp_path, data)).note
    assert "2 of 4 numbers are still to come" in make(MINI, tmp_path, data).note
    assert sorted(record["trained"]["starts"] for record in records(tmp_path).values()) == [1, 2]


def test_longppl_names_its_reference_and_warns_of_few_key_tokens(data, tmp_path, monkeypatch):
    every = em.evaluation.Settings(trunc_len=16, sliding_window=8, alpha=-100.0, beta=-100.0)
    monkeypatch.setattr(lab.Settings, "scaled", lambda length: every)
    table = make(MINI, tmp_path, data, keep_weights=True)
    assert [row[2] for row in table.rows] == ["- [2.5]", "- [2]"]
    reference = next(path for path in (tmp_path / "work").glob("smoke-proofs-none-*"))
    given = make(MINI, tmp_path, data, reference=str(reference))
    console = Console(width=500, record=True, file=io.StringIO())
    console.print(given.rich())
    assert re.search(r"Key tokens: proofs \d+", given.note)
    assert "LongPPL[reference=" in given.note and "LongPPL[reference=" in console.export_text()
    assert all(re.fullmatch(r"\d+(\.\d)?† \[.+\]", row[2]) for row in given.rows) and "fewer than 500" in given.note
    cell = json.loads((tmp_path / "mini-smoke.json").read_text())["cells"][1]
    measured = cell["runs"][0]["measured"]["longppl"]
    named = measured["reference"]
    assert named["reference"] == reference.name and len(named["weights"]) == 64
    record = tmp_path / "runs" / "smoke-proofs-keys.json"
    found = json.loads(record.read_text())
    assert sum(len(text["keys"]) for text in found["texts"].values()) == measured["key_tokens"] > 0
    assert found["found_by"] == named | {"shared_tokens": True} and found["environment"]["date"]
    assert not re.search("[a-z]{5} [a-z]{3}", str(found["texts"])), "positions, no text"
    path, count = next(tmp_path.glob("runs/*none*.json")), measured["key_tokens"]
    path.write_text(path.read_text().replace(f'"key_tokens": {count}', f'"key_tokens": {count + 1}'))
    again = MINI.write(Lab("smoke", tmp_path, data)).note
    assert f"Key tokens: proofs {count} or {count + 1}." in again, "found twice, by other rounding"


def test_key_tokens_on_record_need_no_reference(data, tmp_path, monkeypatch):
    every = em.evaluation.Settings(trunc_len=16, sliding_window=8, alpha=-100.0, beta=-100.0)
    monkeypatch.setattr(lab.Settings, "scaled", lambda length: every)
    make(MINI, tmp_path, data, keep_weights=True)
    reference = next(path for path in (tmp_path / "work").glob("smoke-proofs-none-*"))
    made = Lab("smoke", tmp_path, data, str(reference))
    assert "smoke-proofs-keys" in _names(made)
    found = made.find_keys("proofs")
    assert "smoke-proofs-keys" not in _names(made)
    assert len(found.texts) == REDUCED.rows and made.known_keys("proofs") == found
    shutil.rmtree(reference)
    model = Trained(memory="none", seed=42)
    gone = Lab("smoke", tmp_path, data, reference.name)
    gone.check_inputs(["proofs"], longppl=True)
    gone.complete(model, [("longppl", lab.Conditions())])
    measured = gone.record(model).find("longppl", asdict(lab.Conditions()))
    assert measured and measured["metrics"]["longppl"]["key_tokens"] > 0
    unnamed = Lab("smoke", tmp_path, data)
    assert unnamed.reference == reference.name, "without --reference it is the one on record"
    unnamed.check_inputs(["proofs"], longppl=True)
    with pytest.raises(FileNotFoundError, match=r"needs a reference model.*--reference"):
        unnamed.check_inputs(["proofs", "books"], longppl=True)
    with pytest.raises(ValueError, match="key tokens of another reference: remove it"):
        Lab("smoke", tmp_path, data, "another").known_keys("proofs")
    record = tmp_path / "runs" / "smoke-proofs-keys.json"
    record.write_text(record.read_text().replace('"trunc_len": 16', '"trunc_len": 15'))
    with pytest.raises(ValueError, match="key tokens of another settings"):
        gone.check_inputs(["proofs"], longppl=True)


def test_of_two_that_find_key_tokens_at_once_the_first_decides(data, tmp_path, monkeypatch):
    """A process for the keys, and one for a model that is already trained; a GPU rounds differently each time."""
    first, second = (FoundKeys({"reference": "any", "shared_tokens": True}, {"text": {"keys": [n]}}) for n in (1, 2))

    def slowly(*args):
        monkeypatch.setattr(lab, "key_tokens", lambda *args: first)
        assert Lab("smoke", tmp_path, data, "any").find_keys("proofs") == first
        return second

    monkeypatch.setattr(lab, "key_tokens", slowly)
    assert Lab("smoke", tmp_path, data, "any").find_keys("proofs") == first
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["smoke-proofs-keys.json"]


def _names(made):
    return [task.name for task in tasks(made, to_do(made, [experiments()["main"]]), 1, False)]


def test_what_is_wanted_later_is_measured_again_with_all_the_rest(data, tmp_path):
    """The weights are gone by then: trained again, the model is measured in full."""
    made, model = Lab("smoke", tmp_path, data), Trained(memory="none", seed=42)
    plain = next(iter(MINI.cells()))[2].conditions
    disturbed = replace(plain, corrupt=0.5, corrupt_layers="all")
    made.complete(model, [("ppl", plain)])
    made.complete(model, [("ppl", plain), ("ppl", disturbed)])
    assert made.missing(model, [("ppl", plain), ("ppl", disturbed)]) == []
    assert len(made.record(model).content["measured"]) == 2


def test_another_call_does_not_measure_what_this_one_measures(data, tmp_path, monkeypatch):
    """Both would add the same numbers to the record, and one remove the weights that the other reads."""
    model, pairs, measure = Trained(memory="none", seed=42), [("ppl", lab.Conditions())], Lab._measure

    def with_another_call(self, *args):
        with pytest.raises(ValueError, match="in use by process"):
            Lab("smoke", tmp_path, data).complete(model, pairs)
        measure(self, *args)

    monkeypatch.setattr(Lab, "_measure", with_another_call)
    made = Lab("smoke", tmp_path, data)
    made.complete(model, pairs)
    assert len(made.record(model).content["measured"]) == 1


def test_what_another_call_works_on_is_left_to_it(data, tmp_path, monkeypatch, capsys):
    model = Trained(memory="none", seed=42)
    made = Lab("smoke", tmp_path, data)
    monkeypatch.setattr(worker, "end_with_scheduler", lambda: None)
    only = replace(MINI, rows={"none": MINI.rows["none"]})
    monkeypatch.setattr(importlib.import_module("elastic_memory.reproduction.tables.main"), "EXPERIMENT", only)
    with locked(tmp_path / "work" / "locks" / made.record(model).content["name"]):
        job = worker.Job(tier="smoke", out=str(tmp_path), data=str(data), model=asdict(model))
        with pytest.raises(SystemExit) as ended:
            worker.main(job.command()[-1])
        assert ended.value.code == IN_USE
        reproduce(["main"], out=tmp_path, data=data)
    assert f"{made.record(model).content['name']} is left to another call" in capsys.readouterr().err
    assert not made.record(model).trained


def test_other_rows_than_those_on_record_are_refused_before_anything_is_trained(data, tmp_path, monkeypatch):
    """Seeds that are trained later must be comparable with the earlier ones."""
    Lab("smoke", tmp_path, data).complete(Trained(memory="none", seed=42), [("ppl", lab.Conditions())])
    path = next(tmp_path.glob("runs/smoke-proofs-none-*.json"))
    whole = path.read_text()
    monkeypatch.setattr(session, "build_model", lambda recipe: pytest.fail("trained"))
    for split, held in (("test", samples(data / "proofs", "test").fingerprint), ("training", None)):
        path.write_text(whole.replace(held or json.loads(whole)["trained"]["data"], "0123456789"))
        with pytest.raises(ValueError, match=rf"{path.name} was made with other {split} rows \(01234567\)"):
            reproduce(["main"], out=tmp_path, data=data)
    record = json.loads(path.read_text())
    record["measured"][0]["data"]["tokenizer"] = "a former hash"
    path.write_text(json.dumps(record))
    Lab("smoke", tmp_path, data).check_rows(["proofs"])


def test_interrupted_by_ctrl_c_a_call_of_several_processes_writes_its_tables(data, tmp_path, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reproduce(["main"], out=tmp_path, data=data, parallel=2)
    assert (tmp_path / "main-smoke.md").exists()


def test_numbers_that_do_not_compare_are_not_put_into_one_table(data, tmp_path):
    make(MINI, tmp_path, data)
    path = next(tmp_path.glob("runs/smoke-proofs-none-*.json"))
    record = json.loads(path.read_text())
    for part, key, what in ((record["measured"][0]["data"], "sha256", "test"), (record["trained"], "data", "training")):
        right, part[key] = part[key], "other rows"
        path.write_text(json.dumps(record))
        with pytest.raises(ValueError, match=rf"different {what} rows.*: not comparable"):
            MINI.write(Lab("smoke", tmp_path))
        part[key] = right


def test_the_page_of_our_own_results_can_be_made():
    assert collect(ROOT / "results").tables["learning-rate-small.md"].rows[-1][-1] == ""


def test_smoke_brings_its_own_text(tmp_path):
    one = replace(MINI, rows={"none": MINI.rows["none"]})
    assert make(one, tmp_path, None).rows[0][1].endswith(" [1.5]")
    prepared = samples(tmp_path / "work" / "data" / "stdlib-128", "test")
    assert prepared.manifest["tokenizer"]["name"] == "bytes"


def test_bad_input_is_refused_before_anything_is_trained(data, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "build_model", lambda recipe: pytest.fail("trained"))
    with pytest.raises(FileNotFoundError, match=r"elastic prepare TEXT .*8192 --out \S*proofs; elastic prepare TEXT"):
        reproduce(["main"], tier="small", out=tmp_path)
    partly = tmp_path / "partly"
    shutil.copytree(data / "proofs", partly / "proofs")
    with pytest.raises(FileNotFoundError, match=f"rows in {partly}/books, {partly}/edu: elastic"):
        reproduce(["main"], out=tmp_path, data=partly)
    with pytest.raises(FileNotFoundError, match=r"holds no model.*--reference"):
        reproduce(["main"], out=tmp_path, data=data, reference=str(partly))
    with pytest.raises(ValueError, match="prepare with --length 8192"):
        Lab("small", tmp_path, data).run(Trained(memory="none", seed=1))
    with pytest.raises(ValueError, match="did you mean 'corruption'"):
        reproduce(["coruption"], out=tmp_path)
    with pytest.raises(ValueError, match="tier smoke has no table learning-rate: choose small"):
        reproduce(["learning-rate"], out=tmp_path, data=data)
    with pytest.raises(ValueError, match="--parallel 0"):
        reproduce(["main"], out=tmp_path, parallel=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="starts its own processes"):
        reproduce(["main"], out=tmp_path, data=data)


def test_files_that_are_not_its_own_are_not_written_over(data, tmp_path):
    path = tmp_path / "mini-smoke.json"
    path.write_text(json.dumps({"table": "mini", "tier": "paper"}))
    with pytest.raises(ValueError, match=r"mini-smoke\.json holds other results .*'paper'"):
        make(MINI, tmp_path, data)
    path.write_text('{"table": "mini"')
    with pytest.raises(ValueError, match=r"mini-smoke\.json: not valid JSON .*remove it"):
        make(MINI, tmp_path, data)
    path.unlink()
    make(MINI, tmp_path, data)
    kept = next(tmp_path.glob("runs/smoke-proofs-none-*.json"))
    whole = kept.read_text()
    kept.write_text(whole[:100])
    with pytest.raises(ValueError, match=r"none-seed42-\w+\.json: not valid JSON .*remove it"):
        make(MINI, tmp_path, data)
    kept.write_text(whole.replace('"seed": 42', '"seed": 43', 1))
    with pytest.raises(ValueError, match="is the record of another run"):
        make(MINI, tmp_path, data)
    for damage in ({"measured": [1]}, {"measured": [{}]}, {"measured": {}}, {"trained": 5}, {"trained": {}}):
        kept.write_text(json.dumps(json.loads(whole) | damage))
        with pytest.raises(ValueError, match="is damaged: remove it"):
            make(MINI, tmp_path, data)


def test_the_command_trains_in_this_process_and_writes_without_training(data, tmp_path, capsys):
    reproduce(["corruption"], out=tmp_path, data=data, minutes=0)
    assert "42 of 42 numbers are still to come" in (tmp_path / "corruption-smoke.md").read_text()
    reproduce(["corruption"], out=tmp_path, data=data)
    assert "21 of 42 numbers are still to come" in (tmp_path / "corruption-smoke.md").read_text()
    made = Lab("smoke", tmp_path, data)
    assert to_do(made, [experiments()["corruption"]]) == []
    rows, _ = status(made)
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["corruption"][1:3] == ["21", "0"] and by_name["main"][2] == "15"
    capsys.readouterr()
    reproduce(["status"], out=tmp_path)
    assert "corruption" in capsys.readouterr().out


def test_a_run_that_was_trained_elsewhere_is_not_trained_again(data, tmp_path, monkeypatch):
    made = Lab("smoke", tmp_path, data)
    model = MINI.models(made)[0]
    recipe = made.run(model).recipe.replace(name="smoke-none")  # as `elastic train` would name it
    session.train(recipe, data / "proofs", tmp_path / "work")
    monkeypatch.setattr(session, "build_model", lambda recipe: pytest.fail("trained again"))
    again = Lab("smoke", tmp_path, data)
    again.complete(model, MINI.wanted(model))
    assert (tmp_path / "work" / f"smoke-none-{recipe.digest(again.run(model).data)}" / "model").exists(), (
        "not ours to remove"
    )
    assert again.record(model).find("ppl", asdict(MINI.models(made) and next(iter(MINI.cells()))[2].conditions))


@pytest.mark.parametrize("tier", tiers.TIERS)
@pytest.mark.parametrize("name", [*TABLES, "learning-rate"])
def test_every_model_of_every_table_can_be_built(name, tier, tmp_path):
    made, experiment = Lab(tier, tmp_path), experiments()[name]
    for model in experiment.models(made) if tier in experiment.tiers else []:
        config = build_config(made.recipe(model))
        assert model.sampling is None or config.sampling == model.sampling
        assert model.memory in (config.memory, "full")


def test_names_say_what_differs():
    model = Trained(memory="elastic", sampling="uniform", multiple=4, points=4, size="2x", corpus="books", seed=2)
    assert model.name == "books-elastic-uniform-memory4x-points4x-model2x-seed2"
    swept = Trained(memory="none", learning_rate=1e-3, tokens=75_000_000, seed=1)
    assert swept.name == "proofs-none-lr0.001-75M-seed1"


def test_memory_tokens_in_proportion_to_memory(tmp_path):
    made = Lab("small", tmp_path)
    rows = {row: cell for row, column, cell, _ in experiments()["memory-scaling"].cells() if column == "16x PPL"}
    points = {row: build_config(made.recipe(cell.model(1))).memory_points for row, cell in rows.items()}
    assert points["Elastic, uniform"] == 128 and points["Elastic, uniform, M ~ N"] == 2048


@pytest.mark.parametrize("name", ["main", "memory-scaling", "model-scaling", "reconstruction"])
def test_the_papers_models_have_the_papers_counts(name, tmp_path):
    made, checked = Lab("paper", tmp_path), 0
    for row, column, cell, paper in experiments()[name].cells():
        if not SHOWS[cell.shows] and paper != "-":
            found = _number(made.counted(cell.model(42))[cell.shows], 0)
            # eight gates in one layer, where the paper has eight in each (docs/choices.md)
            assert found == ("8" if cell.memory == "memorizing" and cell.shows == "added" else paper), (row, column)
            checked += 1
    assert checked


def test_models_of_two_and_four_times_the_parameters(tmp_path):
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
    ours = [[cell.strip() for cell in printed.split("&")] for _, printed in experiments()[name].rows.values()]
    ours = [row for row in ours if set(row) != {"-"}]
    for label, columns in PRINTED[name].items():
        body = text.split(f"\\label{{{label}}}")[1].split("\\bottomrule")[0].split("\\midrule", 1)[1]
        lines = [line for line in body.splitlines() if "&" in line]
        theirs = [[_plain(cell) for cell in line.split("&")[1:]] for line in lines]
        assert [[row[column] for column in columns] for row in ours] == theirs, label


def _plain(cell: str) -> str:
    """What a reader sees of a cell: no bold, no underline, no end of line."""
    return re.sub(r"\\(textbf|underline)\{([^}]*)\}", r"\2", cell).replace("\\\\", "").strip()


def test_the_command_lists_and_passes_on(tmp_path, capsys):
    reproduce(["list"])
    listed = capsys.readouterr().out
    assert all(re.search(rf"^{name} +\S", listed, re.MULTILINE) for name in [*TABLES, "signals", "speed"])
    assert NAMES[0] == "main"
    with pytest.raises(ValueError, match="'signals' does not use --data"):
        reproduce(["signals"], data=tmp_path, out=tmp_path)
    with pytest.raises(FileNotFoundError, match=f"rows in {tmp_path}/proofs"):
        reproduce(["corruption"], data=tmp_path, out=tmp_path)


def test_committed_tables_are_made_of_the_committed_records(tmp_path):
    shutil.copytree(ROOT / "results" / "runs", tmp_path / "runs")
    made = Lab("small", tmp_path)
    for name, experiment in experiments().items():
        experiment.write(made)
        for suffix in ("json", "md"):
            file = f"{name}-small.{suffix}"
            assert (tmp_path / file).read_bytes() == (ROOT / "results" / file).read_bytes(), file


def test_cells_of_several_commits_are_told_apart():
    from elastic_memory.reproduction.tables import speed

    cells = {"Transformer++|1x": {"commit": "a"}, "Melodi|1x": {"commit": "a"}, "Melodi|2x": {"commit": "a"}}
    assert speed._measured_at(cells) == "a"
    cells |= {"Melodi|400m": {"commit": "b"}, "Infini-Transformer|1x": {"commit": "b"}}
    assert speed._measured_at(cells) == "a (Transformer++, Melodi at 1x 2x); b (Infini-Transformer, Melodi at 400m)"
