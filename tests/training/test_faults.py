"""Whole processes, killed, starved and doubled. The quick cases run always, the long ones with `make test-faults`."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_memory.training import checkpoints, session
from elastic_memory.training.recipe import load_recipe
from elastic_memory.training.runs import StoppedError
from elastic_memory.training.session import Resume, train

from .conftest import FSDP2, QUICK, RECIPES, same_weights, weights
from .test_session import events, lines, only_run

RECIPE = RECIPES / "smoke" / "elastic.yaml"
GATED = RECIPES / "smoke" / "memorizing.yaml"
COMMAND = [sys.executable, "-c", "from elastic_memory.cli import main; main()", "train", str(RECIPE)]
SET = [word for key in QUICK for word in ("--set", key)]


def start(corpus, out, *options, launcher=(), command=COMMAND, **environment):
    words = [*launcher, *command, "--data", str(corpus), "--out", str(out), *SET, *options]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ | environment)


def child(function):
    """Run a function in a forked process, which has everything imported already."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            function()
            code = 0
        except SystemExit as error:
            code = error.code
        finally:
            os._exit(code)
    return pid


def exit_code(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_and_resume(recipe, corpus, out, kills, inside, seed):
    """Kill -9 at random moments, `inside` of them while a checkpoint is being written; then let it finish."""
    draw, hit = random.Random(seed), 0

    def saving():
        return any(out.glob(f"smoke-*/checkpoints/{checkpoints.STAGING}/checkpoint-*"))

    def starts():
        return sum(len(events(run, "start")) for run in out.glob("smoke-*") if (run / "events.jsonl").exists())

    for number in range(kills):
        before, early = starts(), draw.random() < 0.2  # early: before the first step, at its build or its search
        pid = child(lambda: train(recipe, corpus, out, Resume(allowed=True, or_start=True)))
        while not (early and number >= inside) and not (starts() > before and (number >= inside or saving())):
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it finished before all kills were spent"
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.004 if number < inside else 0.3))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        hit += number < inside and saving()
    assert exit_code(child(lambda: train(recipe, corpus, out, Resume(allowed=True, or_start=True)))) == 0
    return hit


@pytest.mark.parametrize(
    ("steps", "kills", "inside"),
    [
        pytest.param(30, 4, 2, id="four"),
        pytest.param(200, 50, 24, id="fifty", marks=pytest.mark.faults),
    ],
)
def test_killed_at_any_moment_the_run_ends_in_the_same_bits(corpus, tmp_path, steps, kills, inside):
    changes = {"training.tokens": 512 * steps, "execution.save_every": 2}
    recipe = load_recipe(RECIPE, QUICK).replace(**changes)
    train(recipe, corpus, tmp_path / "whole")
    hit = kill_and_resume(recipe, corpus, tmp_path / "killed", kills, inside, seed=steps)
    whole, killed = only_run(tmp_path / "whole"), only_run(tmp_path / "killed")
    print(f"{len(events(killed, 'start'))} starts, {hit} kills inside a save")
    assert hit >= inside * 0.8
    assert same_weights(whole, killed)
    assert [line["step"] for line in lines(killed)] == list(range(1, steps + 1))
    assert [line["loss"] for line in lines(killed)] == [line["loss"] for line in lines(whole)]


