"""The study of memories in a pretrained model: on a tiny one, by command, from nothing to the table."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from elastic_memory.cli import app
from elastic_memory.data import load_tokenizer, prepare
from elastic_memory.memory import MEMORIES
from elastic_memory.reproduction import real_model
from elastic_memory.reproduction.tables import real_model as table


def documents(losses: dict[str, list[float]], tokens: int = 10) -> real_model.Documents:
    return {name: {"loss": values, "tokens": [float(tokens)] * len(values)} for name, values in losses.items()}


def test_perplexities_and_paired_differences():
    base = documents({"a": [20.0, 10.0, 30.0], "b": [20.0, 40.0, 20.0]})
    lower = documents({"a": [20.0, 9.0, 29.0], "b": [20.0, 39.0, 19.0]})  # a tenth less for every token beyond
    assert real_model.ppl_of(base, 0, 1) == pytest.approx(math.exp(2.0))
    assert real_model.ppl_of(base, 1) == pytest.approx(math.exp(100 / 40))
    found, low, high = real_model.difference([lower], [base])
    assert found == pytest.approx(math.expm1(-0.1)) and low == pytest.approx(found) and high == pytest.approx(found)
    noisy = documents({"a": [20.0, 5.0, 30.0], "b": [20.0, 44.0, 20.0]})
    found, low, high = real_model.difference([noisy], [base])
    assert low < found < high and low < 0 < high
    both, *_ = real_model.difference([lower, noisy], [base, base])  # seeds are averaged
    assert both == pytest.approx(math.expm1((-4 - 1) / 2 / 40))


def test_losses_are_those_of_every_token_once():
    class Rows(list):
        def document(self, index):
            return str(index // 2)

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2, vocab_size=20)).eval()  # fmt: skip
    rows = Rows(torch.randint(0, 20, (3, 30)).tolist())
    found = real_model.measure(model, rows, 8)
    assert {name: sum(held["tokens"]) for name, held in found.items()} == {"0": 58.0, "1": 29.0}
    with torch.no_grad():
        logits = model(torch.tensor(rows)).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.mT, torch.tensor(rows)[:, 1:], reduction="none").double()
    assert np.allclose(found["1"]["loss"], [part.sum() for part in losses[2].split(8)], atol=1e-4)


def test_every_design_is_one_that_exists():
    assert {settings["memory"] for settings in table.DESIGNS.values()} <= set(MEMORIES)
    jobs = table.jobs("small", 3, ("proofs", "books"))
    assert len({job.name for job in jobs}) == len(jobs) == 3 * 2 * len(table.DESIGNS)
    assert jobs[0].seed == 1 and jobs[0].design == "no-memory" and jobs[0].corpus == "proofs"


@pytest.fixture
def pretrained(tmp_path):
    load_tokenizer("bytes").save(tmp_path / "llama")
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=256)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_by_command(pretrained, tmp_path, monkeypatch):
    """Two designs: trained, measured, compared; a second call has nothing to do; weights are gone."""
    monkeypatch.setattr(table, "DESIGNS", {name: table.DESIGNS[name] for name in ("no memory", "elastic, cells")})
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(6):
        (texts / f"{number}.txt").write_text(" ".join(f"word{i * (number + 3) % 97}" for i in range(400)))
    prepare(str(texts), tmp_path / "rows" / "proofs", tokenizer=str(pretrained), length=256, shares=(0.6, 0.0, 0.4))
    command = ["reproduce", "real-model", "--data", str(tmp_path / "rows"), "--out", str(tmp_path / "out")]
    command += ["--model", str(pretrained), "--parallel", "2", "--seeds", "1"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "out" / "real-model-smoke.json").read_text())
    base, cells = record["rows"]
    assert base["design"] == "no-memory" and cells["design"] == "elastic-cells" and cells["parameters"] == 4
    assert cells["first"] == pytest.approx(base["first"], rel=1e-3) and len(cells["interval"]) == 2
    run = json.loads((tmp_path / "out" / "runs" / "real-smoke-proofs-elastic-cells-seed1.json").read_text())
    assert run["environment"]["date"] and run["model"]["sha256"] and run["data"]["sha256"]
    assert not list((tmp_path / "out" / "work").glob("real-*"))
    before = (tmp_path / "out" / "real-model-smoke.md").read_text()
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and (tmp_path / "out" / "real-model-smoke.md").read_text() == before


def test_what_does_not_fit_is_refused(tmp_path):
    for arguments, said in [
        (["real-model", "--data", str(tmp_path), "--minutes", "1"], "has no rows of proofs or books: elastic prepare"),
        (["real-model", "--minutes", "1"], "needs --data"),
        (["real-model", "--tier", "paper"], "tier paper has no table real-model"),
        (["real-model", "--reference", "x"], "does not use --reference"),
        (["main", "--model", "x"], "does not use --model"),
    ]:
        done = CliRunner().invoke(app, ["reproduce", *arguments, "--out", str(tmp_path / "out")])
        assert done.exit_code and said in str(done.output) + str(done.exception)
