"""Tell mistyped folders from names on the Hugging Face hub, without asking the network."""

import re
from pathlib import Path

from elastic_memory.common.names import nearest

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def missing_folder(name: str) -> str | None:
    """Why a name that must mean a folder is wrong; None for folders, and for names that may be on the hub.

    `owner/name` means a folder if a folder `owner` exists, or one with a similar path.
    """
    path = Path(name)
    if not name:
        return "the name is empty: give a folder"
    if path.is_dir():
        return None
    if path.exists():
        return f"{name} is a file: give a folder"
    near, found = nearest_folder(path)
    if HUB_NAME.fullmatch(name) and not (len(path.parts) > 1 and (found or Path(path.parts[0]).is_dir())):
        return None
    return f"{name}: no such folder; " + (f"did you mean {near}?" if found else f"the nearest folder is {near}")


def nearest_folder(path: Path) -> tuple[Path, bool]:
    """The existing folder with the most similar path; and whether it matches the whole path, not only its beginning."""
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
