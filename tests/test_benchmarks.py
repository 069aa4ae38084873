"""The programs under benchmarks/ run where there is no GPU, at tiny sizes."""

import json
import math
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers import time_limit
from elastic_memory.data import load_tokenizer, samples
from elastic_memory.data.prepare import prepare
from elastic_memory.evaluation.attaching import write_attached
from elastic_memory.evaluation.copies import copy_losses
from elastic_memory.evaluation.inputs import Spread
from elastic_memory.evaluation.loading import load_model, starting_model
from elastic_memory.evaluation.losses import streamed_losses, whole_losses
from elastic_memory.evaluation.sinks import sink_losses
from elastic_memory.training.recipe import load_recipe
from elastic_memory.training.session import train

ROOT = Path(__file__).parents[1]
OURS = ("Transformer++", "Elastic 1x", "Infini", "Memorizing 1x", "Full attention")


def test_peers_measures_ours_and_goes_on_after_a_failure(tmp_path):
    fails, after = "Gated DeltaNet", "infini-transformer-pytorch, compiled"  # the first has no kernels for a CPU
    out = tmp_path / "peers.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--tiny", "--out", str(out), "--only"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *OURS, fails, after], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(out.read_text())["peers"]}
    assert list(rows) == [*OURS, fails, after]
    for name in (*OURS, after):
        assert rows[name]["tokens_per_s"] > 0, rows[name]
        assert rows[name]["ratio"] == rows[name]["tokens_per_s"] / rows["Transformer++"]["tokens_per_s"]
    assert rows[fails]["failed"] and rows[fails]["failed"] in done.stdout


def test_decoding_times_the_plain_step(tmp_path):
    out = tmp_path / "decoding.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "decoding.py"), "--rows", "1", "2", "--repeats", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--out", str(out)], capture_output=True, timeout=300, env=environment, check=True)
    assert [(run["rows"], run["step_us"]["plain"] > 0) for run in json.loads(out.read_text())["runs"]] == [
        (1, True), (2, True),
    ]  # fmt: skip


def test_generate_times_all_ways_and_compares_their_tokens(tmp_path):
    out = tmp_path / "generate.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "generate.py"), "--prompt", "70", "--tokens", "8", "--rounds"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "1", "--long", "3000", "--out", str(out)],
        capture_output=True,
        timeout=300,
        env=environment,
        check=True,
    )
    record = json.loads(out.read_text())
    assert [run["tokens_per_s"] > 0 for run in record["runs"]] == [True] * 4 and record["reading"]["tokens_per_s"] > 0
    assert set(record["agreement"].values()) == {1.0}  # without a GPU both are the plain path


@pytest.mark.parametrize("processes", [1, 2])
def test_joining_compares_two_ways_of_reading(processes, tmp_path):
    out = tmp_path / "joining.json"
    program = [str(ROOT / "benchmarks" / "joining.py"), "--lengths", "5000", "--exact", "3000", "--repeats", "1"]
    shared = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if processes > 1 else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *shared, *program, "--out", str(out)]
    subprocess.run(command, capture_output=True, timeout=300, env=environment, check=True)
    record = json.loads(out.read_text())
    assert record["processes"] == processes
    (row,) = record["rows"]
    assert row["ratio"] == row["side_by_side_tokens_per_s"] / row["in_order_tokens_per_s"]
    assert row["state_error_float32"] < 1e-4 and row["logits_error_float32"] < 1e-3


def test_a_peer_that_catches_everything_is_stopped():
    caught = 0
    with pytest.raises(TimeoutError, match="took more than"), time_limit(0.1):
        while True:
            try:
                time.sleep(5)
            except TimeoutError:
                caught += 1
                if caught == 2:
                    raise
    time.sleep(1.2)  # nothing comes after that


