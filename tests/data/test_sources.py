import gzip
import json
import os
from collections import Counter

import pyarrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_memory.data import parts, sources
from elastic_memory.data.corpora import find_parts
from elastic_memory.data.parts import file_parts
from elastic_memory.data.tokenizers import Skip

zstandard = pytest.importorskip("zstandard", reason="comes with the data extra")

documents = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=30)


def write_parquet(folder, texts):
    table = pyarrow.table({"id": [f"d{i}" for i in range(len(texts))], "text": texts, "license": ["CC0"] * len(texts)})
    parquet.write_table(table, folder / "texts.parquet", row_group_size=7)


def lines(texts):
    return "".join(json.dumps({"id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def write_text(folder, texts):
    for i, text in enumerate(texts):
        (folder / f"{i:03d}.txt").write_bytes(text.encode())


WRITERS = {
    "parquet": write_parquet,
    "jsonl": lambda folder, texts: (folder / "texts.jsonl").write_bytes(lines(texts)),
    "jsonl without a last line end": lambda folder, texts: (folder / "t.jsonl").write_bytes(lines(texts)[:-1]),
    "jsonl.gz": lambda folder, texts: (folder / "texts.jsonl.gz").write_bytes(gzip.compress(lines(texts))),
    "jsonl.zst": lambda folder, texts: (folder / "t.jsonl.zst").write_bytes(zstandard.compress(lines(texts))),
    "jsonl.zst of many frames": lambda folder, texts: (folder / "t.jsonl.zst").write_bytes(
        b"".join(zstandard.compress(line) for line in lines(texts).splitlines(True))
    ),
    "text": write_text,
}


def read(parts):
    """[(name, text or the reason it was skipped)]."""
    found = []
    for part in parts:
        for document in part.documents():
            try:
                found.append((document.name, "".join(document.chunks)))
            except Skip as reason:
                found.append((document.name, reason))
    return found


def read_folder(folder):
    return read(file_parts([folder], "text", Counter()))


def reasons(folder):
    return [str(text) for _, text in read_folder(folder) if isinstance(text, Skip)]


@pytest.mark.parametrize("kind", WRITERS)
@given(texts=documents, part=st.integers(1, 400))
def test_every_document_is_read_once_in_order_whatever_the_parts(kind, texts, part, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    if kind == "text":
        texts = [text.removeprefix("\ufeff") for text in texts]
    WRITERS[kind](folder, texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART", part)
        patch.setattr(parts, "PART_FILES", 5)
        found = read_folder(folder)
    assert [text for _, text in found] == texts
    assert len({name for name, _ in found}) == len(texts)


def test_large_files_have_many_parts_and_the_same_ones_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART", 100)
    for writer in WRITERS.values():
        writer(tmp_path, ["some words " * 5] * 40)
        first = file_parts([tmp_path], "text", Counter())
        assert len(first) > 5
        assert file_parts([tmp_path], "text", Counter()) == first
        for path in tmp_path.iterdir():
            path.unlink()


def test_bad_lines_are_skipped_by_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGEST", 6000)
    bad = {
        b"{": "not JSON",
        b"[" * 5000: "not JSON",
        b'{"n": ' + b"9" * 5000 + b', "text": "x"}': "not JSON",
        b'"text"': "no field 'text'",
        b'{"body": "x"}': "no field 'text'",
        b'{"text": 7}': "field 'text' is not text",
        b'{"text": null}': "empty",
        b"": "empty",
        b'{"text": "\xff"}': "invalid UTF-8",
        b'{"text": "' + b"x" * 9000 + b'"}': "too large for one line",
    }
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "good"}\n'.join([b"", *(line + b"\n" for line in bad), b""]))
    assert reasons(tmp_path) == list(bad.values())
    assert sum(text == "good" for _, text in read_folder(tmp_path)) == len(bad) + 1


def test_bad_cells_and_files_are_skipped_by_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGEST", 100)
    write_parquet(tmp_path, ["good", None, "x" * 101])
    assert reasons(tmp_path) == ["empty", "too large for one cell"]
    (tmp_path / "texts.parquet").unlink()
    (tmp_path / "a.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes("naïve".encode()[:-3])
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfgood\r\n")
    assert read_folder(tmp_path)[2] == ("c.txt", "good\r\n")
    assert reasons(tmp_path) == ["invalid UTF-8"] * 2


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train.jsonl", "validation.jsonl", "test.jsonl"], {"train", "validation", "test"}),
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "dev.jsonl"], {"train", "validation"}),
        (["train/a.jsonl", "val/b.jsonl", "more/c.jsonl"], {"train", "validation"}),
        (["train/a.txt", "test/b.txt"], {"train", "test"}),
        (["train.jsonl"], {None}),
        (["docs/a.txt", "test/b.txt"], {None}),
        (["train_schedules.txt", "testimony.txt", "test_drive.txt"], {None}),
    ],
)
def test_splits_are_the_sources_own_where_it_has_them(names, splits, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    passed_over = Counter()
    found = file_parts([tmp_path], "text", passed_over)
    assert {part.split for part in found} == splits
    assert passed_over["in no split"] == ("more/c.jsonl" in names)


def test_folders_are_read_to_their_edges_and_not_beyond(tmp_path):
    (tmp_path / "outside.txt").write_text("secret")
    folder = tmp_path / "folder"
    (folder / "deeper").mkdir(parents=True)
    (folder / "deeper" / "a.txt").write_text("inside")
    (folder / "b.txt").symlink_to(folder / "deeper" / "a.txt")
    (folder / ".hidden").write_text("hidden")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "up").symlink_to(tmp_path)
    (folder / "nowhere.txt").symlink_to(folder / "missing")
    (folder / "zero.txt").symlink_to("/dev/zero")
    (folder / "data.zip").write_bytes(b"PK")
    os.mkfifo(folder / "pipe")
    passed_over = Counter()
    found = read(file_parts([folder], "text", passed_over))
    assert found == [("b.txt", "inside"), ("deeper/a.txt", "inside")]
    assert +passed_over == {"link out of the folder": 3, "not a regular file": 2, "archive": 1}


def test_several_sources_keep_their_names_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text('{"text": "x"}\n')
    found = file_parts([tmp_path / "a" / "x.jsonl", tmp_path / "b"], "text", Counter())
    assert [list(part.hashes()) for part in found] == [["a/x.jsonl"], ["b/x.jsonl"]]


def test_hashes_are_those_of_the_files(tmp_path):
    import hashlib

    write_parquet(tmp_path, ["x"] * 20)
    found = file_parts([tmp_path], "text", Counter())
    expected = hashlib.sha256((tmp_path / "texts.parquet").read_bytes()).hexdigest()
    assert [part.hashes() for part in found] == [{"texts.parquet": expected}] + [{}] * (len(found) - 1)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_damaged_packed_files_are_named(suffix, tmp_path):
    WRITERS[f"jsonl.{suffix}"](tmp_path, ["some words " * 50] * 50)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no such packing at all" * 10):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{path.name} is damaged"):
            read_folder(tmp_path)


