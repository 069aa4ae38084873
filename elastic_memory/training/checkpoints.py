"""Checkpoints that are complete or absent, and verified on loading.

A checkpoint is written to a hidden folder, gets a manifest of sizes and SHA-256 sums, is flushed to disk and renamed.
On loading every file is verified; if one is damaged, the checkpoint before it is used.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastic_memory.common.checksums import DamagedError, IncompleteError, verify, write_manifest
from elastic_memory.common.files import publish

STAGING = ".saving"
TRAINER_STATE = "trainer_state.json"


@dataclass(frozen=True)
class Found:
    """The newest usable checkpoint: its step (0: none), why newer ones were rejected, which state it lacks."""

    step: int
    rejected: dict[int, str]
    lacks: str = ""


def folder_of(checkpoints: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return checkpoints / f"step-{step:08d}"


def steps(checkpoints: Path) -> list[int]:
    """Steps of all checkpoints present, oldest first, valid or not."""
    return sorted(int(path.name[5:]) for path in checkpoints.glob("step-*") if path.name[5:].isdigit())


@contextmanager
def saving(staged: Path) -> Iterator[Path]:
    """A hidden folder to write into; removed if writing fails."""
    try:
        yield staged
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def seal(staged: Path, checkpoints: Path, run: str, step: int) -> None:
    """Add the manifest, flush everything to disk, and give the checkpoint its name."""
    write_manifest(staged, run, step)
    if step in steps(checkpoints):  # a damaged one, rejected when the run was resumed
        discard(checkpoints, step)
    publish(staged, folder_of(checkpoints, step))


def newest(checkpoints: Path, run: str | None = None, before: int | None = None, weights_only: bool = False) -> Found:
    """The newest checkpoint of a run that verifies (with a step below `before`), and why newer ones do not.

    If it lacks its training state, `IncompleteError` is raised unless `weights_only`.
    """
    rejected: dict[int, str] = {}
    for step in reversed(steps(checkpoints)):
        if before is not None and step >= before:
            continue
        try:
            verify(folder_of(checkpoints, step), run, step)
        except DamagedError as error:
            rejected[step] = str(error)
        except IncompleteError as error:
            if weights_only:
                return Found(step, rejected, str(error))
            raise
        else:
            return Found(step, rejected)
    return Found(0, rejected)


def prune(checkpoints: Path, keep: int, saved: int) -> None:
    """Keep only the newest `keep` checkpoints up to the one just saved; later ones are damaged, and stay."""
    for step in [step for step in steps(checkpoints) if step <= saved][:-keep]:
        discard(checkpoints, step)


def discard(checkpoints: Path, step: int) -> None:
    """Remove a checkpoint; if interrupted, the rest no longer looks like a checkpoint."""
    doomed = checkpoints / f".discarded-{step}"
    folder_of(checkpoints, step).rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(checkpoints: Path) -> None:
    """Remove leftovers of interrupted saves and removals."""
    for path in checkpoints.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)
