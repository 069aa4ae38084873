"""LongPPL: perplexity on the tokens for which a long context matters (arXiv 2410.23771).

A reference model reads each text twice, with all of it and with a truncated context. A token is a key token if the
long context makes it likelier by more than `alpha` nats and likely enough at all (log-probability above `beta`).
LongPPL is the evaluated model's perplexity on the key tokens, pooled over all texts.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from elastic_memory.common.defaults import ALPHA, BETA, LENGTH, LONGPPL_REFERENCE, SLIDING_WINDOW, TRUNC_LEN
from elastic_memory.common.files import sha256, whole_file
from elastic_memory.common.strict import read_json
from elastic_memory.data.tokenizers import Tokenizer
from elastic_memory.evaluation.inputs import document_of, token_ids
from elastic_memory.evaluation.journal import Advance, Journal, RowRecord, bootstrap, by_document
from elastic_memory.evaluation.loading import load_model, tokenizer_of
from elastic_memory.evaluation.losses import Model, Streamed, block_size_of, has_blocks, last_losses, streamed_losses
from elastic_memory.evaluation.spans import Span, encode, inside, locate, merge
from elastic_memory.shapes import Float, Int, Tensor
from elastic_memory.streaming.fingerprint import weights_hash

FEW_KEY_TOKENS = 500  # a value from fewer key tokens is shown with a warning


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What makes a token a key token; the defaults are those of the release."""

    trunc_len: int = TRUNC_LEN
    sliding_window: int = SLIDING_WINDOW
    alpha: float = ALPHA
    beta: float = BETA

    def __post_init__(self) -> None:
        if self.trunc_len < 1 or self.sliding_window < 1:
            raise ValueError(
                f"trunc_len={self.trunc_len}, sliding_window={self.sliding_window}: give 1 token or more for both"
            )

    @classmethod
    def scaled(cls, length: int, **given: float | None) -> "Settings":
        """The released proportions for samples shorter than the paper's; what is `given` and not None is kept."""
        share = min(length, LENGTH)
        scaled = {
            "trunc_len": max(1, TRUNC_LEN * share // LENGTH),
            "sliding_window": max(1, SLIDING_WINDOW * share // LENGTH),
        }
        return cls(**scaled | {name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


@dataclass(frozen=True)
class LongPerplexity:
    """`longppl` over `key_tokens` tokens (None if there are none), beside `ppl` over all `tokens`.

    `keys[i]` lists the key tokens of text i, as positions in the evaluated model's tokens.
    """

    longppl: float | None
    key_tokens: int
    ppl: float
    tokens: int
    interval: tuple[float, float] | None
    keys: list[list[int]]
    by_document: dict[str, list[float]]  # sum of the losses of key tokens, and their number
    reference: dict[str, str]  # name, and a hash of its weights
    protocol: str

    def __str__(self) -> str:
        value = "no key tokens" if self.longppl is None else f"{self.longppl:.4g}"
        if 0 < self.key_tokens < FEW_KEY_TOKENS:
            value += f" (only {self.key_tokens} key tokens: too few to mean much)"
        spread = "" if self.interval is None else "  (95%: {:.4g} to {:.4g})".format(*self.interval)
        return f"LongPPL[{self.protocol}] = {value}{spread}"


def longppl(
    model: Model,
    tokenizer: Any,
    texts: Sequence[Any],
    reference: "Model | Reference | str" = LONGPPL_REFERENCE,
    reference_tokenizer: Any = None,
    trunc_len: int = TRUNC_LEN,
    sliding_window: int = SLIDING_WINDOW,
    alpha: float = ALPHA,
    beta: float = BETA,
    *,
    block_size: int | None = None,
    cache: Path | str | None = None,
    known: "FoundKeys | None" = None,
    journal: Journal | None = None,
    advance: Advance = lambda count: None,
    streamed: Streamed | None = None,
) -> LongPerplexity:
    """LongPPL of any Hugging Face causal language model, key tokens found by any other one.

    `texts` are strings, or rows of token ids, which are never tokenized again. With a `reference_tokenizer` the
    reference reads the text, and key tokens are matched by characters. Without one it reads the same tokens as the
    model, and `tokenizer` is needed only for strings. Tokenizers are those of transformers or of `elastic_memory.data`.
    The folder `cache` keeps key tokens for later calls with the same reference and settings. Key tokens in `known` are
    not searched again. `streamed` keeps the losses of rows that another metric has already read.
    """
    settings = Settings(trunc_len=trunc_len, sliding_window=sliding_window, alpha=alpha, beta=beta)
    if isinstance(texts, str):
        raise ValueError("texts is one string: give a list of texts, such as [text]")
    if isinstance(reference, str):
        reference = Reference(partial(reference_for, reference, None))
    elif not isinstance(reference, Reference):
        given = reference, transformers_tokenizer(reference_tokenizer)
        reference = Reference(lambda: given)
    finder = KeyTokens(reference, settings, Path(cache) if cache else None, known)
    tokenizer = transformers_tokenizer(tokenizer)
    streamed = streamed or Streamed(model, block_size)
    journal = journal or Journal()
    advance(len(journal.done))
    if reference.reads_same_tokens and not any(isinstance(text, str) for text in texts):
        # Fail before hours of work.
        _check_length(max((len(token_ids(text)) for text in texts), default=0), settings)
    for index in (i for i in range(len(texts)) if i not in journal.done):
        ids, keys = finder.find(tokenizer, texts[index])
        losses = streamed(ids[None])[0].double()
        journal.add(_record(index, document_of(texts, index), losses, keys, finder.length))
        advance(1)
    return _summary(journal.records(), settings, reference.identity)


@lru_cache(maxsize=1)  # called for every set of conditions
def load_reference(path: str) -> tuple[Model, Tokenizer | None]:
    """A reference model, and the tokenizer in its folder."""
    return load_model(path), tokenizer_of(path)


@dataclass(frozen=True)
class FoundKeys:
    """Key tokens that were found earlier: by whom (`Reference.facts`), and in which texts (by hash of the text)."""

    reference: dict[str, Any]
    texts: dict[str, dict[str, Any]]


class Reference:
    """The model that finds key tokens, and its tokenizer unless it shares the evaluated model's; loaded when needed.

    `identity_file` caches `facts`, so that a model whose key tokens are all cached is not loaded at all.
    """

    def __init__(self, load: Callable[[], tuple[Model, Any]], identity_file: Path | None = None):
        self.load, self.identity_file = load, identity_file

    @classmethod
    def from_keys(cls, found: FoundKeys, path: str, tokenizer: Tokenizer | None) -> "Reference":
        """The reference that found these key tokens; the model at `path` is loaded only for texts without any."""
        reference = cls(partial(reference_for, path, tokenizer))
        reference.facts = found.reference
        return reference

    @classmethod
    def from_path(cls, path: str, tokenizer: Tokenizer | None, folder: Path | None) -> "Reference":
        """The reference at a path; for a GGUF file, which is slow to load, `facts` are cached in the folder of keys."""
        identity_file = None
        if folder and Path(path).is_file():
            kind = "cuda" if torch.cuda.is_available() else "cpu"
            precision = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""
            what = [sha256(Path(path)), Path(path).name, tokenizer and tokenizer.sha256, kind, precision]
            identity_file = folder / f"reference-{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]}.json"
        return cls(partial(reference_for, path, tokenizer), identity_file)

    @cached_property
    def loaded(self) -> tuple[Model, Any]:
        """The model, and its tokenizer or None."""
        return self.load()

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Its name, a hash of its weights, its precision, and whether it reads the evaluated model's tokens."""
        if self.identity_file and self.identity_file.exists():
            return read_json(self.identity_file)
        model, tokenizer = self.loaded
        name = _name(getattr(model, "name_or_path", "") or type(model).__name__)
        facts: dict[str, Any] = {"reference": name, "weights": weights_hash(model), "precision": _precision(model)}
        facts["shared_tokens"] = tokenizer is None
        if self.identity_file:
            _write_shared(self.identity_file, facts)
        return facts

    @property
    def identity(self) -> dict[str, str]:
        """Its name, a hash of its weights, and its precision."""
        return {name: value for name, value in self.facts.items() if name != "shared_tokens"}

    @property
    def reads_same_tokens(self) -> bool:
        """Whether it has the tokenizer of the evaluated model."""
        return self.facts["shared_tokens"]


class KeyTokens:
    """Finds the key tokens of texts with a reference model, and caches their positions in `folder`."""

    def __init__(self, reference: Reference, settings: Settings, folder: Path | None, known: FoundKeys | None = None):
        self.reference, self.settings, self.folder = reference, settings, folder
        self.known = known.texts if known else {}
        self.found: dict[str, dict[str, Any]] = {}  # by hash of the text
        self.length = 0  # reference tokens of the latest text

    def find(self, tokenizer: Any, text: Any) -> tuple[Int[Tensor, " token"], list[int]]:
        """Tokens of the evaluated model, and positions of the key tokens; the first token has no prediction."""
        if isinstance(text, str):
            _check_given(tokenizer, "a text given as a string")
            listed, spans = encode(tokenizer, text, special=False)
            ids = torch.tensor(listed)
        else:
            ids, spans, text = token_ids(text), [], None
        shared = self.reference.reads_same_tokens
        if not shared and text is None:
            _check_given(tokenizer, "a reference with a tokenizer of its own")
        digest = hashlib.sha256(ids.numpy().tobytes() + (text or "").encode()).hexdigest()
        found = self.known.get(digest) or self._cached(digest, lambda: self._search(tokenizer, ids, text, spans))
        self.found[digest] = found
        self.length = found["reference_tokens"]
        return ids, found["keys"]

    def _cached(self, digest: str, search: Callable[[], list[int]]) -> dict[str, Any]:
        """The key tokens of the text with this hash: read from the folder, or searched and written there."""
        shared = self.reference.reads_same_tokens
        identity = {"text": digest, "shared_tokens": shared, **self.reference.identity, **asdict(self.settings)}
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
        path = self.folder / f"{name}.json" if self.folder else None
        if path and path.exists():
            stored = json.loads(path.read_text())
            return {name: stored[name] for name in ("reference_tokens", "keys")}
        keys = [i for i in search() if i > 0]  # the first token has no prediction
        found = {"reference_tokens": self.length, "keys": keys}
        if path:
            _write_shared(path, {**identity, **found})
        return found

    def _search(self, tokenizer: Any, ids: Tensor, text: str | None, spans: list[Span]) -> list[int]:
        """Positions of key tokens among the evaluated model's; a reference with its own tokenizer reads the text."""
        own = self.reference.loaded[1]
        if own is None:
            return self._positions(ids)
        if text is None:
            text, spans = locate(tokenizer, ids.tolist())
        listed, covered = encode(own, text, special=True)
        marked = merge([covered[i] for i in self._positions(torch.tensor(listed))])
        return inside(spans, marked)

    def _positions(self, ids: Int[Tensor, " token"]) -> list[int]:
        """Positions of key tokens among the reference's tokens, which it reads up to its maximum position."""
        self.length, model = len(ids), self.reference.loaded[0]
        if self.length and int(ids.max()) >= model.config.vocab_size:
            raise ValueError(
                f"token id {int(ids.max())} is outside the vocabulary of the reference "
                f"{self.reference.identity['reference']} (size {model.config.vocab_size}): pass its own "
                "reference_tokenizer"
            )
        limit = None if has_blocks(model) else getattr(model.config, "max_position_embeddings", None)
        return key_positions(model, ids[:limit], self.settings)


def reference_for(path: str, tokenizer: Tokenizer | None) -> tuple[Model, Any]:
    """A reference model and its tokenizer; None for a tokenizer equal to `tokenizer`: it then reads the same tokens."""
    model, own = load_reference(path)
    return model, None if own is None or (tokenizer and own.sha256 == tokenizer.sha256) else transformers_tokenizer(own)


def key_tokens(
    reference: str, tokenizer: Tokenizer, texts: Sequence[Any], settings: Settings, cache: Path
) -> FoundKeys:
    """The key tokens of rows, to pass to `longppl` as `known`; those of each row are saved in `cache` at once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):  # as where models are measured
        finder = KeyTokens(Reference.from_path(reference, tokenizer, cache), settings, cache)
        for index in range(len(texts)):
            finder.find(transformers_tokenizer(tokenizer), texts[index])
        return FoundKeys(finder.reference.facts, finder.found)


def key_positions(reference: Model, ids: Int[Tensor, " token"], settings: Settings) -> list[int]:
    """Positions of the key tokens among the reference's own tokens; the first `trunc_len` are never key.

    The truncated context of a token begins at the last multiple of `sliding_window` that leaves it at least
    `trunc_len` tokens.
    """
    keep, step = settings.trunc_len, settings.sliding_window
    if len(ids) <= keep:
        return []
    # The size of the pieces does not change the losses, only the memory needed.
    full = streamed_losses(reference, ids[None], block_size_of(reference))[0]
    found: list[bool] = []
    whole = (len(ids) - keep) // step
    stacked = ids.unfold(0, keep + step, step).split(_windows_per_call(reference, step)) if whole else ()
    for windows in (*stacked, ids[None, whole * step :]):
        scored = windows.shape[1] - keep
        if scored == 0:
            break  # the full windows cover everything
        first = keep + len(found)
        short = last_losses(reference, windows, scored).flatten()
        long = full[first - 1 : first - 1 + len(short)]
        found += ((short - long > settings.alpha) & (long < -settings.beta)).tolist()
    return [keep + i for i, key in enumerate(found) if key]


def _windows_per_call(reference: Model, scored: int) -> int:
    """Windows per call, so that their float32 logits stay below 2 GiB."""
    return max(1, 2**29 // (scored * reference.config.vocab_size))


def _write_shared(path: Path, found: dict[str, Any]) -> None:
    """Write a JSON file that several processes may write at once, all with the same content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, shared=True) as file:
        file.write(json.dumps(found).encode())


def transformers_tokenizer(tokenizer: Any) -> Any:
    """The transformers tokenizer inside one of `elastic_memory.data`; others are returned as they are."""
    return getattr(tokenizer, "tokenizer", tokenizer)


def _precision(model: Model) -> str:
    weight = next(model.parameters())
    kind = weight.device.type
    return str(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype)


def _name(origin: str) -> str:
    """The name of a model: its run, folder, file, or name on the hub."""
    path = Path(origin).resolve()
    if not path.exists():
        return origin
    return path.parent.name if (path.parent / "run.json").exists() else path.name


def _record(index: int, document: str, losses: Float[Tensor, " prediction"], keys: list[int], length: int) -> RowRecord:
    key_losses = losses[torch.tensor(keys, dtype=torch.long) - 1]
    return {
        "row": index,
        "document": document,
        "tokens": len(losses),
        "loss": float(losses.sum()),
        "keys": keys,
        "key_loss": float(key_losses.sum()),
        "reference_tokens": length,
    }


def _summary(records: list[RowRecord], settings: Settings, reference: dict[str, str]) -> LongPerplexity:
    _check_length(max((r["reference_tokens"] for r in records), default=0), settings)
    key_tokens = sum(len(r["keys"]) for r in records)
    tokens = sum(r["tokens"] for r in records)
    key_losses = [r["key_loss"] for r in records]
    if key_tokens == 0:
        warnings.warn(f"no key tokens in {len(records)} texts under {settings}: LongPPL is undefined", stacklevel=3)
    return LongPerplexity(
        longppl=math.exp(math.fsum(key_losses) / key_tokens) if key_tokens else None,
        key_tokens=key_tokens,
        ppl=math.exp(math.fsum(r["loss"] for r in records) / tokens),
        tokens=tokens,
        interval=bootstrap(key_losses, [len(r["keys"]) for r in records], [r["document"] for r in records]),
        keys=[r["keys"] for r in records],
        by_document=by_document((r["document"], r["key_loss"], len(r["keys"])) for r in records),
        reference=reference,
        protocol=f"reference={reference['reference']}, K={settings.trunc_len}, w={settings.sliding_window}, "
        f"alpha={settings.alpha:g}, beta={settings.beta:g}, keys={key_tokens} in {len(records)} texts",
    )


def _check_length(longest: int, settings: Settings) -> None:
    if longest <= settings.trunc_len:
        raise ValueError(
            f"no text is longer than trunc_len = {settings.trunc_len} reference tokens (the longest has {longest}), so "
            "no token can be a key token: choose a smaller trunc_len, for instance Settings.scaled(length)"
        )


def _check_given(tokenizer: Any, what: str) -> None:
    if tokenizer is None:
        raise ValueError(f"{what} needs the evaluated model's tokenizer: pass it as tokenizer")
