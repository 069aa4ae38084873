"""`elastic generate`."""

from pathlib import Path
from typing import Annotated

import typer


def generate(
    checkpoint: Annotated[str, typer.Argument(help="A run folder, a model folder, or a name on the hub.")],
    prompt_file: Annotated[Path | None, typer.Option(help="Text to read first, of any length.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to read after the file, if there is one.")] = None,
    memory: Annotated[
        Path | None, typer.Option(help="Memory file: read first if it exists, written when done.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens of this total probability.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the choice among tokens.")] = 0,
    sampling: Annotated[str | None, typer.Option(help="Read the memory with another sampling than trained.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer, if none lies beside the checkpoint.")] = None,
    force: Annotated[bool, typer.Option(help="Accept a memory file of other weights of equal shape.")] = False,
) -> None:
    """Continue a text of any length, in constant memory.

    Reads the prompt block by block, then writes what the model says next to standard output. With --memory the state is
    kept in a file of a few MiB, so that a book is read once and asked about many times:

        elastic generate runs/my-model --prompt-file book.txt --memory book.memory.safetensors --tokens 0

        elastic generate runs/my-model --memory book.memory.safetensors --prompt "In the end"
    """
    import torch
    from transformers import TextStreamer

    from elastic_memory.data import load_tokenizer
    from elastic_memory.evaluation.loading import check_tokenizer, load_model, tokenizer_of
    from elastic_memory.model import MemoryCache

    if tokens < 0 or not temperature >= 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"tokens={tokens}, temperature={temperature}, top_p={top_p}: give >= 0, >= 0 and 0 < top_p <= 1"
        )
    if memory and (memory.is_dir() or not memory.absolute().parent.is_dir()):
        raise ValueError(f"--memory {memory}: give a file, in a folder that exists")
    text = _read(prompt_file) + (prompt or "")
    model = load_model(checkpoint)
    encoder = load_tokenizer(tokenizer) if tokenizer else tokenizer_of(checkpoint)
    if encoder is None:
        raise ValueError(f"{checkpoint} has no tokenizer beside it: name one with --tokenizer")
    if encoder.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"tokenizer {encoder.name} has {encoder.vocab_size} tokens, the model {model.config.vocab_size}"
        )
    check_tokenizer(checkpoint, encoder, f"--tokenizer {tokenizer}" if tokenizer else "the copy beside it")
    if sampling:
        model.set_retrieval(sampling=sampling)
    static = model.device.type == "cuda" and getattr(model.config, "local_attention", "block") != "full"
    if memory and memory.exists():
        cache = MemoryCache.load(memory, model, force=force, static=static)
    else:
        cache = MemoryCache(model, static=static)
    if cache.batch > 1:
        raise ValueError(f"{memory} holds {cache.batch} rows: this command continues one")
    if not text and not cache.columns:
        raise ValueError("nothing to continue: give --prompt-file, --prompt, or a --memory that exists")
    if text:
        _feed(model, cache, torch.tensor(encoder.encode(text).astype("int64"))[None].to(model.device))
    if tokens:
        torch.manual_seed(seed)
        # The newest token is read again, for its logits; the mask says that it is new to the cache.
        newest = cache.tokens[:, cache.opened[0] - 1 : cache.opened[0]]  # type: ignore[index]
        cache.rollback(1)
        written = model.generate(
            newest,
            attention_mask=newest.new_ones(1, cache.columns + 1),
            past_key_values=cache,
            max_new_tokens=tokens,
            do_sample=temperature > 0,
            pad_token_id=0,
            streamer=TextStreamer(_Decoder(encoder), skip_prompt=True),  # type: ignore[arg-type]
            **({"temperature": temperature, "top_p": top_p} if temperature > 0 else {}),
        )
        model(written[:, -1:], past_key_values=cache)  # the last one, too, belongs to what was said
    if memory:
        cache.save(memory)
        typer.echo(f"{memory}: {cache.clock[0]:,} tokens in {memory.stat().st_size / 2**20:.2f} MiB", err=True)


class _Decoder:
    """What a streamer asks of a tokenizer."""

    def __init__(self, encoder) -> None:  # type: ignore[no-untyped-def]
        self.encoder = encoder

    def decode(self, ids, **_) -> str:  # type: ignore[no-untyped-def]
        return self.encoder.decode(ids)


def _read(path: Path | None) -> str:
    if path is None:
        return ""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give a file of text")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None


def _feed(model, cache, ids) -> None:  # type: ignore[no-untyped-def]
    """Read the prompt, with a progress bar where that takes a while."""
    from rich.console import Console
    from rich.progress import Progress

    from elastic_memory.model.cache import AT_ONCE

    # Standard output is for what the model says.
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=ids.shape[1])
        for piece in ids.split(AT_ONCE, dim=1):
            model(piece, past_key_values=cache, logits_to_keep=1)
            progress.advance(task, piece.shape[1])
