"""LongPPL: the perplexity of those tokens for which a long context matters (arXiv 2410.23771).

A reference model reads each text twice, with all of it and with a truncated context. A token is a key token if the
long context makes it likelier by more than `alpha` nats and likely enough at all (log-probability above `beta`).
LongPPL is the evaluated model's perplexity on the key tokens, pooled over all texts.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_memory.evaluation.loading import load_model, tokenizer_of
from elastic_memory.evaluation.losses import Model, block_size_of, last_losses, streamed_losses
from elastic_memory.evaluation.rows import Advance, Journal, Record, bootstrap, document_of, token_ids
from elastic_memory.evaluation.spans import Span, encode, inside, locate, merge
from elastic_memory.model.fingerprint import fingerprint
from elastic_memory.shapes import Float, Int, Tensor

REFERENCE = "meta-llama/Llama-3.1-8B"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What makes a token a key token; the defaults are the released ones."""

    trunc_len: int = 4096
    sliding_window: int = 1024
    alpha: float = 2.0
    beta: float = -2.0

    def __post_init__(self) -> None:
        if self.trunc_len < 1 or self.sliding_window < 1:
            raise ValueError(
                f"trunc_len {self.trunc_len}, sliding_window {self.sliding_window}: both count tokens, at least 1"
            )

    @classmethod
    def scaled(cls, length: int) -> "Settings":
        """The released proportions for samples shorter than the 32,768 tokens they were chosen for."""
        return cls(trunc_len=max(1, min(4096, length // 8)), sliding_window=max(1, min(1024, length // 32)))


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
    protocol: str

    def __str__(self) -> str:
        value = "no key tokens" if self.longppl is None else f"{self.longppl:.4g}"
        spread = "" if self.interval is None else "  (95%: {:.4g} to {:.4g})".format(*self.interval)
        return f"LongPPL[{self.protocol}] = {value}{spread}"


def longppl(
    model: Model,
    tokenizer: Any,
    texts: Sequence[Any],
    reference: Model | str = REFERENCE,
    reference_tokenizer: Any = None,
    trunc_len: int = 4096,
    sliding_window: int = 1024,
    alpha: float = 2.0,
    beta: float = -2.0,
    *,
    block_size: int | None = None,
    cache: Path | str | None = None,
    journal: Journal | None = None,
    advance: Advance = lambda count: None,
) -> LongPerplexity:
    """LongPPL of any Hugging Face causal language model, key tokens found by any other one.

    `texts` are strings, or rows of token ids, which are evaluated as they are, never tokenised again. A
    `reference` with a `reference_tokenizer` of its own reads the text, and key tokens are matched by characters; one
    without reads the same tokens as the model, and then `tokenizer` is needed for strings only. A folder given as
    `cache` keeps the key tokens found, for this reference and these settings.
    """
    settings = Settings(trunc_len=trunc_len, sliding_window=sliding_window, alpha=alpha, beta=beta)
    if isinstance(reference, str):
        reference, reference_tokenizer = load_model(reference), transformers_tokenizer(tokenizer_of(reference))
    finder = KeyTokens(reference, reference_tokenizer, settings, Path(cache) if cache else None)
    block = block_size or block_size_of(model)
    journal = journal or Journal()
    advance(len(journal.done))
    if reference_tokenizer is None and not any(isinstance(text, str) for text in texts):
        # Known before hours of work.
        _check_length(max((len(token_ids(text)) for text in texts), default=0), settings)
    for index in (i for i in range(len(texts)) if i not in journal.done):
        ids, marked, spans = finder.find(tokenizer, texts[index])
        # The first token has no prediction of its own.
        keys = [i for i in inside(spans, marked) if i > 0]
        losses = streamed_losses(model, ids[None], block)[0].double()
        journal.add(_record(index, document_of(texts, index), losses, keys, finder.length))
        advance(1)
    return _summary(journal.records(), settings, finder.name)


class KeyTokens:
    """Finds the stretches of a text that are key tokens for a reference model, and keeps them on disk.

    Stretches are counted in characters when the reference has its own tokenizer, otherwise in tokens.
    """

    def __init__(self, reference: Model, tokenizer: Any, settings: Settings, folder: Path | None):
        self.reference, self.tokenizer, self.settings, self.folder = reference, tokenizer, settings, folder
        origin = getattr(reference, "name_or_path", "") or type(reference).__name__
        self.name = Path(origin).resolve().name if Path(origin).is_dir() else origin
        self.identity = {"reference": self.name, "fingerprint": fingerprint(reference), **asdict(settings)}
        self.length = 0  # reference tokens of the text seen last

    def find(self, tokenizer: Any, text: Any) -> tuple[Int[Tensor, " token"], list[Span], list[Span]]:
        """Tokens of the evaluated model, key stretches of the text, and the stretch that each token covers."""
        if isinstance(text, str):
            _need(tokenizer, "texts given as strings")
            listed, spans = encode(tokenizer, text, special=False)
            ids = torch.tensor(listed)
        else:
            ids, spans = token_ids(text), []
        if self.tokenizer is None:
            return ids, self._stored(ids.numpy().tobytes(), ids), [(i, i + 1) for i in range(len(ids))]
        if not spans:
            _need(tokenizer, "a reference with a tokenizer of its own")
            text, spans = locate(tokenizer, ids.tolist())
        return ids, self._stored(text.encode(), text), spans

    def _stored(self, content: bytes, text: str | Tensor) -> list[Span]:
        identity = {"text": hashlib.sha256(content).hexdigest(), **self.identity}
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
        path = self.folder / f"{name}.json" if self.folder else None
        if path and path.exists():
            stored = json.loads(path.read_text())
            self.length = stored["reference_tokens"]
            return [(start, end) for start, end in stored["spans"]]
        spans = self._computed(text)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**identity, "reference_tokens": self.length, "spans": spans}))
        return spans

    def _computed(self, text: str | Tensor) -> list[Span]:
        if isinstance(text, str):
            listed, spans = encode(self.tokenizer, text, special=True)
            ids = torch.tensor(listed)
        else:
            ids, spans = text, [(i, i + 1) for i in range(len(text))]
        self.length = len(ids)
        if self.length and int(ids.max()) >= self.reference.config.vocab_size:
            raise ValueError(
                f"token id {int(ids.max())} is unknown to the reference {self.name} (vocabulary of "
                f"{self.reference.config.vocab_size}): pass its own reference_tokenizer"
            )
        return merge([spans[i] for i in key_positions(self.reference, ids, self.settings)])


