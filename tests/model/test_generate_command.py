"""`elastic generate`: reading and asking are two things, a text is read once, in pieces, and nothing is lost."""

import os
import threading

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import elastic_memory as em
from elastic_memory.cli import app
from elastic_memory.commands import generate as command
from elastic_memory.data import load_tokenizer, tokenizers
from tests.conftest import small_model
from tests.data.conftest import byte_level, sentencepiece_like

BOOK = "Once upon a time there was a café, and in it a cat.\n" * 40


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text(BOOK, encoding="utf-8")
    return tmp_path / "book.txt"


def run(*arguments):
    result = CliRunner().invoke(app, ["generate", *map(str, arguments), "--temperature", "0"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def held(checkpoint, memory):
    return em.MemoryCache.load(memory, em.MemoryLlamaForCausalLM.from_pretrained(checkpoint).eval())


def ids_of(text):
    return torch.tensor([list(text.encode())])


def test_questions_do_not_change_the_memory(checkpoint, book, tmp_path):
    memory = tmp_path / "memory"
    first = run(checkpoint, "--prompt-file", book, "--memory", memory, "--prompt", "Who?", "--tokens", 9)
    read = memory.read_bytes()
    assert held(checkpoint, memory).clock == [len(BOOK.encode())]
    for _ in range(2):
        assert run(checkpoint, "--memory", memory, "--prompt", "Who?", "--tokens", 9).stdout == first.stdout
    other = run(checkpoint, "--memory", memory, "--prompt", "Where?", "--tokens", 9)
    assert other.stdout != first.stdout
    run(checkpoint, "--memory", memory, "--tokens", 9)
    assert memory.read_bytes() == read
    whole = run(checkpoint, "--prompt-file", book, "--prompt", "Who?", "--tokens", 9)
    assert whole.stdout == first.stdout


@pytest.mark.parametrize("kept", [False, True])
def test_a_text_is_read_once(kept, checkpoint, book, tmp_path):
    """By the same command again, with questions kept in between, under another name, and through a pipe."""
    memory, other = tmp_path / "memory", tmp_path / "same.txt"
    os.link(book, other)
    reading = ["--memory", memory, "--tokens", 0]
    run(checkpoint, "--prompt-file", book, *reading)
    if kept:
        run(checkpoint, "--memory", memory, "--keep", "--prompt", "Who?", "--tokens", 9)
    before = memory.read_bytes()
    for path in (book, other):
        again = run(checkpoint, "--prompt-file", path, *reading)
        assert f"{path} is in {memory} already" in again.stderr
        assert memory.read_bytes() == before
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text(BOOK, encoding="utf-8"))
    writer.start()
    assert "already" in run(checkpoint, "--prompt-file", tmp_path / "pipe", *reading).stderr
    writer.join()
    assert memory.read_bytes() == before
    (tmp_path / "more.txt").write_text("And then?")
    run(checkpoint, "--prompt-file", tmp_path / "more.txt", *reading)
    assert held(checkpoint, memory).clock == [len(BOOK.encode()) + 13 * kept + 9]
    assert "already" in run(checkpoint, "--prompt-file", book, *reading).stderr


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("kept", [False, True])
def test_an_interrupt_while_generating_loses_nothing(kept, after, checkpoint, book, tmp_path, monkeypatch):
    """The reading is on disk; what was said so far, too, if it is to be kept."""
    memory, forward, calls = tmp_path / "memory", em.MemoryLlamaForCausalLM.forward, []

    def interrupted(self, *args, **kwargs):
        calls.append(kwargs)
        if len(calls) == before + after + 1:
            raise KeyboardInterrupt
        return forward(self, *args, **kwargs)

    run(checkpoint, "--prompt-file", book, "--memory", tmp_path / "alone", "--tokens", 0)
    monkeypatch.setattr(em.MemoryLlamaForCausalLM, "forward", interrupted)
    before = 10**9
    run(checkpoint, "--prompt-file", book, "--memory", tmp_path / "counted", "--tokens", 0)
    before, _ = len(calls), calls.clear()
    options = ["--prompt-file", book, "--memory", memory, "--tokens", 20, *(["--keep"] if kept else [])]
    result = CliRunner().invoke(app, ["generate", str(checkpoint), *map(str, options), "--temperature", "0"])
    assert result.exit_code != 0
    monkeypatch.undo()
    if not kept:
        assert memory.read_bytes() == (tmp_path / "alone").read_bytes()
        return
    model = em.MemoryLlamaForCausalLM.from_pretrained(checkpoint).eval()
    said = model.generate(ids_of(BOOK), max_new_tokens=max(after, 1), do_sample=False, pad_token_id=0)
    cache = em.MemoryCache.load(memory, model)
    assert cache.clock == [len(BOOK.encode()) + after]
    assert cache.holds(said)


def test_an_interrupt_while_reading_leaves_the_file_as_it_was(checkpoint, book, tmp_path, monkeypatch):
    memory, calls = tmp_path / "memory", []
    run(checkpoint, "--prompt-file", book, "--memory", memory, "--tokens", 0)
    before = memory.read_bytes()

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(em.MemoryCache, "read", interrupted)
    (tmp_path / "more.txt").write_text("And then?")
    result = CliRunner().invoke(
        app, ["generate", str(checkpoint), "--prompt-file", str(tmp_path / "more.txt"), "--memory", str(memory)]
    )
    assert calls and result.exit_code != 0
    assert memory.read_bytes() == before


@pytest.mark.parametrize("kind", [byte_level, sentencepiece_like, None])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_long_prompt_is_tokenised_in_pieces(kind, newline, tmp_path, monkeypatch):
    """Its tokens are those of the whole, and no piece is long."""
    from transformers import PreTrainedTokenizerFast

    model, text = tmp_path / "model", BOOK * 3 + "naïve — 漢字 🙂 " * 200
    if kind is None:
        load_tokenizer("bytes").save(model)
    else:
        PreTrainedTokenizerFast(tokenizer_object=kind()).save_pretrained(model)
    tokenizer = load_tokenizer(model)
    small_model(vocab_size=max(512, tokenizer.vocab_size), eos_token_id=None, block_size=64).save_pretrained(model)
    (tmp_path / "book.txt").write_bytes(text.replace("\n", newline).encode())
    monkeypatch.setattr(tokenizers, "PIECE", 300)
    monkeypatch.setattr("elastic_memory.commands.generate.CHUNK", 101)  # inside characters
    lengths, encode = [], type(tokenizer).encode
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text: lengths.append(len(text)) or encode(self, text))
    run(model, "--prompt-file", tmp_path / "book.txt", "--memory", tmp_path / "memory", "--tokens", 0)
    assert max(lengths) < 1000
    cache = held(model, tmp_path / "memory")
    whole = torch.tensor(encode(tokenizer, text).astype("int64"))[None]
    assert cache.clock == [whole.shape[1]]
    assert cache.holds(whole)


