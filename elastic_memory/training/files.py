"""Writing that survives a power cut: a folder is there whole, or not at all (`whole_file` does it for files)."""

import json
import os
from pathlib import Path
from typing import Any

from elastic_memory.data.folders import fsync, whole_file


def fsync_tree(folder: Path) -> None:
    """Force a folder, all that is in it, and all below to the disk."""
    for path in sorted(folder.rglob("*")):
        fsync(path)
    fsync(folder)


def publish(staged: Path, final: Path) -> None:
    """Give a finished folder its final name, in one step that cannot be seen half done."""
    fsync_tree(staged)
    os.replace(staged, final)
    fsync(final.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content at once."""
    with whole_file(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Replace a file's content by text, at once."""
    write_bytes(path, text.encode())


def write_json(path: Path, content: Any) -> None:
    """Replace a file's content by JSON, at once."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
