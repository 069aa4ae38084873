"""What a token sees without memory."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Locality:
    """The `kind` of local attention: to the token's block, the newest `window` tokens (sliding), or all (full)."""

    kind: str  # block, sliding or full
    block_size: int
    window: int  # of sliding attention, whole blocks

    @property
    def sliding(self) -> bool:
        """Whether a token sees tokens of earlier blocks."""
        return self.kind == "sliding"

    @property
    def lag(self) -> int:
        """Tokens before a block that its memory does not hold yet, because every token of the block sees them."""
        return self.window - self.block_size if self.sliding else 0

    def block_length(self, length: int) -> int:
        """Tokens of a block in a sample of `length` tokens."""
        return length if self.kind == "full" else min(self.block_size, length)
