import json

import pytest

from elastic_memory.training import checkpoints
from elastic_memory.training.checkpoints import DamagedError, IncompleteError, folder_of


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
            checkpoints.verify(folder_of(folder, 30))
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
