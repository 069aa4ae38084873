"""Names of folders or of the Hugging Face hub: a mistyped folder is told at once, not after asking the network."""

import re
from pathlib import Path

from elastic_memory.common.names import nearest

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def missing_folder(name: str) -> str | None:
    """What is wrong with a name that can only be a folder's; None for folders, and for names that the hub may have.

    `owner/name` is a folder's where a folder `owner` exists, or one whose whole name is much like it.
    """
    path = Path(name)
    if not name:
        return "no name: give a folder"
    if path.is_dir():
        return None
    if path.exists():
        return f"{name}: it is a file; give a folder"
    near, found = nearest_folder(path)
    if HUB_NAME.fullmatch(name) and not (len(path.parts) > 1 and (found or Path(path.parts[0]).is_dir())):
        return None
    return f"{name}: no such folder; " + (f"did you mean {near}?" if found else f"the nearest folder is {near}")


def nearest_folder(path: Path) -> tuple[Path, bool]:
    """The folder that exists whose name is closest, from the left; and whether it stands for the whole path."""
    here = Path(path.anchor)
    for part in path.relative_to(here).parts:
        if not (here / part).is_dir():
            folders = [child.name for child in here.iterdir() if child.is_dir()]
            near = nearest(part, folders)
            if near is None:
                return here, False
            part = near
        here /= part
    return here, True
