"""On a GPU: killed and resumed, a run keeps its samples and its losses; with --deterministic, its bits."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import elastic_memory as em
from elastic_memory.fast import cuda_graph as capture
from elastic_memory.memory import MEMORIES
from elastic_memory.training import session
from elastic_memory.training.recipe import load_recipe

from .conftest import FSDP2, RECIPES, same_weights
from .test_session import lines, only_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CHANGES = [
    "training.length=128", "training.batch_tokens=1024", "training.tokens=40960", "execution.micro_batch=4",
    "execution.save_every=10", "model.config.vocab_size=256", "model.config.block_size=32",
    "model.config.num_hidden_layers=3", "execution.compile=false", "tokenizer=null",
]  # fmt: skip


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python"]


def start(corpus, out, mode, *options):
    recipe = RECIPES / "small" / "elastic.yaml"
    command = [sys.executable, "-c", "from elastic_memory.cli import main; main()", "train", str(recipe)]
    keys = [word for key in CHANGES for word in ("--set", key)]
    command += ["--data", str(corpus), "--out", str(out), *keys, *options]
    if mode == "deterministic":
        command.append("--deterministic")
    sharded = mode == "fsdp2"
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **(FSDP2 if sharded else {})}
    return subprocess.Popen([*TORCHRUN, *command] if sharded else command, env=environment)


@pytest.mark.parametrize("mode", ["fast", "deterministic", "fsdp2"])
def test_killed_and_resumed_on_a_gpu(corpus, tmp_path, mode):
    assert start(corpus, tmp_path / "whole", mode).wait() == 0
    killed = start(corpus, tmp_path / "killed", mode)
    while not list((tmp_path / "killed").glob("*/checkpoints/step-00000020")):
        assert killed.poll() is None
        time.sleep(0.01)
    holder = (only_run(tmp_path / "killed") / "checkpoints" / "lock").read_text()  # process 123 on ...
    os.kill(int(holder.split()[1]), signal.SIGKILL)
    assert killed.wait() != 0
    assert start(corpus, tmp_path / "killed", mode, "--resume").wait() == 0

    whole, killed = only_run(tmp_path / "whole"), only_run(tmp_path / "killed")
    results = [json.loads((run / "result.json").read_text()) for run in (whole, killed)]
    assert results[0]["sample_order"] == results[1]["sample_order"]
    losses = [[line["loss"] for line in lines(run)] for run in (whole, killed)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    if mode == "deterministic":
        assert losses[0] == losses[1]
        assert same_weights(whole, killed)
    if mode == "fsdp2":
        assert any(killed.glob("checkpoints/*/pytorch_model_fsdp_0")), "the checkpoint is sharded"


def test_a_captured_run_is_the_run(corpus, tmp_path, monkeypatch):
    """Micro-batches, clipping, steps and checkpoints around the graph of a memory that goes block by block."""
    recipe = load_recipe(
        RECIPES / "small" / "melodi.yaml", [*CHANGES, "execution.compile=true", "training.tokens=10240"]
    )
    losses, steps, captured = [], [], capture.Captured
    monkeypatch.setattr(capture, "Captured", lambda *args: steps.append(captured(*args)) or steps[-1])
    for name in ("captured", "plain"):
        if name == "plain":
            monkeypatch.setattr(capture, "gains", lambda model: False)
        session.train(recipe, corpus, tmp_path / name)
        losses.append([line["loss"] for line in lines(only_run(tmp_path / name))])
    assert len(steps) == 1 and steps[0].graph is not None
    assert len(losses[0]) == 10
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_captured_step_is_the_step(memory):
    """Losses and gradients of replays, with gradients dropped, kept and zeroed in between."""
    torch.manual_seed(0)
    config = em.MemoryLlamaConfig.preset("tiny", memory=memory, block_size=128, head_dim=64, initializer_range=0.05)
    model = em.MemoryLlamaForCausalLM(config).cuda()
    model.compile_blocks()

    def step(ids):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def gradients():
        return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()

    samples = torch.randint(0, 512, (4, 2, 1024), device="cuda")
    expected = []
    for ids in samples:
        model.zero_grad()
        expected.append((step(ids), gradients()))
    captured = capture.Captured(step, model.parameters())
    for ids, (loss, gradient) in zip(samples, expected, strict=True):
        model.zero_grad()
        torch.testing.assert_close(captured(ids=ids), loss, rtol=1e-3, atol=0)
        assert (gradients() - gradient).norm() < 1e-2 * gradient.norm()
    captured(ids=samples[0])  # on top of the last
    both = expected[0][1] + expected[3][1]
    assert (gradients() - both).norm() < 1e-2 * both.norm()
    model.zero_grad(set_to_none=False)
    captured(ids=samples[1])
    assert (gradients() - expected[1][1]).norm() < 1e-2 * expected[1][1].norm()
    short = captured(ids=samples[0, :1, :512])  # another shape: begins anew
    torch.testing.assert_close(short, step(samples[0, :1, :512]), rtol=1e-3, atol=0)
    model.zero_grad()
    captured(ids=samples[0, :1, :512])
    model.zero_grad()
    held = torch.cuda.memory_allocated()
    captured.release()
    assert torch.cuda.memory_allocated() < held
    for ids, (loss, gradient) in zip(samples, expected, strict=True):
        model.zero_grad()
        torch.testing.assert_close(captured(ids=ids), loss, rtol=1e-3, atol=0)
        assert (gradients() - gradient).norm() < 1e-2 * gradient.norm()
    torch._dynamo.reset()
