"""JSON-lines logs with a checksum per line: a line cut off by a crash is dropped, a damaged one is an error."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from elastic_memory.common.files import write_bytes
from elastic_memory.common.strict import parse_json

SUM = b', "sum": "'


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a log, with its checksum as its last key."""
    body = json.dumps({key: plain(value) for key, value in line.items()}, allow_nan=False).encode()
    with path.open("ab") as file:
        file.write(body[:-1] + SUM + _sum_of(body) + b'"}\n')


def read(path: Path, first: int | None = None) -> list[dict[str, Any]]:
    """The lines of a log, or only the first ones; a ValueError names a damaged line."""
    found = []
    for number, text in enumerate(_lines(path)[:first], 1):
        if not _is_whole(text):
            raise ValueError(f"{path} line {number} is damaged: restore the file from a copy")
        found.append(parse_json(text.decode(), path.name))
    return found


def mend(path: Path) -> None:
    """Remove a last line that a crash cut off; one that lacks only its newline gets it."""
    whole, newline, rest = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
    # the newline itself may be damaged: then the rest of the line is complete
    kept = next((text + b"\n" for text in (rest, rest[:-1]) if _is_whole(text)), b"")
    if rest:
        write_bytes(path, whole + newline + kept)


def cut(path: Path, lines: int) -> None:
    """Keep only the first `lines` lines of a log."""
    write_bytes(path, b"".join(text + b"\n" for text in _lines(path)[:lines]))


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().removesuffix(b"\n").split(b"\n") if path.exists() and path.stat().st_size else []


def _is_whole(text: bytes) -> bool:
    body, _, end = text.rpartition(SUM)
    return end == _sum_of(body + b"}") + b'"}'


def _sum_of(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


def plain(value: Any) -> Any:
    """JSON has no NaN: non-finite numbers become strings that `float` reads back."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
