"""`elastic memory`, as a user calls it."""

import shutil

import pytest
import torch
from typer.testing import CliRunner

import elastic_memory as em
from elastic_memory.cli import app
from elastic_memory.commands import memory as command
from elastic_memory.data import load_tokenizer
from tests.conftest import small_model

TEXTS = {
    "one": "It was a dark and stormy night; the rain fell in torrents.\n" * 3,
    "two": "Call me Ishmael. Some years ago, never mind how long precisely.",
    "three": "Once upon a time, café\n",
}


@pytest.fixture
def books(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    return [tmp_path / f"{name}.txt" for name in TEXTS]


def memory(*arguments):
    result = CliRunner().invoke(app, ["memory", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def ids_of(*names):
    return torch.tensor([list("".join(TEXTS[name] for name in names).encode())])


def file_of(folder, name):
    return folder / f"{name}.memory.safetensors"


def in_order(model, *texts):
    cache = em.MemoryCache(model)
    for text in texts:
        cache.close()
        model(torch.tensor([list(text.encode())]), past_key_values=cache)
    return cache


@torch.no_grad()
def next_logits(model, cache):
    return model(torch.tensor([list(b"and then?")]), past_key_values=cache.fork()).logits


@pytest.mark.parametrize("processes", [1, 2])
def test_read_join_show(processes, checkpoint, books, tmp_path):
    out = tmp_path / "memories"
    said = memory("read", *books, "--model", checkpoint, "--out", out, "--processes", processes)
    model = em.MemoryLlamaForCausalLM.from_pretrained(checkpoint).eval()
    for name in TEXTS:
        cache = em.MemoryCache.load(file_of(out, name), model)
        assert cache.holds(ids_of(name))
        assert cache.name == name
        assert f"{file_of(out, name)}: {len(TEXTS[name].encode()):,} tokens in" in said
    order = ["two", "three", "one"]
    book = file_of(tmp_path, "book")
    said = memory("join", *(file_of(out, name) for name in order), "--out", book)
    assert f"3 files, {sum(len(text.encode()) for text in TEXTS.values())} tokens in" in said
    joined = em.MemoryCache.load(book, model)
    assert joined.holds(ids_of(*order))
    expected = next_logits(model, in_order(model, *(TEXTS[name] for name in order)))
    torch.testing.assert_close(next_logits(model, joined), expected, atol=1e-4, rtol=0)

    shown = memory("show", book, file_of(out, "one"))
    assert f"{book}: " in shown and "ElasticMemory in layer 1" in shown and str(checkpoint) in shown
    assert "part   1            63  two" in shown and "part   3           177  one" in shown
    assert "block attention, 8 tokens" in shown and "KiB, checksum ok" in shown


def test_only_what_changed_is_read_again(checkpoint, books, tmp_path, monkeypatch):
    out = tmp_path / "memories"
    arguments = ("read", *books, "--model", checkpoint, "--out", out)
    memory(*arguments)
    before = {name: file_of(out, name).stat().st_mtime_ns for name in TEXTS}
    books[1].write_text("Call me Ahab. Some years ago, never mind how long precisely.")
    said = memory(*arguments)
    assert said.count("up to date") == 2
    changed = {name for name in TEXTS if file_of(out, name).stat().st_mtime_ns != before[name]}
    assert changed == {"two"}
    file_of(out, "three").unlink()  # as after an interruption
    assert memory(*arguments).count("up to date") == 2
    books[0].write_text(TEXTS["one"] + "more")  # what was read is only the beginning of this
    assert memory(*arguments).count("up to date") == 2


def test_one_bad_text_is_named_and_the_others_are_read(checkpoint, books, tmp_path):
    books[1].write_bytes(b"\xff\xfe")
    (tmp_path / "empty.txt").write_text("")
    out = tmp_path / "memories"
    with pytest.raises(ValueError, match=r"2 of 4 texts were not read: .*two\.txt is not UTF-8.*empty\.txt is empty"):
        memory("read", *books, tmp_path / "empty.txt", "--model", checkpoint, "--out", out)
    assert sorted(path.name for path in out.iterdir()) == ["one.memory.safetensors", "three.memory.safetensors"]


def test_a_bad_part_is_named_and_nothing_is_lost(checkpoint, books, tmp_path):
    out, book = tmp_path / "memories", tmp_path / "book"
    memory("read", *books, "--model", checkpoint, "--out", out)
    files = [file_of(out, name) for name in TEXTS]
    memory("join", *files, "--out", book)
    kept = book.read_bytes()
    whole = files[1].read_bytes()

    def refused(says, *arguments):
        with pytest.raises((ValueError, FileNotFoundError), match=says):
            memory(*arguments)
        assert book.read_bytes() == kept
        assert all(path.exists() for path in files)

    files[1].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(f"{files[1]}: damaged", "join", *files, "--out", book)
    refused(f"{files[1]}: damaged", "show", files[1])
    refused(f"{files[1]}: damaged.*; delete it to have", "read", *books, "--model", checkpoint, "--out", out)
    files[1].write_bytes(whole)
    refused("not a memory file", "join", files[0], books[0], "--out", book)
    refused("nowhere", "join", files[0], tmp_path / "nowhere", "--out", book)
    other = tmp_path / "other"
    load_tokenizer("bytes").save(other)
    small_model(vocab_size=256, eos_token_id=None, seed=1).save_pretrained(other)
    refused("other weights", "join", *files, "--out", book, "--model", other)
    shutil.copy(books[0], tmp_path / "new.txt")
    memory("read", tmp_path / "new.txt", "--model", other, "--out", out)
    refused("new.memory.safetensors: made with other weights", "join", *files, file_of(out, "new"), "--out", book)


def test_what_does_not_fit_is_refused(checkpoint, books, tmp_path):
    def refused(says, *arguments):
        with pytest.raises(ValueError, match=says):
            memory(*arguments)

    (tmp_path / "more").mkdir()
    shutil.copy(books[0], tmp_path / "more" / "one.md")
    read = ("--model", checkpoint, "--out", tmp_path / "memories")
    refused("would both be written to", "read", books[0], tmp_path / "more" / "one.md", *read)
    refused("not a file of text", "read", tmp_path / "nowhere.txt", *read)
    refused("--processes 0: give 1 or more", "read", books[0], *read, "--processes", 0)
    memory("read", books[0], *read)
    refused("in a folder that exists", "join", file_of(tmp_path / "memories", "one"), "--out", tmp_path)
    model = em.MemoryLlamaForCausalLM.from_pretrained(checkpoint)
    model.config._name_or_path = "somebody/else"
    cache = em.MemoryCache(model)
    cache.read(ids_of("two"))
    cache.save(tmp_path / "foreign")
    refused("made by the model 'somebody/else', which is no folder here", "join", tmp_path / "foreign", "--out", "x")


def test_generate_goes_on_from_such_files(checkpoint, books, tmp_path):
    memory("read", *books, "--model", checkpoint, "--out", tmp_path)
    memory("join", *(file_of(tmp_path, name) for name in TEXTS), "--out", tmp_path / "book")

    def generate(*arguments):
        result = CliRunner().invoke(app, ["generate", str(checkpoint), "--tokens", "3", *map(str, arguments)])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    assert generate("--memory", tmp_path / "book", "--prompt", "and then?")
    said = generate("--memory", tmp_path / "book", "--prompt-file", books[1])
    assert f"{books[1]} is in {tmp_path / 'book'} already: not read again" in said
    model = em.MemoryLlamaForCausalLM.from_pretrained(checkpoint).eval()
    cache = em.MemoryCache.load(tmp_path / "book", model)
    cache.close()
    cache.save(tmp_path / "closed")
    assert generate("--memory", tmp_path / "closed", "--prompt", "and then?")
    with pytest.raises(ValueError, match="ends with a block that was closed: give --prompt"):
        generate("--memory", tmp_path / "closed")


def test_a_long_text_is_read_in_pieces(checkpoint, books, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "READ", 37)
    memory("read", books[0], "--model", checkpoint, "--out", tmp_path)
    model = em.MemoryLlamaForCausalLM.from_pretrained(checkpoint).eval()
    cache = em.MemoryCache.load(file_of(tmp_path, "one"), model)
    assert cache.holds(ids_of("one"))
    expected = next_logits(model, in_order(model, TEXTS["one"]))
    torch.testing.assert_close(next_logits(model, cache), expected, atol=1e-4, rtol=0)


def test_a_join_does_not_replace_one_of_its_parts(tmp_path):
    """Run twice, `join *.memory.safetensors --out all.memory.safetensors` would count every text twice."""
    path = tmp_path / "all.memory.safetensors"
    path.write_bytes(b"a memory")
    with pytest.raises(ValueError, match=r"--out .* is one of the files to join, which would be replaced"):
        memory("join", tmp_path / "one.memory.safetensors", path, "--out", tmp_path / ".." / tmp_path.name / path.name)
    assert path.read_bytes() == b"a memory"


def test_a_file_is_no_folder_for_memory_files(books, tmp_path):
    with pytest.raises(ValueError, match=r"--out .*one\.txt is a file: name a folder"):
        memory("read", books[1], "--model", "nowhere", "--out", books[0])
