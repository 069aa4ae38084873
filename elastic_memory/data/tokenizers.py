"""Text into token ids: any Hugging Face tokenizer, or plain bytes; long texts in pieces, with the same ids.

A tokenizer without a pre-tokenizer (Llama 2) treats a document as one word: it needs about 100 bytes of memory per
byte of text, and slows down as the text grows. `pieces` therefore cuts every text into pieces of a few thousand
characters, before white space that no token of the vocabulary joins to the character before it. No merge crosses such
a cut, so the ids of the pieces, concatenated, are the ids of the whole text. Each cut is also verified with the
tokenizer: the text before it must have the same ids with and without the text after it.
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

PIECE = 8192  # characters; fastest for Llama 2, twice as fast as whole books
CONTEXT = 64  # characters on either side of a cut that are verified with the tokenizer
UNBROKEN = 1 << 20  # characters without a cut: not text, and too much memory to encode at once
UNCUTTABLE = f"no place to cut in {UNBROKEN} characters"
_PROBE = "Elastic  memory: naïve café, 12,345 tokens\n\tfor i in range(10): ∑ 漢字 🙂"


class Skip(Exception):  # noqa: N818 - not an error: the document is left out and counted under this reason
    """Why a document is left out of the prepared rows."""


class Tokenizer(Protocol):
    """What preparation needs of a tokenizer."""

    name: str
    vocab_size: int
    sha256: str
    breaks: re.Pattern[str]  # ends where a text may be cut

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`; strings such as `<s>` in it are ordinary text (except for Unigram models)."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`."""

    def known_as(self, sha256: str) -> bool:
        """Whether its hash, or the weaker hash of older manifests, starts with this."""

    def most_tokens(self, size: int) -> int | None:
        """The most tokens that a text of `size` UTF-8 bytes can have; None if unknown."""

    def save(self, folder: Path) -> None:
        """Save the tokenizer to `folder`, so that prepared rows can be decoded anywhere."""


class Bytes:
    """The built-in tokenizer `bytes`: the 256 byte values are the ids; no special tokens."""

    name = "bytes"
    vocab_size = 256
    sha256 = hashlib.sha256(b"bytes").hexdigest()
    breaks = re.compile(r"\S(?=\s)")

    def encode(self, text: str) -> np.ndarray:  # noqa: D102
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:  # noqa: D102
        # a model may have more tokens than there are bytes: 0xff, as no text has it, stands for one of them
        return bytes(min(one, 0xFF) for one in ids).decode(errors="replace")

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
        folder, file = str(Path(name).parent) if name.endswith(".gguf") else name, Path(name).name
        if wrong := missing_folder(folder):
            raise ValueError(f"no tokenizer {name!r}: {hint} ({wrong})")
        try:
            gguf = {"gguf_file": file} if name.endswith(".gguf") else {}
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **gguf)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"no tokenizer {name!r}: {hint} ({reason})") from None
        self.name = Path(name).resolve().name if Path(name).exists() else name
        self.sha256 = tokenizer_hash(self.tokenizer)
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        self._fast = None
        self._keeps_size = False
        self.breaks = re.compile(r"(?!)")
        if self.tokenizer.is_fast:
            from tokenizers import Tokenizer as FastTokenizer

            # A copy, so that these settings do not change the tokenizer that is saved.
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
            # only the batch call releases the GIL; it also keeps no offsets
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
    """The tokenizer `bytes`, or that of a folder, a GGUF file, or a name on the Hugging Face hub."""
    if str(name) == "bytes" or (str(name) and (Path(name) / "bytes.json").is_file()):
        return Bytes()
    return HuggingFace(str(name))


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of a transformers tokenizer: vocabulary, merges, normalizer, decoder and so on."""
    if tokenizer.is_fast:
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        # Padding and truncation are left over from the latest call.
        lasting = {name: value for name, value in settings.items() if name not in ("padding", "truncation")}
        return hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).hexdigest()
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(map(Path, tokenizer.save_vocabulary(folder))):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _former_hash(tokenizer: Any) -> str:
    """The hash of older manifests and models, which did not cover merges and normalizers."""
    behaviour = [sorted(tokenizer.get_vocab().items()), tokenizer.encode(_PROBE, add_special_tokens=False)]
    return hashlib.sha256(json.dumps(behaviour).encode()).hexdigest()


class Piece(NamedTuple):
    """A piece of a text, encoded together with a little text before it."""

    before: str
    text: str
    skip: int  # number of ids of `before`


def pieces(chunks: Iterable[str], tokenizer: Tokenizer) -> Iterator[Piece]:
    """Cut a text that comes in `chunks` into pieces whose ids, concatenated, are the ids of the whole."""
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
    """The ids of a piece, as in the whole text."""
    return tokenizer.encode(piece.before + piece.text)[piece.skip :]


def _cut(text: str, position: int, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """The first safe cut at or after `position`, and the number of ids of its context; None if there is none yet."""
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
    """A pattern for white space that no token (but special ones) joins to the character before it."""
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = [[index] for index in tokenizer.get_vocab().values() if index not in special]
    joined = {space for text in tokenizer.decode_batch(ids) for space in re.findall(r"\S(\s)", text)}
    free = "".join(space for space in " \n\t\r" if space not in joined)
    return re.compile(rf"\S(?=[{free}])" if free else r"(?!)")


def _keeps_size(normalizer: dict | None) -> bool:
    """Whether a normalizer adds at most one character, in front."""
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_size, normalizer["normalizers"]))
    if normalizer["type"] == "Replace":
        return normalizer["pattern"] == {"String": " "} and len(normalizer["content"]) == 1
    return normalizer["type"] == "Prepend"
