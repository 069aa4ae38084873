"""Suggestions for mistyped names."""

from collections.abc import Collection
from difflib import get_close_matches


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name most similar to `name`; None if none is similar."""
    return next(iter(get_close_matches(name, list(known), 1)), None)


def suggest(name: str, known: Collection[str]) -> str:
    """The end of an error about an unknown name: the most similar known name, if any, and all known names."""
    near = nearest(name, known)
    return (f"did you mean {near!r}? " if near else "") + f"known: {', '.join(known)}"
