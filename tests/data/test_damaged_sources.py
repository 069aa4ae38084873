"""Sources that are damaged, hostile, or change between two runs."""

import json
import os

import pyarrow
import pyarrow.parquet as parquet
import pytest

from elastic_memory.data import parts, prepare, samples
from tests.data.conftest import tree
from tests.test_cli import call

TEXT = "one long document about the sea and its ships, "


def make(source, out, **options):
    return prepare(source, out, tokenizer="bytes", length=32, shares=(1, 0, 0), **options)


def write_cells(path, cells):
    """A column of text whose cells may be no text."""
    array = pyarrow.array(cells, pyarrow.binary())
    names = pyarrow.array([f"d{i}" for i in range(len(cells))])
    text = pyarrow.StringArray.from_buffers(len(array), array.buffers()[1], array.buffers()[2])
    parquet.write_table(pyarrow.table({"id": names, "text": text}), path)


def test_a_cell_that_is_not_utf8_is_counted_and_the_others_are_kept(tmp_path):
    good = (TEXT * 3).encode()
    write_cells(tmp_path / "a.parquet", [good, b"\xff\xfe" + good, good + b"!"])
    manifest = make(tmp_path / "a.parquet", tmp_path / "out")
    assert manifest["splits"]["train"]["documents"] == 2
    assert manifest["skipped"] == {"invalid UTF-8": 1}


def test_a_parquet_file_that_unpacks_to_thousands_of_times_its_size_is_refused(tmp_path, monkeypatch, capsys):
    path = tmp_path / "bomb.parquet"
    parquet.write_table(pyarrow.table({"text": ["a" * (32 << 20)] * 6}), path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 100_000
    code, _, said = call(
        monkeypatch, capsys, "prepare", str(path), "--tokenizer", "bytes", "--out", str(tmp_path / "o")
    )
    assert (code, said.count("\n")) == (2, 1), said
    assert "bomb.parquet" in said and "201,3" in said and "more than any text" in said
    assert not (tmp_path / "o").exists()


def test_text_that_repeats_itself_is_no_bomb(tmp_path):
    parquet.write_table(pyarrow.table({"text": [TEXT * 20000] * 4}), tmp_path / "a.parquet", compression="zstd")
    assert make(tmp_path / "a.parquet", tmp_path / "out")["splits"]["train"]["documents"] == 4


@pytest.mark.parametrize("place", [0.3, 0.5, 0.7])
def test_damaged_pages_are_one_line_that_names_the_file(tmp_path, monkeypatch, capsys, place):
    path = tmp_path / "a.parquet"
    texts = [os.urandom(300).hex() for _ in range(400)]
    parquet.write_table(pyarrow.table({"text": texts}), path, compression="zstd")
    content = bytearray(path.read_bytes())
    start = int(len(content) * place)
    content[start : start + 200] = bytes(200)
    path.write_bytes(content)
    arguments = ["prepare", str(path), "--tokenizer", "bytes", "--length", "32", "--out", str(tmp_path / "out")]
    code, _, said = call(monkeypatch, capsys, *arguments)
    last = said.strip().split("\n")[-1]
    assert code == 2 and last.startswith(f"elastic: {path} is damaged"), said
    assert "Traceback" not in said


@pytest.fixture(params=["text", "jsonl", "parquet"])
def source(request, tmp_path):
    """A source of two documents, and a way to replace it by one of the same size."""
    kind = request.param

    def write(word):
        texts = [TEXT * 3, f"{word} " * 30]
        (tmp_path / "source").mkdir(exist_ok=True)
        if kind == "text":
            for i, text in enumerate(texts):
                (tmp_path / "source" / f"{i}.txt").write_text(text)
        elif kind == "jsonl":
            lines = [json.dumps({"text": text}) + "\n" for text in texts]
            (tmp_path / "source" / "a.jsonl").write_text("".join(lines))
        else:
            table = pyarrow.table({"text": texts})
            parquet.write_table(table, tmp_path / "source" / "a.parquet", compression="none", use_dictionary=False)

    write("before")
    return tmp_path / "source", write


def decoded(folder):
    rows = samples(folder)
    return "".join(rows.tokenizer().decode(rows[i]["input_ids"].tolist()) for i in range(len(rows)))


def test_a_source_edited_at_equal_size_is_not_taken_for_the_old_one(source, tmp_path):
    folder, write = source
    make(folder, tmp_path / "out")
    before = tree(tmp_path / "out")
    make(folder, tmp_path / "out")
    write("before")
    make(folder, tmp_path / "out")
    assert tree(tmp_path / "out") == before, "written again, but the same"
    write("change")
    with pytest.raises(ValueError, match=r"was prepared from another version of .*: choose another --out"):
        make(folder, tmp_path / "out")
    assert tree(tmp_path / "out") == before


def test_a_source_edited_between_two_runs_is_read_again(source, tmp_path, monkeypatch):
    folder, write = source
    monkeypatch.setattr(parts, "PART", 64)
    monkeypatch.setattr(parts, "PART_FILES", 1)

    def stop(progress):
        if progress.part == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(folder, tmp_path / "out", watch=stop)
    write("change")
    make(folder, tmp_path / "out")
    assert "before" not in decoded(tmp_path / "out")
    assert "change change" in decoded(tmp_path / "out")


def test_binary_files_are_not_blamed_on_the_length(tmp_path):
    (tmp_path / "a.bin").write_bytes(os.urandom(5000))
    (tmp_path / "b.bin").write_bytes(bytes(5000))
    with pytest.raises(ValueError, match=r"no document could be read as text \(.*invalid UTF-8.*\): give text"):
        make(tmp_path, tmp_path / "out")