def key_positions(reference: Model, ids: Int[Tensor, " token"], settings: Settings) -> list[int]:
    """Positions of the key tokens among the reference's own tokens; the first `trunc_len` are never key.

    The truncated context of a token begins at the last multiple of `sliding_window` that leaves it at least
    `trunc_len` tokens.
    """
    keep, step = settings.trunc_len, settings.sliding_window
    if len(ids) <= keep:
        return []
    # Streaming only needs pieces that fit in memory; their size does not change the losses.
    full = streamed_losses(reference, ids[None], block_size_of(reference))[0]
    found: list[bool] = []
    whole = (len(ids) - keep) // step
    stacked = ids.unfold(0, keep + step, step).split(_together(reference, step)) if whole else ()
    for windows in (*stacked, ids[None, whole * step :]):
        scored = windows.shape[1] - keep
        if scored == 0:
            break  # the whole windows have left nothing over
        first = keep + len(found)
        short = last_losses(reference, windows, scored).flatten()
        long = full[first - 1 : first - 1 + len(short)]
        found += ((short - long > settings.alpha) & (long < -settings.beta)).tolist()
    return [keep + i for i, key in enumerate(found) if key]


def _together(reference: Model, scored: int) -> int:
    """Windows of one call, so that their logits stay below 2 GiB in float32."""
    return max(1, 2**29 // (scored * reference.config.vocab_size))


def transformers_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer of transformers inside one of `elastic_memory.data`, or what came."""
    return getattr(tokenizer, "tokenizer", tokenizer)


def _record(index: int, document: str, losses: Float[Tensor, " prediction"], keys: list[int], length: int) -> Record:
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


def _summary(records: list[Record], settings: Settings, reference: str) -> LongPerplexity:
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
        protocol=", ".join(
            [
                f"reference={reference}",
                f"K={settings.trunc_len}",
                f"w={settings.sliding_window}",
                f"alpha={settings.alpha:g}",
                f"beta={settings.beta:g}",
                f"keys={key_tokens} in {len(records)} texts",
            ]
        ),
    )


def _check_length(longest: int, settings: Settings) -> None:
    if longest <= settings.trunc_len:
        raise ValueError(
            f"no text is longer than trunc_len = {settings.trunc_len} reference tokens (the longest has {longest}), so "
            "no token can be a key token: choose a smaller trunc_len, for instance Settings.scaled(length)"
        )


def _need(tokenizer: Any, what: str) -> None:
    if tokenizer is None:
        raise ValueError(f"{what}: the evaluated model's tokenizer is needed")
