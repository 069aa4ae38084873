"""The manifest of a folder: sizes and SHA-256 sums that show whether its files are unchanged."""

import hashlib
import json
from pathlib import Path
from typing import Any

from elastic_memory.common.files import write_json
from elastic_memory.common.progress import watched_sha256
from elastic_memory.common.strict import read_json

MANIFEST = "manifest.json"
WEIGHTS = ("model", "pytorch_model")  # how the names of weight files begin, whole or sharded


class DamagedError(ValueError):
    """A folder whose files have changed since they were written."""


class IncompleteError(ValueError):
    """A checkpoint without its training state: the weights are intact, but training cannot resume exactly."""


def write_manifest(folder: Path, run: str, step: int, without: tuple[str, ...] = ()) -> None:
    """List the files of a folder with sizes and sums, and which run and step they belong to."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": watched_sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (MANIFEST, *without)
    }
    content = {"run": run, "step": step, "files": files}
    write_json(folder / MANIFEST, content | {"seal": _seal_of(content)})


def _seal_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, run: str | None = None, step: int | None = None) -> dict[str, Any]:
    """The manifest of a folder; `DamagedError` or `IncompleteError` unless all files match it.

    With `run` and `step`, it must also be the checkpoint of that run and step.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        sealed = manifest.pop("seal") == _seal_of(manifest)
        listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder.name}/{MANIFEST} is missing or unreadable ({error})") from None
    if not sealed:
        raise DamagedError(f"{folder.name}/{MANIFEST} was changed after it was written")
    for key, wanted in (("run", run), ("step", step)):
        if wanted is not None and manifest.get(key) != wanted:
            raise DamagedError(f"{folder.name} is the checkpoint of {key} {manifest.get(key)}, not of {wanted}")
    missing = [name for name in listed if not (folder / name).is_file()]
    if any(name.startswith(WEIGHTS) for name in missing):
        raise DamagedError(f"{folder.name}: {', '.join(missing)} missing")
    for name, (size, digest) in listed.items():
        if name not in missing and (folder / name).stat().st_size != size:
            raise DamagedError(f"{folder.name}/{name}: {(folder / name).stat().st_size:,} bytes, {size:,} were written")
        if name not in missing and watched_sha256(folder / name) != digest:
            raise DamagedError(f"{folder.name}/{name}: SHA-256 differs from the one written")
    if missing:
        raise IncompleteError(f"{folder.name}: {', '.join(missing)} missing")
    return manifest
