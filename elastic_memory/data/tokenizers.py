"""Text into token ids: any Hugging Face tokenizer, or plain bytes; long texts in pieces that equal the whole.

A tokenizer without a pre-tokeniser (Llama 2) treats a whole document as one word: it needs about 100 bytes of
memory per byte of text, and slows down as the text grows. `pieces` therefore cuts every text into a few thousand
characters at a time, before white space that no token of the vocabulary joins to what stands before it. No merge
crosses such a place, and merges are never undone: both sides are independent, and the ids of the pieces, put
together, are the ids of the whole. The tokenizer is also asked at each cut, for the sake of its other machinery:
the text before must have the same ids with and without what follows.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from elastic_memory.data.places import missing_folder

PIECE = 8192  # characters; the fastest for Llama 2, twice the speed of whole books
CONTEXT = 64  # characters on either side of a cut that the tokenizer is asked about
UNBROKEN = 1 << 20  # characters without a place to cut: not text, and too much memory to encode at once
UNCUTTABLE = f"no place to cut in {UNBROKEN} characters"
_PROBE = "Elastic  memory: naïve café, 12,345 tokens\n\tfor i in range(10): ∑ 漢字 🙂"


class Skip(Exception):  # noqa: N818 - not an error: the document is left out and counted under this reason
    """Why a document is left out of the prepared rows."""


class Tokenizer(Protocol):
    """What preparation needs: a name and hash for the manifest, and ids without special tokens."""

    name: str
    vocab_size: int
    sha256: str
    breaks: re.Pattern[str]  # ends where a text may be cut

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`; strings such as `<s>` in it are ordinary text (to all but Unigram models)."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`."""

    def known_as(self, sha256: str) -> bool:
        """Whether its hash, or the weaker one that it had in older manifests, begins like this."""

    def most_tokens(self, size: int) -> int | None:
        """No text of `size` UTF-8 bytes has more tokens than this; None where nothing is known."""

    def save(self, folder: Path) -> None:
        """Write the tokenizer into `folder`, so that prepared rows can be decoded anywhere."""


class Bytes:
    """The built-in tokenizer `bytes`: the 256 byte values are the ids; no special tokens."""

    name = "bytes"
    vocab_size = 256
    sha256 = hashlib.sha256(b"bytes").hexdigest()
    breaks = re.compile(r"\S(?=\s)")

    def encode(self, text: str) -> np.ndarray:  # noqa: D102
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:  # noqa: D102
        return bytes(ids).decode(errors="replace")

    def known_as(self, sha256: str) -> bool:  # noqa: D102
        return bool(sha256) and self.sha256.startswith(sha256)

    def most_tokens(self, size: int) -> int | None:  # noqa: D102
        return size

    def save(self, folder: Path) -> None:  # noqa: D102
        folder.mkdir(parents=True)
        (folder / "bytes.json").write_text('{"tokenizer": "bytes"}\n')