def test_unusable_sources_are_named_with_what_would_fit(tmp_path):
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(ValueError, match=r"torn\.parquet is not a readable parquet file"):
        read_folder(tmp_path)
    (tmp_path / "torn.parquet").unlink()
    write_parquet(tmp_path, ["x"])
    with pytest.raises(ValueError, match="no column 'body' of text; its columns: id, text, license"):
        file_parts([tmp_path], "body", Counter())
    for name, message in {
        "stdlip": "did you mean 'stdlib'",
        "pg-19": "did you mean 'pg19'",
        "../pg19": "no corpus or file",
        "/dev/zero": "neither a file nor a folder",
        str(tmp_path / "x.zip"): "no corpus or file",
    }.items():
        with pytest.raises(ValueError, match=message):
            find_parts([name], "text", Counter())
    (tmp_path / "x.tar.gz").write_bytes(b"")
    with pytest.raises(ValueError, match="archives are never unpacked"):
        find_parts([str(tmp_path / "x.tar.gz")], "text", Counter())
    with pytest.raises(ValueError, match="stdlib is a named corpus"):
        find_parts([str(tmp_path), "stdlib"], "text", Counter())
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x.zip").write_bytes(b"")
    with pytest.raises(ValueError, match=r"nothing to read in .*1 archive"):
        find_parts([str(tmp_path / "empty")], "text", Counter())


def test_a_file_given_twice_is_refused(tmp_path):
    """Its documents would count twice: `books books/one.txt`, or the same glob twice."""
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("words")
    for paths in ([tmp_path / "books", tmp_path / "books" / "one.txt"], [tmp_path / "books"] * 2):
        with pytest.raises(ValueError, match=r"one\.txt is given twice, by .* and by .*: leave one of them out"):
            file_parts(paths, "text", Counter())


@pytest.mark.parametrize("name", ["data.csv", "data.tsv", "train.JSON"])
def test_records_are_not_read_as_plain_text(tmp_path, name):
    """Field names, quotes and numbers would be trained on."""
    (tmp_path / name).write_text('[{"text": "words"}]')
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(ValueError, match=rf"holds records, not plain text: convert {name} to parquet or JSONL"):
            file_parts([path], "text", Counter())
    (tmp_path / "text.txt").write_text("words")  # among text they are text, as in a folder of source code
    assert len(read(file_parts([tmp_path], "text", Counter()))) == 2
