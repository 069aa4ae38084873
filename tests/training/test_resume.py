"""What a resumed run checks before it trusts it."""

import json
import os
import shutil
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_post_hook

from elastic_memory.training import checkpoints, logs
from elastic_memory.training.runs import Run, machine
from elastic_memory.training.session import Resume, train

from .conftest import same_weights, weights
from .test_session import GO_ON, events, lines, only_run


@pytest.fixture(scope="module")
def restarted(tmp_path_factory, corpus):
    """Content of metrics.jsonl and events.jsonl of a run with one restart, written by `Run` itself."""
    from elastic_memory.training.recipe import load_recipe

    from .conftest import QUICK, RECIPES

    run = Run(tmp_path_factory.mktemp("logs"), load_recipe(RECIPES / "smoke" / "elastic.yaml", QUICK), "data")
    run.folder.mkdir()
    run.event("start", step=0)
    run.event("restart", step=8, back_to=4, warmup=2)
    run.event("start", step=4)
    for step in range(1, 9):
        run.log({"step": step, "loss": 3.25 / step, "grad_norm": float("nan")})
    return run


@settings(max_examples=150)
@given(st.data())
def test_one_flipped_bit_in_a_log_is_never_silent(restarted, data):
    path = data.draw(st.sampled_from([restarted.metrics, restarted.events]))
    whole = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    before = (restarted.measured(), restarted.history("restart"))
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    try:
        logs.mend(restarted.events)
        restarted.check(8)
        assert (restarted.measured(), restarted.history("restart")) == before
    except ValueError as error:
        assert f"{path.name} line" in str(error)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("bit", range(8))
def test_a_damaged_end_of_the_last_line_does_not_drop_the_line(restarted, bit):
    whole = restarted.events.read_bytes()
    restarted.events.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1 << bit]))
    try:
        logs.mend(restarted.events)
        assert restarted.events.read_bytes() == whole
    finally:
        restarted.events.write_bytes(whole)


@settings(max_examples=60)
@given(st.data())
def test_what_a_crash_cut_off_is_dropped_and_the_rest_stands(restarted, data):
    whole = restarted.events.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    restarted.events.write_bytes(whole[:cut])
    try:
        logs.mend(restarted.events)
        found = restarted.events.read_bytes()
        assert whole.startswith(found)
        assert found.count(b"\n") >= whole[:cut].count(b"\n")
        restarted.event("more")
        assert restarted.history("more")
    finally:
        restarted.events.write_bytes(whole)


def test_a_step_that_is_missing_from_the_metrics_is_noticed(restarted):
    whole = restarted.metrics.read_text()
    restarted.metrics.write_text("".join(whole.splitlines(keepends=True)[:3] + whole.splitlines(keepends=True)[4:]))
    try:
        with pytest.raises(ValueError, match=r"metrics\.jsonl line 4 is of step 5"):
            restarted.check(8)
        restarted.check(3)
    finally:
        restarted.metrics.write_text(whole)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_damaged_line_stops_a_resume_before_anything_changes(quick, corpus, stopped_at_8, name):
    path = stopped_at_8 / name
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"step": ', b'"stop": ', 1))
    before = {file: file.read_bytes() for file in stopped_at_8.rglob("*") if file.is_file() and file.name != "lock"}
    with pytest.raises(ValueError, match=rf"{name} line 1 is damaged"):
        train(quick, corpus, stopped_at_8.parent, GO_ON)
    after = {file: file.read_bytes() for file in stopped_at_8.rglob("*") if file.is_file() and file.name != "lock"}
    assert before == after
    path.write_bytes(content)
    assert train(quick, corpus, stopped_at_8.parent, GO_ON)["steps"] == 12


def test_rows_that_were_changed_at_equal_size_are_refused(quick, corpus, tmp_path, stopped_at_8):
    shutil.copytree(corpus, tmp_path / "changed")
    rows = tmp_path / "changed" / "train.bin"
    content = bytearray(rows.read_bytes())
    content[::2] = bytes((value + 1) % 128 for value in content[::2])
    rows.write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.bin is damaged: its SHA-256 is not that of the manifest"):
        train(quick, tmp_path / "changed", stopped_at_8.parent, GO_ON)
    with pytest.raises(ValueError, match=r"train\.bin is damaged"):
        train(quick, tmp_path / "changed", tmp_path / "fresh")
    assert not (tmp_path / "fresh").exists()


