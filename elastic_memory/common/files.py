"""Files and folders that survive crashes: each appears complete, or not at all."""

import errno
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a user's quota, or the largest file allowed


def check_replaceable(path: Path) -> None:
    """Refuse to write where a folder, a device or a pipe is."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is {'a folder' if path.is_dir() else 'not a regular file'}: name a file to write")


def check_writable(path: Path) -> None:
    """Raise, before hours of work, if `path` could not be written; leaves nothing behind."""
    check_replaceable(path)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        error.filename = str(path)
        raise


@contextmanager
def whole_file(path: Path, shared: bool = False) -> Iterator[BinaryIO]:
    """Open `path` for writing so that it appears under its name complete and on disk, or not at all.

    `shared`: several processes may write it at once, so each has a temporary file of its own.
    """
    check_replaceable(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial" if shared else f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        # "x" refuses a link planted under the temporary name; the rename replaces one under the final name.
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say which file it was
        raise
    fsync(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content atomically."""
    with whole_file(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Replace a file's content by text, atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, content: Any) -> None:
    """Replace a file's content by JSON, atomically."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_json_once(path: Path, content: Any) -> None:
    """Write JSON unless the file exists: of several processes that write it at once, the first decides."""
    own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_json(own, content)
        os.link(own, path)
    except FileExistsError:
        pass
    except OSError:  # no links on this file system
        os.replace(own, path)
    finally:
        own.unlink(missing_ok=True)


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A hidden folder to write into. It gets its final name when all of it is on disk, and is removed if that fails."""
    final.absolute().parent.mkdir(parents=True, exist_ok=True)
    staged = final.with_name(f".{final.name}.saving")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        yield staged
        publish(staged, final)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def publish(staged: Path, final: Path) -> None:
    """Give a finished folder its final name, atomically, after all of it is on disk."""
    for path in sorted(staged.rglob("*")):
        fsync(path)
    fsync(staged)
    os.replace(staged, final)
    fsync(final.parent)


def fsync(path: Path) -> None:
    """Force a file's content, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path, advance: Callable[[int], None] = lambda count: None) -> str:
    """The SHA-256 of a file's content, in hex; `advance` is told how many more bytes were read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()
