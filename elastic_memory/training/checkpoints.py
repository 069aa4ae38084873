"""Checkpoints that are whole or absent, and that prove it.

A checkpoint is written to a hidden folder, sealed with a manifest of sizes and SHA-256 sums, forced to
the disk and renamed. On the way back every file is checked; a damaged checkpoint is passed over for the one before it.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_memory.training.files import publish, write_json
from elastic_memory.training.strict import read_json

MANIFEST = "manifest.json"
STAGING = ".saving"
WEIGHTS = ("model", "pytorch_model")  # how the names of weight files begin, whole or sharded
TRAINER_STATE = "trainer_state.json"


class DamagedError(ValueError):
    """A checkpoint whose files are not those that were written."""


class IncompleteError(ValueError):
    """A checkpoint from which training state was taken away: its weights stand, exact continuation is impossible."""


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


def write_manifest(folder: Path, run: str, step: int, without: tuple[str, ...] = ()) -> None:
    """List the files of a folder with their sizes and sums, and whose they are: of which run, after which step."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (MANIFEST, *without)
    }
    content = {"run": run, "step": step, "files": files}
    write_json(folder / MANIFEST, content | {"seal": _seal_of(content)})


def _seal_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """The SHA-256 sum of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path, run: str | None = None, step: int | None = None) -> dict[str, Any]:
    """The manifest of a folder; `DamagedError` or `IncompleteError` unless all files are as it says.

    With `run` and `step` it must also be the checkpoint of that run after that step.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        sealed = manifest.pop("seal") == _seal_of(manifest)
        listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder.name}/{MANIFEST} is missing or unreadable ({error})") from None
    if not sealed:
        raise DamagedError(f"{folder.name}/{MANIFEST} is not as it was written")
    for key, wanted in (("run", run), ("step", step)):
        if wanted is not None and manifest.get(key) != wanted:
            raise DamagedError(f"{folder.name} is the checkpoint of {key} {manifest.get(key)}, not of {wanted}")
    missing = [name for name in listed if not (folder / name).is_file()]
    if any(name.startswith(WEIGHTS) for name in missing):
        raise DamagedError(f"{folder.name}: {', '.join(missing)} missing")
    for name, (size, digest) in listed.items():
        if name not in missing and (folder / name).stat().st_size != size:
            raise DamagedError(f"{folder.name}/{name}: {(folder / name).stat().st_size:,} bytes, {size:,} were written")
        if name not in missing and sha256(folder / name) != digest:
            raise DamagedError(f"{folder.name}/{name}: SHA-256 differs from the one written")
    if missing:
        raise IncompleteError(f"{folder.name}: {', '.join(missing)} missing")
    return manifest


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
