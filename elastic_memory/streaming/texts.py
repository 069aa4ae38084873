"""Which texts a cache has read: their lengths, and digests that tell their tokens from others."""

import hashlib
from typing import NamedTuple

from elastic_memory.shapes import Int, Tensor


class ReadText(NamedTuple):
    """A text that was read to its end, where its last block ended too."""

    name: str | None
    tokens: int
    digest: str | None  # of the ids, block by block; None if they are unknown


def digest(before: str | None, block: Int[Tensor, " token"] | None) -> str | None:
    """Identifies the tokens of all blocks so far, given the digest of those before this one; None if any is unknown."""
    if before is None or block is None:
        return None
    return hashlib.blake2b(before.encode() + block.long().numpy().tobytes(), digest_size=16).hexdigest()


def digest_text(ids: Int[Tensor, " token"], block_size: int) -> str:
    """The digest of a whole text."""
    found = ""
    for block in ids.split(block_size) if len(ids) else ():
        found = digest(found, block)  # type: ignore[assignment]
    return found
