"""The study of memories in a pretrained model: on a tiny one, by command, from nothing to the table."""

import json
import math
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from elastic_memory.cli import app
from elastic_memory.data import load_tokenizer, prepare
from elastic_memory.evaluation.copies import with_copies
from elastic_memory.evaluation.loading import load_model
from elastic_memory.evaluation.longppl import Settings, key_positions
from elastic_memory.evaluation.losses import streamed_losses
from elastic_memory.memory import MEMORIES
from elastic_memory.model import attach_memory
from elastic_memory.reproduction import real_measures, real_model
from elastic_memory.reproduction.real_model import Study
from elastic_memory.reproduction.scheduler import IN_USE
from elastic_memory.reproduction.tables import real_model as table


def documents(losses: dict[str, list[float]], tokens: int = 10) -> real_measures.Documents:
    return {name: {"loss": values, "tokens": [float(tokens)] * len(values)} for name, values in losses.items()}


def test_perplexities_and_paired_differences():
    base = documents({"a": [20.0, 10.0, 30.0], "b": [20.0, 40.0, 20.0]})
    lower = documents({"a": [20.0, 9.0, 29.0], "b": [20.0, 39.0, 19.0]})  # a tenth less for every token beyond
    assert real_measures.ppl_of(base, 0, 1) == pytest.approx(math.exp(2.0))
    assert real_measures.ppl_of(base, 1) == pytest.approx(math.exp(100 / 40))
    found, low, high = real_measures.difference([lower], [base])
    assert found == pytest.approx(math.expm1(-0.1)) and low == pytest.approx(found) and high == pytest.approx(found)
    noisy = documents({"a": [20.0, 5.0, 30.0], "b": [20.0, 44.0, 20.0]})
    found, low, high = real_measures.difference([noisy], [base])
    assert low < found < high and low < 0 < high
    both, *_ = real_measures.difference([lower, noisy], [base, base])  # seeds are averaged
    assert both == pytest.approx(math.expm1((-4 - 1) / 2 / 40))


def test_losses_are_those_of_every_token_once():
    class Rows(list):
        def document(self, index):
            return str(index // 2)

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2, vocab_size=20)).eval()  # fmt: skip
    rows = Rows(torch.randint(0, 20, (3, 30)).tolist())
    found = real_measures.by_document(rows, real_measures.row_losses(partial(streamed_losses, model, call=7), rows), 8)
    assert {name: sum(held["tokens"]) for name, held in found.items()} == {"0": 58.0, "1": 29.0}
    with torch.no_grad():
        logits = model(torch.tensor(rows)).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.mT, torch.tensor(rows)[:, 1:], reduction="none").double()
    assert np.allclose(found["1"]["loss"], [part.sum() for part in losses[2].split(8)], atol=1e-4)


def test_key_tokens_are_those_of_the_reference_and_their_losses_are_summed():
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                         vocab_size=20, max_position_embeddings=24, initializer_range=1.0)  # fmt: skip
    model, rows = LlamaForCausalLM(config).eval(), torch.randint(0, 20, (4, 40))
    keys = real_measures.find_keys(model, rows, 2, 8)
    settings = Settings(trunc_len=8, sliding_window=2)
    assert keys == {str(i): key_positions(model, rows[i][:24], settings) for i in (0, 2)}
    assert all(8 <= place < 24 for places in keys.values() for place in places) and any(keys.values())
    losses = [np.arange(39.0) + 100 * index for index in range(4)]
    wanted = [place - 1 + 100 * int(index) for index, places in keys.items() for place in places]
    assert real_measures.key_loss(losses, keys) == {"loss": sum(wanted), "tokens": len(wanted)}


def test_every_design_is_one_that_exists():
    trained = [settings for settings in table.DESIGNS.values() if "untrained" not in settings]
    assert {settings["memory"] for settings in trained} <= set(MEMORIES)
    jobs = table.jobs("small", 3, ("proofs", "books"), list(table.DESIGNS))
    bounds = len(table.DESIGNS) - len(trained)
    assert len({job.name for job in jobs}) == len(jobs) == 2 * (3 * len(trained) + bounds)
    assert jobs[0].seed == 1 and jobs[0].design == "full-attention" and jobs[0].corpus == "proofs"
    assert not any("," in name for name in table.DESIGNS)  # --designs separates them so
    for job in jobs:
        blocks, local = job.design.endswith("in-blocks"), job.settings.get("local_attention", "")
        assert (local == "block") == blocks and job.settings.get("block_size") in (None, 1024 if blocks else 256)
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=20)
    for job in table.jobs("smoke", 1, ("proofs",), list(table.DESIGNS)):
        if "untrained" not in job.settings:
            attach_memory(LlamaForCausalLM(LlamaConfig(**shape)), **job.settings)


@pytest.mark.parametrize("tier", table.PLANS)
def test_rows_have_room_for_copies_at_every_distance(tier):
    plan = table.PLANS[tier]
    assert all(with_copies(torch.arange(plan.length), distance, plan.span)[1] for distance in plan.distances)


