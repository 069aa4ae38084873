"""One "did you mean"."""

from collections.abc import Collection
from difflib import get_close_matches


def suggest(name: str, known: Collection[str]) -> str:
    """What to say of an unknown name: the nearest known one, if there is one, and all of them."""
    near = get_close_matches(name, list(known), 1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(known)}"
