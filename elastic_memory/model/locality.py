"""What a token sees without memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Locality:
    """Its `block`, the newest `block_size` tokens (`sliding`), or all (`full`)."""

    kind: str
    block_size: int

    @property
    def sliding(self) -> bool:
        """Whether a token sees part of the previous block."""
        return self.kind == "sliding"

    def span(self, length: int) -> int:
        """Block length for a sample of `length` tokens."""
        return length if self.kind == "full" else min(self.block_size, length)