def test_a_stream_is_flat_and_full_attention_is_not(tmp_path):
    load_tokenizer("bytes").save(tmp_path / "plain")
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                         vocab_size=256)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    write_attached(str(tmp_path / "plain"), tmp_path / "attached", "float32", block_size=16, order=8, points=8)
    (tmp_path / "book.txt").write_text("call me Ishmael. " * 300)
    command = [sys.executable, str(ROOT / "benchmarks" / "endless.py"), str(tmp_path / "attached"), "--call", "16"]
    command += ["--text", str(tmp_path / "book.txt"), "--beside", str(tmp_path / "plain"), "--until", "1024"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    out = ["--tokens", "4096", "--out", str(tmp_path / "endless.json")]
    subprocess.run([*command, *out], capture_output=True, timeout=300, env=environment, check=True)
    flat, full = json.loads((tmp_path / "endless.json").read_text())["runs"]
    assert len(flat["rows"]) == 128 and flat["rows"][-1]["position"] == 4095 and full["rows"][-1]["position"] == 1023
    assert len({row["cache_bytes"] for row in flat["rows"][1:-1]}) == 1  # the first block has nothing in memory
    assert full["rows"][-1]["cache_bytes"] == full["rows"][0]["cache_bytes"] / 16 * 1023
    ids = torch.tensor([list(("call me Ishmael. " * 300).encode())[:4096]])
    losses = streamed_losses(load_model(str(tmp_path / "attached")), ids, 100)[0].double()
    assert [row["ppl"] for row in flat["rows"]] == pytest.approx(
        [float(x.mean().exp()) for x in losses.split(32)], rel=1e-4
    )
    assert (tmp_path / "endless.png").stat().st_size > 10_000
    failed = subprocess.run([*command, "--tokens", "6000", *out[2:]], capture_output=True, env=environment, check=False)
    assert failed.returncode and b"has 5,100 tokens: give more text, or --tokens 5100" in failed.stderr


def test_sliding_is_timed_beside_blocks(tmp_path):
    out = tmp_path / "sliding.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "sliding.py"), "--tiny", "--rows", "1", "--repeats", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--out", str(out)], capture_output=True, timeout=300, env=environment, check=True)
    rows = json.loads(out.read_text())["models"]
    assert {row["name"]: row["training_time_ratio"] for row in rows if "block" in row["name"].split(", ")} == {
        "none, block": 1, "elastic, block": 1,
    }  # fmt: skip
    for row in rows:
        assert ("sliding" in row["name"]) == ("loss" in row)
        assert "loss" not in row or abs(row["loss"] - row["loss_with_masks"]) < 1e-3


