"""Suggestions for mistyped names."""

from collections.abc import Collection
from difflib import get_close_matches


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that `name` is most likely a misspelling of."""
    return next(iter(get_close_matches(name, list(known), 1)), None)


def suggest(name: str, known: Collection[str]) -> str:
    """What to say about an unknown name: the nearest known one, if any, and all of them."""
    near = nearest(name, known)
    return (f"did you mean {near!r}? " if near else "") + f"known: {', '.join(known)}"