def fill_disk(room):
    """From now on no file of this process grows beyond `room` bytes: what fits is written, then writing fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))


@pytest.mark.parametrize("room", [100_000, 0], ids=["for-log-lines", "none"])
@pytest.mark.parametrize("saved", [[], [4], [4, 8]], ids=lambda steps: f"after-{len(steps)}-saves")
def test_a_full_disk_stops_the_run_and_spares_what_was_saved(
    quick, corpus, tmp_path, disturb, monkeypatch, undisturbed, saved, room
):
    def fill(model, out):
        fill_disk(room)
        return out

    def told():
        with pytest.raises(StoppedError, match=message):
            train(quick, corpus, tmp_path)

    begun = (saved or [0])[-1]
    disturb([2 * begun + 1], fill)  # in the first step after that save
    what = f"the checkpoint of step {begun + 4}" if room else "a file of the run"
    last = f"The checkpoint of step {begun} is intact" if saved else "There is no earlier checkpoint"
    message = f"{what} could not be written: the disk may be full .*{last}; make room and add --resume"
    assert exit_code(child(told)) == 0
    monkeypatch.undo()  # there is room again
    run = only_run(tmp_path)
    assert checkpoints.steps(run / "checkpoints") == saved
    assert not list((run / "checkpoints" / checkpoints.STAGING).rglob("*")), "half-written"
    assert not list(run.rglob("*.tmp"))
    train(quick, corpus, tmp_path, Resume(allowed=True))
    assert events(run, "start")[-1]["step"] == begun
    assert [line["step"] for line in lines(run)] == list(range(1, 13))
    assert same_weights(run, undisturbed)


def test_a_disk_that_is_full_at_the_very_end_costs_no_step(quick, corpus, tmp_path, undisturbed, monkeypatch):
    def fill(*_):
        fill_disk(100_000)
        return {}

    def told():
        with pytest.raises(StoppedError, match=r"the model could not be written.*The checkpoint of step 12 is intact"):
            train(quick, corpus, tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "_result", fill)
        assert exit_code(child(told)) == 0
    run = only_run(tmp_path)
    assert not (run / "model").exists()
    assert not (run / ".model.saving").exists()
    train(quick, corpus, tmp_path, Resume(allowed=True))
    assert [event["step"] for event in events(run, "start")] == [0, 12]
    assert same_weights(run, undisturbed)


def test_from_the_command_line_a_signal_ends_a_run_cleanly(corpus, tmp_path):
    long = ("--set", "training.tokens=1e6", "--set", "execution.save_every=1000")
    process = start(corpus, tmp_path, *long)
    while not list(tmp_path.glob("*/metrics.jsonl")):
        time.sleep(0.05)
        assert process.poll() is None, process.stderr.read()
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 143
    assert time.monotonic() - begin < 30
    assert "saved; add --resume to continue" in told
    assert "Traceback" not in told
    (step,) = checkpoints.steps(only_run(tmp_path) / "checkpoints")
    assert len(lines(only_run(tmp_path))) == step
    refused = start(corpus, tmp_path, *long)
    _, told = refused.communicate(timeout=60)
    assert (refused.returncode, told.count("\n")) == (2, 1)
    assert f"is at step {step} of" in told


@pytest.mark.faults
def test_two_processes_in_one_folder(corpus, tmp_path):
    long = ("--set", "training.tokens=1e6")
    first = start(corpus, tmp_path, *long)
    while not list(tmp_path.glob("*/metrics.jsonl")):
        time.sleep(0.05)
    second = start(corpus, tmp_path, "--resume", *long)
    _, told = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f"in use by process {first.pid}" in told
    first.kill()
    first.communicate()
    third = start(corpus, tmp_path, "--resume", *long)
    while len(events(only_run(tmp_path), "start")) < 2:
        time.sleep(0.05)
    third.send_signal(signal.SIGINT)
    third.communicate(timeout=30)
    assert third.returncode == 130


def torchrun(processes):
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python")
    return (*run, f"--nproc-per-node={processes}")


def launch(corpus, out, processes, *options):
    process = start(corpus, out, *options, launcher=torchrun(processes))
    _, told = process.communicate(timeout=300)
    return process.returncode, told


def test_two_processes_train_as_one_does(quick, corpus, tmp_path):
    train(quick, corpus, tmp_path / "one")
    code, told = launch(corpus, tmp_path / "two", 2)
    assert code == 0, told[-3000:]
    one, two = only_run(tmp_path / "one"), only_run(tmp_path / "two")
    results = [json.loads((run / "result.json").read_text()) for run in (one, two)]
    assert results[0]["sample_order"] == results[1]["sample_order"]
    assert results[0]["tokens"] == results[1]["tokens"]
    losses, norms = ([[line[key] for line in lines(run)] for run in (one, two)] for key in ("loss", "grad_norm"))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.faults
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_processes_goes_on_with_the_same_samples(quick, corpus, tmp_path, before, after):
    longer = {"training.tokens": 512 * 60}
    options = [word for key, value in longer.items() for word in ("--set", f"{key}={value}")]
    train(quick.replace(**longer), corpus, tmp_path / "whole")
    process = start(corpus, tmp_path / "moved", *options, launcher=torchrun(before))
    while not list((tmp_path / "moved").glob("*/checkpoints/step-*")):
        time.sleep(0.01)
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    moved = only_run(tmp_path / "moved")
    step = checkpoints.newest(moved / "checkpoints").step
    assert 4 <= step < 60, "it was stopped on the way"

    code, told = launch(corpus, tmp_path / "moved", after, "--resume", *options)
    assert code != 0
    assert f"processes: {before} -> {after}" in told
    assert "add --new-machine to resume" in told
    code, told = launch(corpus, tmp_path / "moved", after, "--resume", "--new-machine", *options)
    assert code == 0, told[-3000:]
    assert events(moved, "start")[-1]["step"] == step
    losses, norms = (
        [[line[key] for line in lines(run)] for run in (only_run(tmp_path / "whole"), moved)]
        for key in ("loss", "grad_norm")
    )
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    orders = {
        json.loads((only_run(tmp_path / name) / "result.json").read_text())["sample_order"]
        for name in ("whole", "moved")
    }
    assert len(orders) == 1


@pytest.mark.faults
@pytest.mark.parametrize(("processes", "precision"), [(1, "bf16"), (2, "fp32")])
def test_with_fsdp2_a_killed_run_ends_as_one_process_does(quick, corpus, tmp_path, processes, precision):
    options = ("--set", f"training.tokens={512 * 40}", "--set", f"training.precision={precision}")
    sharded = [sys.executable, str(Path(__file__).with_name("fsdp_on_cpu.py")), "train", str(GATED)]

    def launched(*more):
        launcher, words = torchrun(processes), (*options, *more)
        return start(corpus, tmp_path / "sharded", *words, launcher=launcher, command=sharded, **FSDP2)

    whole = train(load_recipe(GATED, [*QUICK, *options[1::2]]), corpus, tmp_path / "whole")
    killed = launched()
    while not list((tmp_path / "sharded").glob("*/checkpoints/step-*")):
        time.sleep(0.01)
        assert killed.poll() is None, killed.stderr.read()
    run = only_run(tmp_path / "sharded")
    os.kill(int((run / "checkpoints" / "lock").read_text().split()[1]), signal.SIGKILL)  # process 123 on ...
    killed.communicate(timeout=120)
    assert len(lines(run)) < 40, "it was killed on the way"
    resumed = launched("--resume")
    _, told = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, told[-3000:]
    assert "resumed at step" in told

    assert any(run.glob("checkpoints/*/pytorch_model_fsdp_0")), "the checkpoint is sharded"
    result = json.loads((run / "result.json").read_text())
    assert result["sample_order"] == whole["sample_order"]
    plain = only_run(tmp_path / "whole")
    for key, rounding in (("loss", 1e-3), ("gate/1", 1e-3), ("grad_norm", 1e-3 if precision == "fp32" else 0.05)):
        values = [[line[key] for line in lines(each)] for each in (plain, run)]
        assert values[0] == pytest.approx(values[1], rel=rounding), key
    for name, weight in weights(plain).items():
        apart = (weights(run)[name] - weight).abs().mean()
        assert apart < (1e-5 if precision == "fp32" else 1e-3), name
