"""The characters that tokens cover, and which tokens lie inside marked spans."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]


def encode(tokenizer: Any, text: str, special: bool) -> tuple[list[int], list[Span]]:
    """Tokens of the text with the characters that each covers; special tokens cover none.

    For tokenizers without offsets the spans come from decoding, if that reproduces the text.
    """
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], [tuple(span) for span in encoded["offset_mapping"]]
    if callable(tokenizer):
        ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    else:
        ids = tokenizer.encode(text).tolist()  # `bytes` of elastic_memory.data, without special tokens
    decoded, spans = decode(tokenizer, ids)
    if decoded != text:
        raise ValueError(
            f"{type(tokenizer).__name__} gives no character offsets and does not decode its tokens to the text they "
            "came from: use its fast version"
        )
    return ids, spans


def locate(tokenizer: Any, ids: list[int]) -> tuple[str, list[Span]]:
    """The text of given tokens, and the characters that each covers.

    From the tokenizer's own offsets if it splits the text into the same tokens, else from decoding.
    """
    text, spans = decode(tokenizer, ids)
    again, offsets = encode(tokenizer, text, special=False) if getattr(tokenizer, "is_fast", False) else ([], [])
    return text, offsets if again == ids else spans


def decode(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[Span]]:
    """The text of given tokens by decoding, and the characters that each covers.

    Tokens that share a character all cover it. Each token is decoded after the one before it, because its text depends
    on that (a space at the start of a text is dropped).
    """
    special = set(getattr(tokenizer, "all_special_ids", ()))
    text: list[str] = []
    spans: list[Span] = []
    length = context = done = 0
    for end in range(1, len(ids) + 1):
        if ids[end - 1] in special:
            piece = ""
        else:
            before, now = (_read(tokenizer, ids[context:stop]) for stop in (done, end))
            if now.endswith("\ufffd") and end < len(ids) and end - done < 4:
                continue  # a character needs up to four byte tokens
            piece = now[len(before) :]
        text.append(piece)
        spans += [(length, length + len(piece))] * (end - done)
        length += len(piece)
        context, done = done, end
    return "".join(text), spans


def merge(spans: Sequence[Span]) -> list[Span]:
    """Join spans where one ends exactly where the next starts."""
    merged: list[Span] = []
    for start, end in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def inside(tokens: Sequence[Span], marked: Sequence[Span]) -> list[int]:
    """Indices of the tokens that lie completely inside one marked span; both are in the order of the text."""
    found, current = [], 0
    for index, (start, end) in enumerate(tokens):
        while current < len(marked) and marked[current][1] < end and marked[current][0] <= start:
            current += 1
        if current < len(marked) and marked[current][0] <= start and end <= marked[current][1]:
            found.append(index)
    return found


def _read(tokenizer: Any, ids: Sequence[int]) -> str:
    exact = {"clean_up_tokenization_spaces": False} if isinstance(tokenizer, PreTrainedTokenizerBase) else {}
    return tokenizer.decode(list(ids), **exact)