@pytest.fixture
def pretrained(tmp_path):
    load_tokenizer("bytes").save(tmp_path / "llama")
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=256)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def rows(pretrained, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(6):
        (texts / f"{number}.txt").write_text(" ".join(f"word{i * (number + 3) % 97}" for i in range(400)))
    prepare(str(texts), tmp_path / "rows" / "proofs", tokenizer=str(pretrained), length=256, shares=(0.6, 0.0, 0.4))
    return tmp_path / "rows"


def test_by_command(pretrained, rows, tmp_path):
    """Bounds and designs: trained, measured, compared; a second call has nothing to do; weights are gone."""
    out = tmp_path / "out"
    some = ["full attention", "attention sinks", "no memory", "elastic cells"]
    for job in table.jobs("smoke", 1, ("proofs",), some):
        Study(table.PLANS["smoke"], out, rows, str(pretrained)).complete(job)
    command = ["reproduce", "real-model", "--data", str(rows), "--out", str(out), "--model", str(pretrained)]
    command += ["--parallel", "2", "--seeds", "1", "--designs"]
    done = CliRunner().invoke(app, [*command, "clock per head in blocks", "--keep-weights"])
    assert done.exit_code == 0, done.output
    full, sinks, base, cells = json.loads((out / "real-model-smoke.json").read_text())["rows"][:4]
    assert base["design"] == "no memory" and cells["design"] == "elastic cells" and cells["parameters"] == 4
    assert cells["first"] == pytest.approx(base["first"], rel=1e-3) and len(cells["interval"]) == 2
    assert full["first"] == pytest.approx(sinks["first"], rel=1e-6) and full["beyond"] != sinks["beyond"]
    assert (
        "interval" not in full
        and full["floats"] is None
        and base["floats"] == 0
        and full["training"] is None
        and sinks["decoding"] is None
    )
    for row in (full, sinks, base, cells):
        assert len(row["recall"]) == 2 and row["to 256"] == row["beyond"] and len(row["by_part"][0]) == 4
    run = json.loads((out / "runs" / "real-smoke-proofs-elastic-cells-seed1.json").read_text())
    assert run["environment"]["date"] and run["model"]["sha256"] and run["data"]["sha256"] and run["decoding"] > 0
    every = len(table.jobs("smoke", 3, table.CORPORA, list(table.DESIGNS)))
    said = CliRunner().invoke(app, ["reproduce", "status", "--out", str(out)]).output
    assert said.split("real-model")[1].split()[:2] == [str(every), str(every - 5)]
    plan, job = table.PLANS["smoke"], table.jobs("smoke", 1, ("proofs",), some)[-1]
    other = Study(replace(plan, execution={"micro_batch": 2}), out, rows, str(pretrained))
    assert other.record(job) == run  # how the work fits a device does not matter to what was measured
    assert other.expected_seconds([job], None) == pytest.approx(sum(run["seconds"].values()))
    with pytest.raises(ValueError, match="record of another plan or design"):
        Study(replace(plan, rows=7), out, rows, str(pretrained)).record(job)
    found = json.loads((out / "runs" / "real-smoke-proofs-keys.json").read_text())
    keys = found["keys"]
    assert {"date", "commit", "torch"} <= found["environment"].keys()
    assert run["longppl"]["tokens"] == sum(map(len, keys.values())) and len(keys) == 4
    before = (out / "real-model-smoke.md").read_text()
    done = CliRunner().invoke(app, [*command, "elastic cells,clock per head in blocks, no memory"])
    assert done.exit_code == 0 and (out / "real-model-smoke.md").read_text() == before
    (kept,) = (out / "work").glob("real-*")  # the weights of all others are gone
    assert kept.name == "real-smoke-proofs-clock-per-head-in-blocks-seed1"
    (run,) = kept.glob("runs/*")
    assert load_model(str(run)).memories and not (run / "checkpoints").exists()
    other = [*command, "no memory"]
    other[other.index("--model") + 1] = str(tmp_path / "another")
    done = CliRunner().invoke(app, other)
    assert done.exit_code and "has records of llama, not of another" in str(done.exception)


def test_of_two_calls_at_once_one_works_on_a_design(pretrained, rows, tmp_path, monkeypatch):
    (job,) = table.jobs("smoke", 1, ("proofs",), ["full attention"])
    out, plan, begun = tmp_path / "out", table.PLANS["smoke"], []

    def measured(study, job):
        begun.append(job)
        if len(begun) == 1:
            given = {"out": str(out), "data": str(rows), "model": str(pretrained), "keep_weights": False}
            with pytest.raises(SystemExit) as ended:
                real_model.main(json.dumps([asdict(plan), given, asdict(job)]))
            assert ended.value.code == IN_USE
        complete(study, job)

    complete = Study._complete
    monkeypatch.setattr(Study, "_complete", measured)
    monkeypatch.setattr(real_model, "end_with_scheduler", lambda: None)
    study = Study(plan, out, rows, str(pretrained))
    study.complete(job)
    found = study.record(job)
    study.complete(job)  # was begun before, and waited for a free place
    assert len(begun) == 1 and study.record(job) == found


def test_what_does_not_fit_is_refused(tmp_path):
    for arguments, said in [
        (["real-model", "--data", str(tmp_path), "--minutes", "1"], "has no rows of proofs or books: elastic prepare"),
        (["real-model", "--minutes", "1"], "needs --data"),
        (["real-model", "--tier", "paper"], "tier paper has no table real-model"),
        (["real-model", "--reference", "x"], "does not use --reference"),
        (["real-model", "--designs", "no memory,elastic cell"], "'elastic cell': did you mean 'elastic cells'?"),
        (["main", "--designs", "x"], "does not use --designs"),
        (["main", "--corpora", "proof"], "--corpora: 'proof': did you mean 'proofs'?"),
        (["signals", "--corpora", "proofs"], "does not use --corpora"),
        (["main", "--model", "x"], "does not use --model"),
    ]:
        done = CliRunner().invoke(app, ["reproduce", *arguments, "--out", str(tmp_path / "out")])
        assert done.exit_code and said in str(done.output) + str(done.exception)