@pytest.mark.parametrize("adapted", [False, True])
def test_only_the_layer_with_memory_is_trained_above_states_that_are_computed_once(tmp_path, adapted):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                         num_attention_heads=2, max_position_embeddings=512)  # fmt: skip
    plain = LlamaForCausalLM(config)
    load_tokenizer("bytes").save(tmp_path / "plain")
    plain.save_pretrained(tmp_path / "plain")
    (tmp_path / "text").mkdir()
    for index, line in enumerate(torch.randint(97, 123, (10, 400)).tolist()):
        (tmp_path / "text" / f"{index}.txt").write_text(bytes(line).decode())
    prepare(tmp_path / "text", tmp_path / "rows", tokenizer="bytes", length=128, shares=(0.6, 0.0, 0.4))
    command = [sys.executable, str(ROOT / "benchmarks" / "frozen_trunk.py"), str(tmp_path / "plain")]
    command += ["--data", str(tmp_path / "rows"), "--work", str(tmp_path / "work"), "--out", str(tmp_path / "o.json")]
    command += ["--layer", "1", "--window", "32", "--block", "16", "--order", "8", "--length", "64", "--steps", "3"]
    command += ["--batch", "2", "--rows", "4", "--key-rows", "1", "--save", str(tmp_path / "models")]
    command += ["--copy-rows", "2", "--span", "4", "--distances", "16", "40"]
    if adapted:
        sliding = {"memory": "none", "local_attention": "sliding", "window": 32, "block_size": 16}
        write_attached(str(tmp_path / "plain"), tmp_path / "windowed", "float32", **sliding)
        changes = ["training.length=128", "training.batch_tokens=128", "training.tokens=256", "training.precision=fp32"]
        recipe = load_recipe("finetune/laptop", [*changes, "training.learning_rate=1e-2"])
        run = train(recipe, tmp_path / "rows", tmp_path, start=starting_model(str(tmp_path / "windowed")))["name"]
        command += ["--adapted", str(tmp_path / run)]
        start = load_model(str(tmp_path / run))
        assert not torch.equal(start.lm_head.weight, plain.lm_head.weight)
        untouched, plain = plain, start
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for designs in ("no memory, attention sinks", "no memory, elastic cells"):
        given = [*command, "--designs", designs]
        subprocess.run(given, capture_output=True, timeout=300, env=environment, check=True)
    record = json.loads((tmp_path / "o.json").read_text())
    rows = samples(tmp_path / "rows", "test")
    chosen = torch.stack([rows[i * len(rows) // 4]["input_ids"] for i in range(4)])
    assert list(record["runs"]) == ["no memory", "attention sinks", "elastic cells"]
    for design in ("no memory", "elastic cells"):
        run, model = (
            record["runs"][design]["1"],
            load_model(str(tmp_path / "models" / f"{design.replace(' ', '-')}-seed1")),
        )
        assert len(run["losses"]) == 3 and run["logits_off"] < 1e-5
        losses = streamed_losses(model, chosen, 40).double()
        found = [sum(one["loss"][part] for one in run["documents"].values()) for part in range(4)]
        expected = [float(part.sum()) for part in losses.split(32, dim=1)]
        assert found == pytest.approx(expected, rel=2e-3)  # measured in bf16
        read = partial(whole_losses, model)
        for distance in (16, 40):
            found, recalled = run["recall"][str(distance)], copy_losses(read, Spread(rows, 2), distance, 4)
            assert found.keys() == recalled.keys()
            for document, sums in recalled.items():
                assert found[document] == pytest.approx(sums, rel=2e-3)
        moved = {name for name, one in model.state_dict().items() if name in plain.state_dict()
                 and not torch.equal(one, plain.state_dict()[name])}  # fmt: skip
        assert moved == {f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo"}
    if adapted:
        assert record["plan"]["adapted"]["tokens"] == 256
        bound = sink_losses(untouched.bfloat16(), chosen, 32).double().sum()
        of_bound = sum(math.fsum(one["loss"]) for one in record["runs"]["attention sinks"]["1"]["documents"].values())
        assert of_bound == pytest.approx(float(bound), rel=1e-3)  # of the model before it was fine-tuned
    other = subprocess.run([*command, "--steps", "2"], capture_output=True, env=environment, check=False)
    assert other.returncode and b"is the record of another plan" in other.stderr


def test_attention_is_kept_whole_by_a_window_as_long_as_the_text_and_not_at_all_without_memory(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                         num_attention_heads=2, max_position_embeddings=512)  # fmt: skip
    load_tokenizer("bytes").save(tmp_path / "plain")
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    (tmp_path / "text").mkdir()
    for index, line in enumerate(torch.randint(97, 123, (10, 400)).tolist()):
        (tmp_path / "text" / f"{index}.txt").write_text(bytes(line).decode())
    prepare(tmp_path / "text", tmp_path / "rows", tokenizer="bytes", length=128, shares=(0.6, 0.0, 0.4))
    command = [sys.executable, str(ROOT / "benchmarks" / "kept_attention.py"), str(tmp_path / "plain")]
    command += ["--data", str(tmp_path / "rows"), "--out", str(tmp_path / "o.json"), "--layer", "1", "--window", "32"]
    command += ["--block", "16", "--order", "96", "--split", "test"]
    command += ["--designs", "no memory, wider window, merged far distance=0 slow=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, capture_output=True, timeout=300, env=environment, check=True)
    errors = json.loads((tmp_path / "o.json").read_text())["errors"]
    assert errors["no memory"] == [1, 1] and max(errors["wider window"]) < 1e-6
    assert len(errors["merged far distance=0 slow=1"]) == 2
    assert all(0 < error < 1 for error in errors["merged far distance=0 slow=1"])
