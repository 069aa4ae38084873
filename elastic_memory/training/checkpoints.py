"""Checkpoints that are whole or absent, and that prove it.

A checkpoint is written to a hidden folder, sealed with a manifest of sizes and SHA-256 sums, forced to
the disk and renamed. On the way back every file is checked; a damaged checkpoint is passed over for the one before it.
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
    """What a search for the newest checkpoint came to: its step (0: none), why not a newer one, what it lacks."""

    step: int
    rejected: dict[int, str]
    lacks: str = ""


def folder_of(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step lives."""
    return checkpoints / f"step-{step:08d}"


def steps(checkpoints: Path) -> list[int]:
    """Steps of all checkpoints present, oldest first, valid or not."""
    return sorted(int(path.name[5:]) for path in checkpoints.glob("step-*") if path.name[5:].isdigit())


@contextmanager
def saving(staged: Path) -> Iterator[Path]:
    """A hidden folder to write into; it disappears again if writing fails."""
    try:
        yield staged
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def seal(staged: Path, checkpoints: Path, run: str, step: int) -> None:
    """Add the manifest, force everything to the disk, and give the checkpoint its name."""
    write_manifest(staged, run, step)
    if step in steps(checkpoints):  # a damaged one, passed over when the run was resumed
        discard(checkpoints, step)
    publish(staged, folder_of(checkpoints, step))


def newest(checkpoints: Path, run: str | None = None, before: int | None = None, weights_only: bool = False) -> Found:
    """The newest checkpoint of a run that verifies (of a step below `before`), and why newer ones were passed over.

    One whose training state was removed is not passed over: `IncompleteError` is raised unless `weights_only`.
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
    """Remove all but the newest `keep` checkpoints up to the one just saved; later ones were passed over as damaged."""
    for step in [step for step in steps(checkpoints) if step <= saved][:-keep]:
        discard(checkpoints, step)


def discard(checkpoints: Path, step: int) -> None:
    """Remove a checkpoint; interrupted half-way, what is left no longer looks like one."""
    doomed = checkpoints / f".discarded-{step}"
    folder_of(checkpoints, step).rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(checkpoints: Path) -> None:
    """Remove what interrupted saves and removals left behind."""
    for path in checkpoints.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)
