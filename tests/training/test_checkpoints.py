import json
import os
import shutil
import sys

import pytest

from elastic_memory.common.checksums import MANIFEST, DamagedError, IncompleteError, verify
from elastic_memory.common.files import write_json
from elastic_memory.training import checkpoints
from elastic_memory.training.checkpoints import folder_of


@pytest.fixture
def folder(tmp_path):
    """Three sealed checkpoints of three files each."""
    for step in (10, 20, 30):
        staged = tmp_path / checkpoints.STAGING
        staged.mkdir()
        for name in ("model.safetensors", "optimizer.pt", "rng_state.pth"):
            (staged / name).write_bytes(f"{name} at step {step}".encode() * 50)
        checkpoints.seal(staged, tmp_path, "a-run", step)
    return tmp_path


def test_the_newest_is_found_and_nothing_else_is_left(folder):
    found = checkpoints.newest(folder)
    assert (found.step, found.rejected) == (30, {})
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000010", "step-00000020", "step-00000030"]
    assert checkpoints.newest(folder, before=30).step == 20


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "manifest.json"])
def test_a_truncated_file_is_noticed_and_the_one_before_is_taken(folder, name, share):
    path = folder_of(folder, 30) / name
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    found = checkpoints.newest(folder)
    assert found.step == 20
    assert name in found.rejected[30]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "manifest.json"])
def test_one_flipped_bit_anywhere_is_noticed(folder, name):
    path = folder_of(folder, 30) / name
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), max(1, len(content) // 40)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        path.write_bytes(flipped)
        try:
            verify(folder_of(folder, 30))
        except DamagedError:
            continue
        # only a flip between the words of the manifest, which says the same as before
        assert name == "manifest.json"
        assert json.loads(flipped) == json.loads(content)


def test_removed_training_state_is_refused_and_removed_weights_fall_back(folder):
    (folder_of(folder, 30) / "optimizer.pt").unlink()
    with pytest.raises(IncompleteError, match=r"step-00000030: optimizer\.pt missing"):
        checkpoints.newest(folder)
    assert checkpoints.newest(folder, weights_only=True).step == 30
    (folder_of(folder, 30) / "model.safetensors").unlink()
    assert checkpoints.newest(folder).step == 20


def test_a_failed_save_leaves_nothing_and_a_sweep_removes_what_a_crash_left(folder):
    with pytest.raises(OSError), checkpoints.saving(folder / checkpoints.STAGING) as staged:
        staged.mkdir()
        (staged / "half").write_text("x")
        raise OSError("no space left")
    assert not (folder / checkpoints.STAGING).exists()
    (folder / checkpoints.STAGING / "checkpoint-40").mkdir(parents=True)
    checkpoints.sweep(folder)
    assert checkpoints.steps(folder) == [10, 20, 30]
    assert not (folder / checkpoints.STAGING).exists()


def test_pruning_keeps_the_newest(folder):
    checkpoints.prune(folder, keep=2, saved=30)
    assert checkpoints.steps(folder) == [20, 30]


def test_pruning_never_removes_what_was_just_saved(folder):
    """Step 15 was saved by a signal after a resume from step 10: 20 and 30 were passed over as damaged."""
    staged = folder / checkpoints.STAGING
    staged.mkdir()
    (staged / "model.safetensors").write_bytes(b"weights")
    checkpoints.seal(staged, folder, "a-run", 15)
    checkpoints.prune(folder, keep=1, saved=15)
    assert checkpoints.steps(folder) == [15, 20, 30]


def test_a_checkpoint_of_another_run_or_step_is_passed_over(folder):
    found = checkpoints.newest(folder, "another-run")
    assert found.step == 0
    assert found.rejected[30] == "step-00000030 is the checkpoint of run a-run, not of another-run"
    folder_of(folder, 10).rename(folder_of(folder, 40))
    found = checkpoints.newest(folder, "a-run")
    assert found.step == 30
    assert found.rejected == {40: "step-00000040 is the checkpoint of step 10, not of 40"}


def killed_at(operation, action):
    """Run an action in a process that dies right before its n-th file operation; True if it got to its end."""
    pid = os.fork()
    if pid == 0:
        left = [operation]

        def count(event, _):
            if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"):
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)

        sys.addaudithook(count)
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_killed_before_any_file_operation_a_checkpoint_is_whole_or_absent(folder):
    """Whole by its files, not by what `verify` says of them; and one that was there before stays, until pruned."""
    before = {step: content(folder_of(folder, step)) for step in (10, 20, 30)}
    files = {name: b"new " + data for name, data in before[30].items() if name != MANIFEST}

    def save():
        checkpoints.seal(folder / checkpoints.STAGING, folder, "a-run", 40)
        checkpoints.prune(folder, keep=2, saved=40)

    for operation in range(1, 1000):
        checkpoints.sweep(folder)
        for step in checkpoints.steps(folder):
            shutil.rmtree(folder_of(folder, step))
        for step, old in before.items():
            folder_of(folder, step).mkdir()
            for name, data in old.items():
                (folder_of(folder, step) / name).write_bytes(data)
        (folder / checkpoints.STAGING).mkdir()
        for name, data in files.items():
            (folder / checkpoints.STAGING / name).write_bytes(data)
        finished = killed_at(operation, save)
        there = checkpoints.steps(folder)
        assert there in ([10, 20, 30], [10, 20, 30, 40], [20, 30, 40], [30, 40])
        for step in there:
            found = content(folder_of(folder, step))
            manifest = found.pop(MANIFEST)
            assert (found == files and manifest) if step == 40 else found | {MANIFEST: manifest} == before[step]
        if finished:
            assert there == [30, 40]
            assert operation > 10
            return
    raise AssertionError("it never came to its end")


def test_killed_before_any_file_operation_a_file_is_the_old_or_the_new_one(tmp_path):
    path = tmp_path / "run.json"
    for operation in range(1, 100):
        write_json(path, {"content": "old"})
        finished = killed_at(operation, lambda: write_json(path, {"content": "new"}))
        assert json.loads(path.read_text())["content"] in ("old", "new")
        if finished:
            assert json.loads(path.read_text()) == {"content": "new"}
            return
    raise AssertionError("it never came to its end")
