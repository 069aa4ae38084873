"""One process works in a folder at a time."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InUseError(ValueError):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path, shared: bool = False) -> Iterator[None]:
    """Hold the lock file `path`; an InUseError names the process that already holds it.

    The kernel releases the lock of a process that dies, so a crash never blocks the next run.
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
            raise InUseError(
                f"{path.parent.parent} is in use by {holder}; wait for it, or choose another --out"
            ) from None
        # The last holder may have removed the file after we opened it: a lock on a removed file excludes nobody.
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            return handle
        os.close(handle)
