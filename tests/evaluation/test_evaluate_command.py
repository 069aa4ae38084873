"""`elastic evaluate` from a prepared folder and a checkpoint to JSON, a table, and one-line errors."""

import json
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from elastic_memory import cli
from elastic_memory.data import prepare, samples
from elastic_memory.evaluation import corrupted, perplexity
from elastic_memory.evaluation import metrics as metrics_of_models
from elastic_memory.evaluation.inputs import Spread
from elastic_memory.evaluation.journal import Journal
from elastic_memory.evaluation.loading import load_model
from elastic_memory.evaluation.longppl import Settings
from elastic_memory.evaluation.metrics import Evaluation
from elastic_memory.evaluation.recall import recall
from elastic_memory.evaluation.record import describe
from elastic_memory.report.tables import Table
from tests.conftest import small_model
from tests.evaluation.conftest import TEXT, byte_level_bpe, llama, model_with

LONGPPL = ["elastic", "--data", "rows", "--metric", "longppl", "--reference", "full"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Prepared rows, a tokenizer, an elastic model, one without memory, and a full-attention reference."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "text").mkdir()
    for i in range(12):
        (folder / "text" / f"{i}.txt").write_text(TEXT[i * 9000 : (i + 1) * 9000])
    byte_level_bpe(400).save_pretrained(folder / "tokenizer")
    shares = (0.0, 0.0, 1.0)
    prepare([str(folder / "text")], folder / "rows", tokenizer=str(folder / "tokenizer"), length=128, shares=shares)
    model_with(vocab_size=400, block_size=16).save_pretrained(folder / "elastic")
    model_with("none", vocab_size=400, block_size=16).save_pretrained(folder / "none")
    model_with("none", vocab_size=400, local_attention="full", seed=5).save_pretrained(folder / "full")
    other = llama(700)
    other.save_pretrained(folder / "other")
    byte_level_bpe(700).save_pretrained(folder / "other")
    return folder


@pytest.fixture
def elastic(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["elastic", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return run


def test_json_and_table_agree_with_the_library(place, elastic, tmp_path):
    out = tmp_path / "results" / "one.json"
    code, shown, _ = elastic(
        "evaluate", place / "elastic", "--data", place / "rows", "--out", out, "--limit", 8, "--batch-size", 3,
        "--protocol", "P0", "--protocol", "P4", "--metric", "ppl",
    )  # fmt: skip
    assert code == 0
    written = json.loads(out.read_text())
    model = load_model(str(place / "elastic"))
    rows = rows_of_place(place, 8)
    expected = perplexity(model, rows)
    assert written["metrics"]["ppl"]["P0"]["ppl"] == pytest.approx(expected.ppl, rel=1e-6)
    assert written["metrics"]["ppl"]["P0"]["interval"][0] < expected.ppl
    assert "PPL[P0, L=16, T=128, reset=sample, n=127 x 8] = " in shown and "PPL by block" in shown
    assert written["data"]["sha256"] == samples(place / "rows", "test").fingerprint
    assert written["memory"][0]["memory"] == "elastic" and written["log_softmax"] == "float32"
    assert [path.name for path in out.parent.iterdir()] == ["one.json"]


def test_a_record_counts_parameters_without_padding():
    plain, padded = (small_model(head_dim=10, pad_heads=pad) for pad in (False, True))
    counts = [describe("", Evaluation(model=model, rows=[]), None, {})["parameters"] for model in (plain, padded)]
    assert counts == [plain.num_parameters()] * 2
    assert padded.num_parameters() > plain.num_parameters()


def rows_of_place(place, count):
    return Spread(samples(place / "rows", "test"), count)


def test_conditions_change_the_number_and_are_named_in_it(place, elastic):
    code, shown, _ = elastic(
        "evaluate", place / "elastic", "--data", place / "rows", "--limit", 4, "--sampling", "uniform", "--points", 7,
        "--order", 9, "--corrupt", 0.5, "--corrupt-layers", "all", "--seed", 3,
    )  # fmt: skip
    assert code == 0
    model = load_model(str(place / "elastic"))
    model.set_retrieval(sampling="uniform", points=7, order=9)
    with corrupted(model, 0.5, "all", seed=3):
        expected = perplexity(model, rows_of_place(place, 4))
    named = "n=127 x 4, sampling=uniform, points=7, order=9, corrupt=0.5 in all layers]"
    assert f"{named} = {expected.ppl:.4g}" in shown


@pytest.mark.parametrize("reference", ["full", "other"])
def test_longppl_by_a_reference_of_our_own_or_another(place, elastic, tmp_path, reference):
    arguments = ["evaluate", place / "elastic", "--data", place / "rows", "--metric", "longppl", "--limit", 5]
    arguments += ["--reference", place / reference, "--alpha", 0.5, "--beta", -12, "--out", tmp_path / "one.json"]
    code, shown, error = elastic(*arguments)
    assert code == 0, error
    written = json.loads((tmp_path / "one.json").read_text())["metrics"]["longppl"]
    assert written["key_tokens"] > 0 and written["longppl"] > 1
    assert "K=16, w=4, alpha=0.5, beta=-12" in shown  # the released proportions for rows of 128
    assert len(list((tmp_path / "keys").iterdir())) == 5
    assert elastic(*arguments)[1] == shown  # from the keys found before


def test_probes_print_tables(place, elastic):
    code, shown, _ = elastic(
        "evaluate", place / "elastic", "--data", place / "rows", "--limit", 2, "--metric", "reconstruction", "--metric",
        "spectrum", "--reconstruct", 4, "--reconstruct", 8,
    )  # fmt: skip
    assert code == 0 and "relative" in shown and "energy" in shown
    code, shown, _ = elastic("evaluate", place / "elastic", "--metric", "recall", "--recall-steps", 1)
    assert code == 0 and "variables" in shown and "64" in shown


def test_a_killed_evaluation_goes_on_where_it_stopped(place, elastic, tmp_path, monkeypatch):
    out = tmp_path / "one.json"
    arguments = ["evaluate", place / "elastic", "--data", place / "rows", "--limit", 6, "--out", out]
    add, scored = Journal.add, []

    def die(self, record):
        add(self, record)
        scored.append(record["row"])
        if len(scored) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", die)
    code, _, _ = elastic(*arguments)
    assert code != 0 and not out.exists()
    code, shown, _ = elastic(*arguments)
    assert code == 0 and scored == [0, 1, 2, 3, 4, 5] and "x 6]" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at/all", "--data", "rows"], "nowhere/at/all"),
        (["text", "--data", "rows"], "holds no model"),
        (["elastic"], "--data is missing"),
        (["elastic", "--data", "text"], "no prepared rows"),
        (["elastic", "--data", "rows", "--split", "exam"], "no split 'exam'"),
        (["elastic", "--data", "rows", "--metric", "bleu"], "'bleu': known: ppl, longppl"),
        (["elastic", "--data", "rows", "--protocol", "P9"], "'P9': known: P0, P1, P4"),
        (["elastic", "--data", "rows", "--corrupt", "2"], "between 0 and 1"),
        (["none", "--data", "rows", "--sampling", "uniform"], "no memory"),
        (["other", "--data", "rows", "--sampling", "uniform"], "no memory"),
        (["elastic", "--data", "rows", "--sampling", "unifrom"], "uniform"),
        (["none", "--data", "rows", "--metric", "reconstruction"], "give the orders to reconstruct"),
        ([*LONGPPL, "--trunc-len", "128"], "trunc_len = 128"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(place, elastic, monkeypatch, arguments, message):
    monkeypatch.chdir(place)
    code, _, error = elastic("evaluate", *arguments)
    assert code == 2 and message in error
    assert "Traceback" not in error


def test_rows_of_another_tokenizer_are_refused(place, elastic, tmp_path):
    model_with(vocab_size=400, block_size=16).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "training.json").write_text(json.dumps({"tokenizer": "0" * 64}))
    code, _, error = elastic("evaluate", tmp_path, "--data", place / "rows")
    assert code == 2 and "was trained with tokenizer 000000000000" in error


def test_bench_prints_ratios_to_transformer_plus_plus(elastic, tmp_path):
    torch.manual_seed(0)
    code, shown, error = elastic(
        "bench", "--memory", "elastic", "--length", 128, "--rows", 1, "--repeats", 1, "--out", tmp_path / "bench.json"
    )
    assert code == 0, error
    written = json.loads((tmp_path / "bench.json").read_text())
    assert [row["name"] for row in written["results"]] == ["none", "elastic"]
    assert written["results"][0]["training_ratio"] == 1.0 and "1.00" in shown


@pytest.mark.parametrize(
    ("block", "metrics"),
    [
        (8, ["--protocol", "P0", "--protocol", "P4"]),
        (8, ["--metric", "reconstruction", "--reconstruct", 4]),
        (32, ["--metric", "recall", "--recall-steps", 1]),
    ],
)
def test_numbers_are_whole_in_80_columns(place, elastic, monkeypatch, tmp_path, block, metrics):
    model_with(vocab_size=400, block_size=block, memory_layers=[0, 1]).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(metrics_of_models, "recall", partial(recall, samples=2))
    wide = elastic("evaluate", tmp_path, "--data", place / "rows", "--limit", 2, *metrics)[1]
    real = monkeypatch.setenv
    monkeypatch.setattr(monkeypatch, "setenv", lambda name, value: real(name, "80"))
    code, narrow, error = elastic("evaluate", tmp_path, "--data", place / "rows", "--limit", 2, *metrics)
    assert code == 0, error
    assert "…" not in narrow and "..." not in narrow.replace(" ...", "")
    assert set(wide.split()) - set(narrow.split()) <= {word for word in wide.split() if set(word) <= set("─╴╶")}


@pytest.mark.parametrize("metric", ["ppl", "longppl", "reconstruction", "spectrum", "recall"])
def test_every_metric_tells_how_far_it_is(place, metric):
    from elastic_memory.evaluation.metrics import Evaluation, evaluate, progress_total

    told = []
    task = Evaluation(
        model=load_model(str(place / "elastic")),
        rows=rows_of_place(place, 3),
        tokenizer=samples(place / "rows", "test").tokenizer(),
        reference=str(place / "full"),
        settings=Settings.scaled(128),
        orders=[4],
        recall_steps=2,
    )
    evaluate(task, [metric], lambda name, count: told.append((name, count)))
    assert sum(count for _, count in told) == progress_total(task, metric)
    assert len(told) > 2


def test_a_log_gets_a_line_a_minute(place, elastic, monkeypatch):
    from elastic_memory.common import progress

    clock, advance = [0], progress.Bars.advance

    def row(bars, task, count=1):
        clock[0] += 45 * count * (bars.tasks[task].description == "ppl")
        advance(bars, task, count)

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(progress.Bars, "advance", row)
    code, _, said = elastic("evaluate", place / "elastic", "--data", place / "rows", "--limit", 6)
    assert code == 0
    told = [line for line in said.splitlines() if line.startswith("ppl")]
    assert told == ["ppl  2/6  45 s each  0:03:00 left", "ppl  4/6  45 s each  0:01:30 left", "ppl  6/6  45 s each"], (
        "every second time, 90 seconds"
    )


def test_rows_of_another_vocabulary_are_refused(place, elastic, tmp_path):
    shares = (0.0, 0.0, 1.0)
    prepare([str(place / "text")], tmp_path / "bytes", tokenizer="bytes", length=128, shares=shares)
    code, _, error = elastic("evaluate", place / "other", "--data", tmp_path / "bytes")
    assert code == 2 and "has another tokenizer" in error
    llama(32_000).save_pretrained(tmp_path / "large")
    code, _, error = elastic("evaluate", tmp_path / "large", "--data", tmp_path / "bytes")
    assert code == 2 and "has a vocabulary of 256 (bytes)" in error and "of 32,000" in error


def test_rows_that_were_changed_are_not_scored(place, elastic, tmp_path):
    shutil.copytree(place / "rows", tmp_path / "rows")
    content = bytearray((tmp_path / "rows" / "test.bin").read_bytes())
    content[0] ^= 1
    (tmp_path / "rows" / "test.bin").write_bytes(content)
    code, _, error = elastic("evaluate", place / "elastic", "--data", tmp_path / "rows")
    assert code == 2 and "test.bin is damaged" in error


def test_numbers_stay_whole_in_fewer_than_80_columns(capsys):
    """A table that does not fit breaks its cells between numbers, and never shows part of one."""
    numbers = [f"{i}2.34567" for i in range(9)]
    table = Table("wide", ["metric", "value by block", "interval"], [["ppl", " ".join(numbers), "1.23456 to 9.87654"]])
    Console(width=44).print(table.text(44))
    assert set(numbers) <= set(capsys.readouterr().out.split())
    Console(width=60).print(Table("many", ["a", *numbers], [["b", *numbers]]).text(60))
    shown = [word for word in capsys.readouterr().out.split() if word[0].isdigit()]
    assert set(shown) == set(numbers)
