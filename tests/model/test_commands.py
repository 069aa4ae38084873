"""`elastic generate` and `elastic selfcheck`, as a user calls them."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

import elastic_memory as em
from elastic_memory.cli import app
from elastic_memory.data import load_tokenizer
from elastic_memory.evaluation import selfcheck


def generate(*arguments):
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def continuation(checkpoint, prompt, tokens):
    model = em.MemoryLlamaForCausalLM.from_pretrained(checkpoint).eval()
    ids = torch.tensor([list(prompt.encode())])
    written = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    return load_tokenizer("bytes").decode(written.tolist())


def test_it_continues_a_text(checkpoint, tmp_path):
    (tmp_path / "book.txt").write_text("Once upon a time, café\n", encoding="utf-8")
    out = generate(
        checkpoint, "--prompt-file", tmp_path / "book.txt", "--prompt", "aa", "--tokens", 20, "--temperature", 0
    )
    assert out == continuation(checkpoint, "Once upon a time, café\naa", 20) + "\n"
    assert generate(checkpoint, "--prompt", "aa", "--tokens", 9, "--temperature", 0) == (
        continuation(checkpoint, "aa", 9) + "\n"
    )


def test_another_tokenizer_than_trained_with_is_refused(checkpoint, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    generate(model, "--prompt", "aa", "--tokens", 1)
    (model / "training.json").write_text(json.dumps({"tokenizer": "0" * 64}))
    with pytest.raises(ValueError, match="was trained with tokenizer 000000000000, but the copy beside it has"):
        generate(model, "--prompt", "aa", "--tokens", 1)


@pytest.mark.parametrize("read", ["a", "aa", "12345678", "123456789", "a book of many blocks"])
def test_a_memory_file_holds_all_that_was_read_and_written(read, checkpoint, tmp_path):
    memory = ("--memory", tmp_path / "memory", "--keep", "--temperature", 0)
    assert generate(checkpoint, "--prompt", read, "--tokens", 0, *memory) == ""
    generate(checkpoint, "--prompt", "!", "--tokens", 7, *memory)
    generate(checkpoint, "--tokens", 6, *memory)
    model = em.MemoryLlamaForCausalLM.from_pretrained(checkpoint).eval()
    ids = torch.tensor([list(f"{read}!".encode())])
    expected = model.generate(ids, max_new_tokens=13, do_sample=False, pad_token_id=0)
    cache = em.MemoryCache.load(tmp_path / "memory", model)
    assert cache.clock == [expected.shape[1]]
    assert cache.holds(expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "nothing to continue"),
        (["--prompt", "x", "--keep"], "--keep without --memory"),
        (["--prompt", "x", "--memory", "new"], "nothing would be kept in new"),
        (["--prompt", "x", "--memory", "new", "--tokens", 0], "--tokens 0 only reads into --memory: give it, and"),
        (["--prompt", "x", "--tokens", 0], "--tokens 0 only reads into --memory: give it, and"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["--prompt", "x", "--tokens", -1], "--tokens -1: give 0 or more"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature nan: give 0 or more"),
        (["--prompt", "x", "--memory", "nowhere/memory"], "folder that exists"),
        (["--prompt", "x", "--memory", "."], "give a file"),
        (["--prompt-file", "."], "is a folder"),
        (["--prompt", "x", "--sampling", "unifrom"], "uniform"),
    ],
)
def test_bad_input(arguments, message, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        generate(checkpoint, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_generating_nothing_from_a_memory_file_is_refused(checkpoint, tmp_path):
    memory = ("--memory", tmp_path / "memory", "--tokens", 0)
    generate(checkpoint, "--prompt", "a book", "--keep", *memory)
    for more in ((), ("--keep",), ("--prompt", "x")):
        with pytest.raises(ValueError, match="--tokens 0 only reads into --memory"):
            generate(checkpoint, *memory, *more)


def test_texts_and_memory_files_that_are_none(checkpoint, tmp_path):
    (tmp_path / "noise").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="not UTF-8"):
        generate(checkpoint, "--prompt-file", tmp_path / "noise")
    with pytest.raises(ValueError, match="not a memory file"):
        generate(checkpoint, "--prompt", "x", "--keep", "--memory", tmp_path / "noise")
    model = em.MemoryLlamaForCausalLM.from_pretrained(checkpoint).eval()
    cache = em.MemoryCache(model)
    model(torch.ones(2, 5, dtype=torch.long), past_key_values=cache)
    cache.save(tmp_path / "rows")
    with pytest.raises(ValueError, match="2 rows"):
        generate(checkpoint, "--prompt", "x", "--keep", "--memory", tmp_path / "rows")


def test_selfcheck_needs_a_device():
    result = CliRunner().invoke(app, ["selfcheck", "--device", "abacus"])
    assert isinstance(result.exception, ValueError) and "abacus" in str(result.exception)


def test_selfcheck_finds_nothing_here():
    found = {name: (error, bound) for name, error, bound in selfcheck.checks("cpu")}
    assert len(found) > 40
    assert {name: error for name, (error, bound) in found.items() if not error <= bound} == {}


def test_selfcheck_finds_what_is_wrong(monkeypatch):
    """Memory written from the wrong tokens in a stream."""
    write = em.memory.MEMORIES["elastic"].write
    monkeypatch.setattr(
        em.memory.MEMORIES["elastic"], "write", lambda self, state, block, seen: write(self, state, block, seen + 8)
    )
    monkeypatch.setattr(em.memory, "MEMORIES", {"elastic": em.memory.MEMORIES["elastic"]})
    found = {name: error <= bound for name, error, bound in selfcheck.checks("cpu")}
    assert not found["elastic: streamed = one call"]
    assert not found["elastic: padded = alone"]
    assert found["elastic: causal: later tokens change nothing"]