class HuggingFace:
    """A tokenizer of transformers, from a folder or the hub."""

    def __init__(self, name: str):
        from transformers import AutoTokenizer

        hint = "give `bytes`, a folder with a tokenizer.json, or a name on the Hugging Face hub"
        if wrong := missing_folder(name):
            raise ValueError(f"no tokenizer {name!r}: {hint} ({wrong})")
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"no tokenizer {name!r}: {hint} ({reason})") from None
        self.name = Path(name).resolve().name if Path(name).is_dir() else name
        self.sha256 = tokenizer_hash(self.tokenizer)
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        self._fast = None
        self._keeps_size = False
        self.breaks = re.compile(r"(?!)")
        if self.tokenizer.is_fast:
            from tokenizers import Tokenizer as FastTokenizer

            # A copy: these settings must not reach a tokenizer that others use or save.
            self._fast = FastTokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
            self._fast.encode_special_tokens = True
            self._fast.no_truncation()
            self._fast.no_padding()
            settings = json.loads(self._fast.to_str())
            self._keeps_size = settings["model"]["type"] == "BPE" and _keeps_size(settings["normalizer"])
            self.breaks = _breaks(self._fast)

    def encode(self, text: str) -> np.ndarray:  # noqa: D102
        if self._fast is None:
            ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        else:
            # the batch call: it alone leaves other threads running, and it keeps no offsets
            ids = self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return np.array(ids, dtype=np.uint32)

    def decode(self, ids: Iterable[int]) -> str:  # noqa: D102
        return self.tokenizer.decode(list(ids))

    def known_as(self, sha256: str) -> bool:  # noqa: D102
        hashes = (self.sha256, _former_hash(self.tokenizer))
        return bool(sha256) and any(known.startswith(sha256) for known in hashes)

    def most_tokens(self, size: int) -> int | None:  # noqa: D102
        return size + 1 if self._keeps_size else None

    def save(self, folder: Path) -> None:  # noqa: D102
        self.tokenizer.save_pretrained(folder)


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer `bytes`, of a folder, or of a name on the Hugging Face hub."""
    if str(name) == "bytes" or (str(name) and (Path(name) / "bytes.json").is_file()):
        return Bytes()
    return HuggingFace(str(name))


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of all of a transformers tokenizer: vocabulary, merges, normaliser, decoder and so on."""
    if tokenizer.is_fast:
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        # What the latest call with padding or truncation left behind.
        lasting = {name: value for name, value in settings.items() if name not in ("padding", "truncation")}
        return hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).hexdigest()
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(map(Path, tokenizer.save_vocabulary(folder))):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _former_hash(tokenizer: Any) -> str:
    """The hash in manifests and models made before merges and normalisers counted."""
    behaviour = [sorted(tokenizer.get_vocab().items()), tokenizer.encode(_PROBE, add_special_tokens=False)]
    return hashlib.sha256(json.dumps(behaviour).encode()).hexdigest()


class Piece(NamedTuple):
    """A stretch of a text, to be encoded together with the little that stands before it."""

    before: str
    text: str
    skip: int  # how many ids `before` has


def pieces(chunks: Iterable[str], tokenizer: Tokenizer) -> Iterator[Piece]:
    """Cut a text that comes in `chunks` into pieces whose ids, put together, are the ids of the whole."""
    held, start, skip = "", 0, 0
    for chunk in chunks:
        held += chunk
        while cut := _cut(held, start + PIECE, tokenizer):
            yield _piece(held, start, cut[0], skip)
            start, skip = cut
        if len(held) - start > UNBROKEN + CONTEXT:
            raise Skip(UNCUTTABLE)
        held, start = held[max(0, start - CONTEXT) :], min(start, CONTEXT)
    if start < len(held):
        yield _piece(held, start, len(held), skip)


def _piece(text: str, start: int, stop: int, skip: int) -> Piece:
    if stop - start > UNBROKEN:
        raise Skip(UNCUTTABLE)
    return Piece(text[max(0, start - CONTEXT) : start], text[start:stop], skip)


def encode(piece: Piece, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of a piece, as they stand in the whole text."""
    return tokenizer.encode(piece.before + piece.text)[piece.skip :]


def _cut(text: str, position: int, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """The first safe place to cut at or after `position`, and the ids its CONTEXT has; None if there is none yet."""
    for match in tokenizer.breaks.finditer(text, position):
        place = match.end()
        if place + CONTEXT > len(text):
            return None
        start = max(0, place - CONTEXT)
        before = tokenizer.encode(text[start:place])
        both = tokenizer.encode(text[start : place + CONTEXT])
        if np.array_equal(both[: len(before)], before):
            return place, len(before)
    return None


def _breaks(tokenizer: Any) -> re.Pattern[str]:
    """White space that no token joins to a character before it; special tokens do not count, texts have none."""
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = [[index] for index in tokenizer.get_vocab().values() if index not in special]
    joined = {space for text in tokenizer.decode_batch(ids) for space in re.findall(r"\S(\s)", text)}
    free = "".join(space for space in " \n\t\r" if space not in joined)
    return re.compile(rf"\S(?=[{free}])" if free else r"(?!)")


def _keeps_size(normalizer: dict | None) -> bool:
    """Whether a normaliser cannot lengthen a text by more than one character in front."""
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_size, normalizer["normalizers"]))
    if normalizer["type"] == "Replace":
        return normalizer["pattern"] == {"String": " "} and len(normalizer["content"]) == 1
    return normalizer["type"] == "Prepend"