def test_a_checkpoint_of_another_seed_is_passed_over(quick, corpus, tmp_path, stopped_at_8, undisturbed, capsys):
    other = train(quick.replace(**{"training.seed": 7}), corpus, tmp_path / "other")
    theirs = checkpoints.folder_of(tmp_path / "other" / other["name"] / "checkpoints", 8)
    ours = checkpoints.folder_of(stopped_at_8 / "checkpoints", 8)
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    train(quick, corpus, stopped_at_8.parent, GO_ON)
    assert "step-00000008 is the checkpoint of run" in capsys.readouterr().err
    assert events(stopped_at_8, "start")[-1]["step"] == 4
    assert same_weights(stopped_at_8, undisturbed)


def test_a_renamed_checkpoint_is_passed_over(quick, corpus, stopped_at_8, undisturbed):
    folder = stopped_at_8 / "checkpoints"
    checkpoints.folder_of(folder, 8).rename(checkpoints.folder_of(folder, 10))
    train(quick, corpus, stopped_at_8.parent, GO_ON)
    assert events(stopped_at_8, "start")[-1]["step"] == 4
    assert same_weights(stopped_at_8, undisturbed)


def test_another_instruction_set_must_be_accepted(quick, corpus, stopped_at_8, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ABACUS")
    with pytest.raises(ValueError, match=r"instructions: \w+ -> ABACUS.*--new-machine"):
        train(quick, corpus, stopped_at_8.parent, GO_ON)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert machine(quick.replace(**{"execution.device": "auto"}))["instructions"] is None


def test_resuming_where_nothing_was_begun_is_refused(quick, corpus, tmp_path):
    with pytest.raises(ValueError, match=r"nothing to resume in .*typo: .*omit --resume"):
        train(quick, corpus, tmp_path / "typo", GO_ON)
    assert not (tmp_path / "typo").exists()
    short = quick.replace(**{"training.tokens": 512})
    assert train(short, corpus, tmp_path / "new", Resume(allowed=True, or_start=True))["steps"] == 1


def test_what_a_signal_saved_beside_later_damaged_checkpoints_stays(quick, corpus, stopped_at_8, undisturbed, disturb):
    """Resumed at step 4 because that of step 8 is damaged, stopped at step 5, resumed again."""
    recipe = quick.replace(**{"execution.keep": 1})
    (checkpoints.folder_of(stopped_at_8 / "checkpoints", 8) / "model.safetensors").write_bytes(b"")

    def interrupt(model, out):
        os.kill(os.getpid(), signal.SIGTERM)
        return out

    disturb([1], interrupt)
    with pytest.raises(SystemExit):
        train(recipe, corpus, stopped_at_8.parent, GO_ON)
    assert 5 in checkpoints.steps(stopped_at_8 / "checkpoints")
    train(recipe, corpus, stopped_at_8.parent, GO_ON)
    assert events(stopped_at_8, "start")[-1]["step"] == 5
    assert same_weights(stopped_at_8, undisturbed)


@pytest.mark.parametrize("when", ["regular", "signal", "last"])
def test_weights_that_are_not_finite_are_never_saved(quick, corpus, tmp_path, disturb, undisturbed, when):
    """The loss is finite, the update is not: `steps` 8, 6 and 12 are saved right after it."""
    step = {"regular": 8, "signal": 6, "last": 12}[when]

    def poison(model, out):
        def after(*_):
            with torch.no_grad():
                model.model.norm.weight[3] = float("nan")
            handle.remove()

        handle = register_optimizer_step_post_hook(after)
        if when == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        return out

    disturb([2 * step], poison)
    if when == "signal":
        with pytest.raises(SystemExit) as caught:
            train(quick, corpus, tmp_path)
        assert caught.value.code == 143
        assert checkpoints.steps(only_run(tmp_path) / "checkpoints")[-1] < 6
        train(quick, corpus, tmp_path, GO_ON)
    else:
        train(quick, corpus, tmp_path)
    run = only_run(tmp_path)
    (restart,) = events(run, "restart")
    assert f"weights after step {step} are not finite" in restart["reason"]
    assert [line["step"] for line in lines(run)] == list(range(1, 13))
    assert all(torch.isfinite(weight).all() for weight in weights(run).values())
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == 12


def test_rows_and_tokenizer_both_name_the_data(corpus):
    from elastic_memory.data import samples
    from elastic_memory.training.corpus import data_hash

    rows = samples(corpus)
    hashes = {data_hash(rows)}
    rows.manifest["tokenizer"]["sha256"] = "0" * 64
    hashes.add(data_hash(rows))
    rows.manifest["splits"]["train"]["sha256"] = "0" * 64
    hashes.add(data_hash(rows))
    assert len(hashes) == 3