def test_texts_that_cannot_be_read(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "noise").write_bytes(b"fine " * 50 + "é".encode()[:1] + b" not")
    monkeypatch.setattr("elastic_memory.commands.generate.CHUNK", 100)
    with pytest.raises(ValueError, match=r"noise is not UTF-8 text \(invalid continuation byte at byte 250\)"):
        run(checkpoint, "--prompt-file", tmp_path / "noise")
    (tmp_path / "cut").write_bytes(b"fine " * 50 + "é".encode()[:1])
    with pytest.raises(ValueError, match=r"cut is not UTF-8 text \(unexpected end of data at byte 250\)"):
        run(checkpoint, "--prompt-file", tmp_path / "cut")
    monkeypatch.setattr(tokenizers, "PIECE", 20)
    monkeypatch.setattr(tokenizers, "UNBROKEN", 100)
    (tmp_path / "solid").write_text("a" * 1000)
    with pytest.raises(ValueError, match="solid: no place to cut"):
        run(checkpoint, "--prompt-file", tmp_path / "solid", "--memory", tmp_path / "memory")
    assert not (tmp_path / "memory").exists()
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="nothing to continue"):
        run(checkpoint, "--prompt-file", tmp_path / "empty")


def test_a_memory_that_was_fed_embeddings_is_named(checkpoint, tmp_path):
    model = em.MemoryLlamaForCausalLM.from_pretrained(checkpoint).eval()
    cache = em.MemoryCache(model)
    model(inputs_embeds=model.get_input_embeddings()(ids_of("abc")), past_key_values=cache)
    cache.save(tmp_path / "memory", exact=True)
    with pytest.raises(ValueError, match="embeddings"):
        run(checkpoint, "--memory", tmp_path / "memory")


def test_a_model_without_memory_is_named(tmp_path):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=256)
    load_tokenizer("bytes").save(tmp_path / "plain")
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM without memory: .*elastic attach"):
        run(tmp_path / "plain", "--prompt", "x")


def test_texts_that_were_read_are_a_short_list(model, ids, tmp_path):
    cache = em.MemoryCache(model)
    model(ids, past_key_values=cache)
    for number in range(3000):
        cache.note_text(f"{number:032x}")
    cache.save(tmp_path / "memory")
    loaded = em.MemoryCache.load(tmp_path / "memory", model)
    assert loaded.texts == cache.texts and len(cache.texts) == 1000
    assert f"{2999:032x}" in loaded.texts
    fork = cache.fork()
    fork.note_text("0" * 32)
    assert cache.texts == loaded.texts


@pytest.mark.parametrize("first", [True, False], ids=["new file", "old file"])
def test_what_another_command_saved_meanwhile_is_not_replaced(first, checkpoint, book, tmp_path, monkeypatch):
    """Two at once: the slower one used to replace the memory, and the text that the other had read was gone."""
    memory, other = tmp_path / "memory", tmp_path / "other.txt"
    other.write_text("Another text.")
    if not first:
        run(checkpoint, "--prompt", "Once", "--memory", memory, "--keep", "--tokens", 0)
    feed = command._feed

    def slow(*arguments):
        monkeypatch.setattr(command, "_feed", feed)
        run(checkpoint, "--prompt-file", other, "--memory", memory, "--tokens", 0)
        feed(*arguments)

    monkeypatch.setattr(command, "_feed", slow)
    with pytest.raises(ValueError, match="was changed by another command meanwhile: nothing was saved"):
        run(checkpoint, "--prompt-file", book, "--memory", memory, "--tokens", 0)
    assert held(checkpoint, memory).clock == [len("Another text.") + (0 if first else len("Once"))]
    run(checkpoint, "--prompt-file", book, "--memory", memory, "--tokens", 0)
    run(checkpoint, "--memory", memory, "--prompt", "And", "--keep", "--tokens", 3)  # saved twice by one command
