"""`elastic generate`: continue a text of any length, with what was read kept in a memory file."""

import codecs
import hashlib
import io
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from elastic_memory.commands.options import check_range, refuse_unused

if TYPE_CHECKING:
    import numpy as np

    from elastic_memory.data.tokenizers import Tokenizer
    from elastic_memory.model import MemoryCache

CHUNK = 1 << 20  # bytes of text held in RAM at a time
READ = 1 << 17  # tokens given to the cache at a time, whose blocks it reads in parallel

Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 always takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")]


def generate(
    checkpoint: Annotated[str, typer.Argument(help="A run folder, a model folder, or a name on the hub.")],
    prompt_file: Annotated[Path | None, typer.Option(help="UTF-8 text to read first, of any length.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; read after --prompt-file.")] = None,
    memory: Annotated[
        Path | None, typer.Option(help="Memory file: loaded if it exists, saved after reading --prompt-file.")
    ] = None,
    keep: Annotated[bool, typer.Option(help="Also save --prompt and the generated text to --memory.")] = False,
    tokens: Annotated[int, typer.Option(help="Number of tokens to generate; 0 only reads into --memory.")] = 200,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    seed: Annotated[int, typer.Option(help="Random seed of the sampled tokens.")] = 0,
    sampling: Annotated[
        str | None, typer.Option(help="Where the memory is read, if not as trained: uniform, exponential, ...")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer, if the checkpoint has none.")] = None,
    force: Annotated[
        bool, typer.Option(help="Load a memory file made by a model of the same shape with other weights.")
    ] = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Continue a text of any length, in constant memory.

    Reads --prompt-file, then --prompt, and writes the model's continuation to standard output. With --memory a book is
    read once and kept as a file of a few MiB; later calls continue it or ask about it, as often as you like:

        elastic generate MODEL --prompt-file book.txt --tokens 0 \\
          --memory book.memory.safetensors

        elastic generate MODEL --memory book.memory.safetensors --prompt "The end"

    Prompts and answers do not change the memory file without --keep. A text that it already holds is not read again.
    """
    check_range(0, tokens=tokens, temperature=temperature)
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p {top_p}: give more than 0, at most 1")
    _check_files(prompt_file, prompt, memory, keep, tokens)
    if not temperature:
        refuse_unused(context, "with --temperature 0", "top_p", "seed")
    if not memory or not memory.exists():
        refuse_unused(context, "without a --memory that exists", "force")
    digest = _digest(prompt_file) if prompt_file and prompt_file.is_file() else None  # a pipe can be read only once
    model, encoder = load(checkpoint, tokenizer, sampling)
    store, cache = (_Store(memory) if memory else None), _cache(model, memory, force)
    if prompt_file:
        cache = _read(model, cache, encoder, prompt_file, store, digest)
    if not prompt and not cache.columns:
        raise ValueError("nothing to continue: give --prompt-file, --prompt, or a --memory that exists")
    asked = cache.fork() if memory and not keep else cache
    try:
        if prompt:
            _feed(model, asked, (ids for _, ids in encoded([prompt], encoder, "--prompt")))
        if tokens:
            if not asked.opened[0]:
                raise ValueError(f"{memory} ends with a block that was closed: give --prompt to start a new one")
            chosen = {"temperature": temperature, "top_p": top_p} if temperature > 0 else {}
            _generate(model, asked, encoder, seed, max_new_tokens=tokens, do_sample=temperature > 0, **chosen)
    finally:
        if keep and store:
            store.save(asked)


def _check_files(prompt_file: Path | None, prompt: str | None, memory: Path | None, keep: bool, tokens: int) -> None:
    """Refuse options that cannot work or would have no effect, before a model is loaded."""
    if keep and not memory:
        raise ValueError("--keep without --memory: name the file to save prompt and answer to")
    if memory and (memory.is_dir() or not memory.absolute().parent.is_dir()):
        raise ValueError(f"--memory {memory}: give a file, in a folder that exists")
    if prompt_file and prompt_file.is_dir():
        raise ValueError(f"{prompt_file} is a folder: give a file of text")
    if prompt_file and not prompt_file.exists():
        raise FileNotFoundError(f"{prompt_file}: no such file")
    exists = memory is not None and memory.exists()
    if not prompt_file and not prompt and not exists:
        raise ValueError("nothing to continue: give --prompt-file, --prompt, or a --memory that exists")
    if not tokens and not (memory and (prompt_file or (prompt and keep))):
        raise ValueError("--tokens 0 only reads into --memory: give it, and --prompt-file, or --prompt with --keep")
    if memory and not prompt_file and not keep and not exists:
        raise ValueError(
            f"nothing would be kept in {memory}: give the text to read as --prompt-file, or --keep to save --prompt"
        )


def load(checkpoint: str, tokenizer: str | None, sampling: str | None = None) -> "tuple[Any, Tokenizer]":
    """The model and its tokenizer, if they fit and the model has a memory."""
    from elastic_memory.data import load_tokenizer
    from elastic_memory.evaluation.loading import check_tokenizer, load_model, tokenizer_of
    from elastic_memory.model.modeling import MemoryCausalLM

    model = load_model(checkpoint)
    if not isinstance(model, MemoryCausalLM):
        raise ValueError(
            f"{checkpoint} is a {type(model).__name__} without memory: give it one with elastic attach {checkpoint}"
        )
    encoder = load_tokenizer(tokenizer) if tokenizer else tokenizer_of(checkpoint)
    if encoder is None:
        raise ValueError(f"{checkpoint} has no tokenizer: name one with --tokenizer")
    if encoder.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"tokenizer {encoder.name} has {encoder.vocab_size} tokens, the model {model.config.vocab_size}"
        )
    check_tokenizer(checkpoint, encoder, f"--tokenizer {tokenizer}" if tokenizer else "the copy beside it")
    if sampling:
        model.set_retrieval(sampling=sampling)
    return model, encoder


def _cache(model: Any, memory: Path | None, force: bool) -> "MemoryCache":
    """The cache of the memory file, or an empty one if there is no file yet."""
    from elastic_memory.model import MemoryCache

    if not memory or not memory.exists():
        return MemoryCache(model)
    cache = MemoryCache.load(memory, model, force=force)
    if cache.batch > 1:
        raise ValueError(f"{memory} holds {cache.batch} rows: this command continues one")
    if cache.tokens is None:
        raise ValueError(f"{memory} was made from embeddings, whose tokens are unknown: this command continues text")
    return cache


def _read(
    model: Any, cache: "MemoryCache", encoder: "Tokenizer", path: Path, store: "_Store | None", digest: str | None
) -> "MemoryCache":
    """The cache after reading a text, saved to `store`; or `cache` itself, if it has read that text already."""
    from elastic_memory.common.progress import Bars

    hashed = hashlib.blake2b(digest_size=16)
    reading = cache.fork()
    if digest not in cache.texts:
        # Standard output is for the generated text only.
        with Bars(transient=True) as progress, path.open("rb") as file:
            task = progress.add_task("reading", total=path.stat().st_size if path.is_file() else None, unit="bytes")
            texts = chunks(file, path, hashed)

            def pieces() -> "Iterator[np.ndarray]":
                for text, ids in encoded(texts, encoder, str(path)):
                    yield ids
                    progress.advance(task, len(text.encode()))

            _feed(model, reading, pieces())
        digest = hashed.hexdigest()
    if digest in cache.texts:
        typer.echo(f"{path} is in {store.path if store else 'memory'} already: not read again", err=True)
        return cache
    reading.note_text(digest)
    if store and reading.columns:
        store.save(reading)
    return reading


def _feed(model: Any, cache: "MemoryCache", pieces: "Iterable[np.ndarray]") -> None:
    """Read tokens that come in pieces, `READ` at a time."""
    import torch

    held: list[int] = []

    def read(count: int) -> None:
        cache.read(torch.tensor([held[:count]], device=model.device))
        del held[:count]

    for piece in pieces:
        held += piece.tolist()
        while len(held) >= READ:
            read(READ)
    if held:
        read(len(held))


def _generate(model: Any, cache: "MemoryCache", encoder: "Tokenizer", seed: int, **options: Any) -> None:
    """Generate and print token by token. Even if interrupted, the cache has read all that was printed."""
    import torch
    from transformers import TextStreamer

    class Printer(TextStreamer):
        """Prints tokens and keeps their ids; of a tokenizer it needs only what `_Decoder` has."""

        def __init__(self) -> None:
            super().__init__(_Decoder(encoder), skip_prompt=True)  # type: ignore[arg-type]
            self.ids: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            if not self.next_tokens_are_prompt:
                self.ids += value.flatten().tolist()
            super().put(value)

    torch.manual_seed(seed)
    printer, began = Printer(), time.perf_counter()
    # `generate` needs the logits of the newest token, so the cache forgets it and reads it again.
    newest = cache.tokens[:, cache.opened[0] - 1 : cache.opened[0]].clone()  # type: ignore[index]
    cache.rollback(1)
    start = cache.clock[0]
    try:
        mask = newest.new_ones(1, cache.columns + 1)
        rest = {"attention_mask": mask, "past_key_values": cache, "pad_token_id": 0, "streamer": printer}
        model.generate(newest, **rest, **options)
    except BaseException:
        printer.end()
        raise
    finally:
        taken = time.perf_counter() - began
        unread = [int(newest), *printer.ids][cache.clock[0] - start :]
        if unread:
            model(newest.new_tensor([unread]), past_key_values=cache, logits_to_keep=1)
        count = len(printer.ids)
        typer.echo(f"{count:,} tokens in {taken:.1f} s, {count / taken:,.0f} tokens/s", err=True)


class _Store:
    """The memory file, which is saved only if no other command has changed it since it was found."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, _version(path)

    def save(self, cache: "MemoryCache") -> None:
        if _version(self.path) != self.found:
            raise ValueError(
                f"{self.path} was changed by another command meanwhile: nothing was saved, repeat this one"
            )
        cache.save(self.path)
        self.found = _version(self.path)
        size = self.path.stat().st_size / 2**20
        typer.echo(f"{self.path}: {cache.clock[0]:,} tokens in {size:.2f} MiB", err=True)


def _version(path: Path) -> tuple[int, ...] | None:
    """Inode, time and size, which change when a file is replaced or written; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class _Decoder:
    """The part of a tokenizer that a streamer uses."""

    def __init__(self, encoder: "Tokenizer") -> None:
        self.encoder = encoder

    def decode(self, ids: Iterable[int], **_: Any) -> str:
        return self.encoder.decode(ids)


def encoded(texts: Iterable[str], encoder: "Tokenizer", name: str) -> "Iterator[tuple[str, np.ndarray]]":
    """Pieces of a text with their tokens; together they are the tokens of the whole text."""
    from elastic_memory.data.tokenizers import Skip, encode, pieces

    try:
        for piece in pieces(texts, encoder):
            yield piece.text, encode(piece, encoder)
    except Skip as reason:
        raise ValueError(f"{name}: {reason}: without white space it cannot be read in pieces") from None


def chunks(file: BinaryIO, path: Path, hashed: Any) -> Iterator[str]:
    """A UTF-8 text in pieces, with newlines as in Python; `hashed` is updated with all of it."""
    lines, done = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True), 0
    while True:
        chunk = file.read(CHUNK)
        try:
            text = lines.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            place = done - (len(error.object) - len(chunk)) + error.start
            raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {place})") from None
        done += len(chunk)
        hashed.update(text.encode())
        yield text
        if not chunk:
            return


def _digest(path: Path) -> str:
    """The digest that identifies a text."""
    hashed = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for _ in chunks(file, path, hashed):
            pass
    return hashed.hexdigest()
