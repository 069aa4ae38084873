"""Checks of a model on disk: its files are unchanged, and its tensors are those of the model."""

import json
import struct
from pathlib import Path
from typing import Any

from elastic_memory.common.checksums import MANIFEST, WEIGHTS, DamagedError, IncompleteError, verify
from elastic_memory.common.strict import unique_keys
from elastic_memory.model.attach import REMINDER

LARGEST_HEADER = 100 << 20  # what the format allows
LOADED = (".safetensors", ".bin", ".pt", ".index.json")  # what transformers may load, besides `adapter_*`
MEMORY = ".self_attn.memory."  # parameters of an attached memory, unknown to the model's own class


def check_files(folder: Path) -> None:
    """Refuse a finished model whose files have changed; a model saved by hand has no manifest to check."""
    if not (folder / MANIFEST).exists():
        return
    try:
        listed = verify(folder)["files"]
    except (DamagedError, IncompleteError) as error:
        raise ValueError(f"{folder.parent / str(error)}: train it again, or copy it again") from None
    added = [path.name for path in sorted(folder.iterdir()) if _may_load(path.name) and path.name not in listed]
    if added:
        raise ValueError(f"{folder}: {', '.join(added)} was added to a finished model: move it away")


def check_tensors(folder: Path, quantized: bool) -> None:
    """Refuse weight files that are truncated, repeat a tensor, or hold anything but weights."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, kind in _tensors(path).items():
            if name in found:
                raise ValueError(f"{path}: {name} is in {found[name]} too")
            if not quantized and name != REMINDER and not kind.startswith(("F", "BF")):
                raise ValueError(f"{path}: {name} has type {kind}, but weights are floating-point numbers")
            found[name] = path.name


def check_loaded(where: str, info: dict[str, Any], foreign: bool) -> None:
    """Refuse what transformers only warns about: missing weights and unexpected tensors.

    A model of another project may have tensors that its class does not use.
    """
    unexpected = {name for name in info["unexpected_keys"] if MEMORY not in name and name != REMINDER}
    unknown = set() if foreign else unexpected
    for names, what in ((info["missing_keys"], "missing weights"), (unknown, "unexpected tensors")):
        if names:
            first = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ValueError(f"{where} does not match its model: {what}: {first}")


def _may_load(name: str) -> bool:
    return name.endswith(LOADED) or name.startswith(("adapter_", *WEIGHTS))


def _tensors(path: Path) -> dict[str, str]:
    """The dtype of each tensor of a safetensors file; ValueError if the file is damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(LARGEST_HEADER, size - 8):
            raise ValueError(f"{path} is damaged: {size:,} bytes without a list of tensors")
        try:
            header = json.loads(file.read(length), object_pairs_hook=unique_keys)
            kinds = {name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: its list of tensors cannot be read ({error})") from None
    if 8 + length + max(ends, default=0) != size:
        raise ValueError(f"{path} is damaged: {size:,} bytes, {8 + length + max(ends, default=0):,} were written")
    return kinds
