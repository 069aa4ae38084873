"""Folders that survive crashes: files appear whole or not at all, and one process works in a folder at a time."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def check_replaceable(path: Path) -> None:
    """Refuse to write where a folder, a device or a pipe is."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is {'a folder' if path.is_dir() else 'no regular file'}: name a file to write")


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for writing so that it appears under its name complete and on disk, or not at all."""
    check_replaceable(path)
    temporary = path.with_name(f"{path.name}.tmp")
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


@contextmanager
def locked(path: Path, shared: bool = False) -> Iterator[None]:
    """Hold the lock file `path`; ValueError names its holder if another process has it.

    The kernel frees the lock of a process that dies, so nothing a crash leaves behind can block the next run.
    """
    handle = _lock(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        if not shared:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode())
        yield
    finally:
        os.close(handle)


def _lock(path: Path, kind: int) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(handle, 200).decode(errors="replace") or "another process"
            os.close(handle)
            raise ValueError(
                f"{path.parent.parent} is in use by {holder}; wait for it, or choose another --out"
            ) from None
        # The last holder may have removed the file after we opened it: a lock on a removed file excludes nobody.
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            return handle
        os.close(handle)


def fsync(path: Path) -> None:
    """Force a file's content, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
