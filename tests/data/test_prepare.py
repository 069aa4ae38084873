import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_memory.data import parts, prepare, samples
from elastic_memory.data import tokenizers as tokenizers_module
from elastic_memory.data.tokenize_part import RowMaker
from tests.data.conftest import tree
from tests.oracles import rows as oracle

texts = st.lists(st.sampled_from(["", "the", " cat ", "aaaa", "\n\n", "sat on", "naïve 漢字 ", "<s>"]), max_size=40)


def write_lines(path, documents):
    path.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in documents.items()))


def all_rows(folder):
    """Every row with the name of its document, over all splits."""
    found = []
    for split in json.loads((folder / "manifest.json").read_text())["splits"]:
        rows = samples(folder, split)
        found += [(rows.documents[rows.document(i)]["id"], rows[i]["input_ids"].tolist()) for i in range(len(rows))]
    return found


@pytest.fixture
def corpus(tmp_path):
    """Twenty documents of different lengths in five files, prepared in many small parts."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for file in range(5):
        write_lines(
            folder / f"{file}.jsonl",
            {f"{file}/{i}": f"document {file} {i} says: " + "the cat sat. " * (i * 9 + file) for i in range(4)},
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART", 600)
        yield folder


@settings(max_examples=40)
@given(texts=st.lists(texts.map("".join), min_size=1, max_size=8), length=st.integers(2, 40), workers=st.integers(1, 3))
@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
def test_rows_are_those_of_whole_documents(
    kind, texts, length, workers, tokenizers, tokenizer_folders, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("prepared")
    documents = {f"d{i}": text for i, text in enumerate(texts)}
    write_lines(folder / "texts.jsonl", documents)
    expected = oracle.rows(documents.items(), tokenizers[kind].encode, length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART", 100)
        patch.setattr(tokenizers_module, "PIECE", 30)
        run = lambda: prepare(  # noqa: E731
            folder / "texts.jsonl",
            folder / "out",
            tokenizer=tokenizer_folders.get(kind, "bytes"),
            length=length,
            workers=workers,
        )
        if not expected:
            longest = max(len(tokenizers[kind].encode(text)) for text in texts)
            with pytest.raises(ValueError, match=f"longer than {length} tokens; the longest has {longest} "):
                run()
            assert not (folder / "out").exists()
            return
        manifest = run()
    assert Counter((name, tuple(row)) for name, row in all_rows(folder / "out")) == Counter(
        (name, tuple(map(int, row))) for name, row in expected
    )
    assert sum(split["rows"] for split in manifest["splits"].values()) == len(expected)
    kept = sum(split["documents"] for split in manifest["splits"].values())
    assert kept + sum(manifest["skipped"].values()) == len(texts)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_bytes_do_not_depend_on_the_number_of_workers(workers, corpus, tmp_path):
    for name, count in {"one": 1, "many": workers}.items():
        prepare(corpus, tmp_path / name, tokenizer="bytes", length=100, workers=count)
    assert tree(tmp_path / "one") == tree(tmp_path / "many")


@pytest.mark.parametrize("count", [2, 3, 100])
def test_shards_in_any_order_give_the_bytes_of_one_run(count, corpus, tmp_path):
    prepare(corpus, tmp_path / "whole", tokenizer="bytes", length=100)
    for index in reversed(range(count)):
        assert prepare(corpus, tmp_path / "shards", tokenizer="bytes", length=100, shard=(index, count)) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowMaker, "write", None)  # nothing is left to tokenise
        prepare(corpus, tmp_path / "shards", tokenizer="bytes", length=100)
    assert tree(tmp_path / "shards") == tree(tmp_path / "whole")


@given(stops=st.lists(st.integers(1, 30), max_size=4))
@settings(max_examples=20)
def test_interrupted_and_run_again_gives_the_same_bytes(stops, tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupted")
    write_lines(folder / "c.jsonl", {f"d{i}": "the cat sat. " * (i * 7) for i in range(12)})
    arguments = dict(tokenizer="bytes", length=64, workers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART", 500)
        prepare(folder / "c.jsonl", folder / "whole", **arguments)
        for stop in stops:
            seen = iter(range(stop))

            def interrupt(progress, seen=seen):
                if next(seen, None) is None:
                    raise KeyboardInterrupt

            try:
                prepare(folder / "c.jsonl", folder / "again", watch=interrupt, **arguments)
            except KeyboardInterrupt:
                assert not (folder / "again" / "manifest.json").exists()
                assert not list((folder / "again").rglob("*.tmp"))
        prepare(folder / "c.jsonl", folder / "again", **arguments)
    assert tree(folder / "again") == tree(folder / "whole")


def test_a_finished_folder_is_left_as_it_is(corpus, tmp_path):
    first = prepare(corpus, tmp_path / "out", tokenizer="bytes", length=100)
    before = tree(tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowMaker, "write", None)
        assert prepare(corpus, tmp_path / "out", tokenizer="bytes", length=100) == first
    assert tree(tmp_path / "out") == before


def test_killed_while_clearing_up_leaves_nothing_to_the_next_run(corpus, tmp_path, monkeypatch):
    prepare(corpus, tmp_path / "whole", tokenizer="bytes", length=100)

    def interrupted(folder, **options):
        if folder.name == ".work":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus, tmp_path / "out", tokenizer="bytes", length=100)
    assert (tmp_path / "out" / ".work").exists()
    prepare(corpus, tmp_path / "out", tokenizer="bytes", length=100)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_another_preparation_in_the_same_folder_is_refused_by_what_differs(corpus, tmp_path, tokenizer_folders):
    finished, begun = tmp_path / "finished", tmp_path / "begun"
    prepare(corpus, finished, tokenizer="bytes", length=100)
    prepare(corpus, begun, tokenizer="bytes", length=100, shard=(0, 2))
    before = tree(tmp_path)
    for folder in (finished, begun):
        for changed, message in [
            ({"length": 200}, "length was 100, now 200"),
            ({"tokenizer": tokenizer_folders["byte-level"]}, "tokenizer was bytes, now byte-level; tokenizer_sha256"),
            ({"shares": (0.5, 0.5, 0.0)}, r"shares was \[0.9, 0.05, 0.05\], now \[0.5"),
        ]:
            with pytest.raises(ValueError, match=f"was prepared with other settings .*{message}"):
                prepare(corpus, folder, **({"tokenizer": "bytes", "length": 100} | changed))
    write_lines(corpus / "more.jsonl", {"x": "y"})
    with pytest.raises(ValueError, match="corpus_sha256 was"):
        prepare(corpus, finished, tokenizer="bytes", length=100)
    (corpus / "more.jsonl").unlink()
    assert tree(tmp_path) | {"begun/.work/lock": b""} == before


def test_documents_are_divided_by_their_text_alone(tmp_path, monkeypatch):
    documents = {f"d{i}": f"{i % 150} " + "the cat sat. " * 30 for i in range(300)}
    write_lines(tmp_path / "c.jsonl", documents)
    shares = {"train": 0.6, "validation": 0.3, "test": 0.1}
    manifest = prepare(tmp_path / "c.jsonl", tmp_path / "out", tokenizer="bytes", length=100, shares=(0.6, 0.3, 0.1))
    of = {
        document["id"]: split for split in manifest["splits"] for document in samples(tmp_path / "out", split).documents
    }
    assert of.keys() == documents.keys()
    assert all(of[f"d{i}"] == of[f"d{i + 150}"] for i in range(150)), "copies of a document share a split"
    counts = Counter(of.values())
    assert all(abs(counts[split] / 300 - share) < 0.1 for split, share in shares.items())
    write_lines(tmp_path / "fewer.jsonl", {name: documents[name] for name in ["d7", "d3", "d200"]})
    again = prepare(tmp_path / "fewer.jsonl", tmp_path / "two", tokenizer="bytes", length=50, shares=(0.6, 0.3, 0.1))
    for split in again["splits"]:
        assert all(of[document["id"]] == split for document in samples(tmp_path / "two", split).documents)


def test_bad_documents_are_counted_by_reason(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    good = "the cat sat on the mat. " * 20
    for name, content in {
        "empty": b"",
        "one": b"a",
        "binary": bytes(range(256)) * 10,
        "latin": good.encode() + "naïve".encode("latin-1"),
        "nul": good.encode() + b"\0" + good.encode(),
        "a flaw after a megabyte": b"flawed words " * 100_000 + b"\xff",
        "unbroken": b"x" * (tokenizers_module.UNBROKEN + 1),
        "one line of 10 MB": b"word " * 2_000_000,
        "good": good.encode(),
    }.items():
        (folder / f"{name}.txt").write_bytes(content)
    manifest = prepare(folder, tmp_path / "out", tokenizer="bytes", length=100, shares=(1.0, 0.0, 0.0))
    assert manifest["skipped"] == {
        "NUL character": 1,
        "empty": 1,
        "invalid UTF-8": 3,
        tokenizers_module.UNCUTTABLE: 1,
        "too short": 1,
    }
    documents = {document["id"]: document["tokens"] for document in samples(tmp_path / "out", "train").documents}
    assert documents == {"good.txt": len(good), "one line of 10 MB.txt": 10_000_000}
    assert bytes(samples(tmp_path / "out", "train")[0]["input_ids"].tolist()) == good.encode()[:100]
    assert manifest["longest"] == 10_000_000
    lone = tmp_path / "lone.jsonl"
    lone.write_text('{"text": "\\ud800"}\n{"text": "\\u0000"}\n')
    with pytest.raises(ValueError, match="1 NUL character, 1 invalid Unicode"):
        prepare(lone, tmp_path / "lone", tokenizer="bytes", length=100)


def test_the_manifest_says_where_rows_come_from(tmp_path, tokenizer_folders, tokenizers):
    lines = [{"id": "a", "text": "the cat " * 50, "license": "CC0"}, {"id": "b", "text": "the dog " * 50}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = prepare(
        tmp_path / "c.jsonl", tmp_path / "out", tokenizer=tokenizer_folders["byte-level"], length=10, shares=(1, 0, 0)
    )
    assert manifest["source"]["licences"] == {"CC0": 1, "unknown": 1}
    assert list(manifest["source"]["sha256"]) == manifest["source"]["names"] == ["c.jsonl"]
    used = tokenizers["byte-level"]
    assert manifest["tokenizer"] == {"name": "byte-level", "sha256": used.sha256, "vocab_size": used.vocab_size}
    assert manifest["tool"].startswith("elastic-memory ")
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()
    rows = samples(tmp_path / "out", "train")
    assert rows.tokenizer().decode(rows[0]["input_ids"]).startswith("the cat")


def test_large_vocabularies_get_wider_ids(tmp_path, monkeypatch):
    write_lines(tmp_path / "c.jsonl", {"a": "the cat " * 50})
    monkeypatch.setattr(tokenizers_module.Bytes, "vocab_size", 70_000)
    monkeypatch.setattr(tokenizers_module.Bytes, "encode", lambda self, text: np.full(len(text), 69_999))
    prepare(tmp_path / "c.jsonl", tmp_path / "out", tokenizer="bytes", length=100, shares=(1, 0, 0))
    assert samples(tmp_path / "out", "train")[3]["input_ids"].tolist() == [69_999] * 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 1}, "length 1"),
        ({"shares": (0.5, 0.1, 0.1)}, "add up to 1"),
        ({"shares": (1.5, -0.5, 0.0)}, "add up to 1"),
        ({"shard": (3, 3)}, "shard 3/3"),
        ({"out": "file"}, "is not a folder"),
        ({"sources": "stdlip"}, "did you mean 'stdlib'"),
    ],
)
def test_wrong_arguments_write_nothing(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=message):
        prepare(**({"sources": "stdlib", "out": "out", "tokenizer": "bytes"} | arguments))
    assert tree(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_second_process_is_refused_and_a_dead_one_is_not_waited_for(corpus, tmp_path):
    out = tmp_path / "out"
    program = (
        "import sys, time\nfrom elastic_memory.common.locks import locked\nfrom pathlib import Path\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(out / ".work" / "lock")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        for shard in ((0, 1), (1, 3)):
            with pytest.raises(ValueError, match=f"is in use by process {holder.pid} on "):
                prepare(corpus, out, tokenizer="bytes", length=100, shard=shard)
    finally:
        holder.kill()
        holder.wait()
    prepare(corpus, out, tokenizer="bytes", length=100)
    assert samples(out, "train")


def test_nothing_is_written_through_links(corpus, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    for name in ("train.bin", "train.bin.tmp", "manifest.json.tmp"):
        (out / name).symlink_to(victim)
    prepare(corpus, out, tokenizer="bytes", length=100)
    assert victim.read_text() == "precious"
    assert not any(path.is_symlink() for path in out.iterdir())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".work").symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is a link"):
        prepare(corpus, tmp_path / "linked", tokenizer="bytes", length=100)
    assert not list(elsewhere.iterdir())


def test_names_of_documents_cannot_leave_the_folder(tmp_path):
    write_lines(tmp_path / "c.jsonl", {"../../escape": "the cat " * 50, "/etc/passwd": "a dog " * 50})
    prepare(tmp_path / "c.jsonl", tmp_path / "deep" / "out", tokenizer="bytes", length=100, shares=(1, 0, 0))
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and "out" not in path.parts]
    assert [path.name for path in outside] == ["c.jsonl"]


def test_a_full_disk_is_one_line_and_the_next_run_continues(corpus, tmp_path):
    # a limit on the size of a file makes the system refuse to write, as a full disk does
    limited = (
        "import resource, sys\nfrom elastic_memory.data import parts\nparts.PART = 600\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))\n"
        "from elastic_memory.cli import main\nsys.argv = ['elastic', *sys.argv[1:]]\nmain()"
    )
    command = ["prepare", str(corpus), "--tokenizer", "bytes", "--length", "100", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", limited, *command], capture_output=True, text=True)
    assert done.returncode == 2
    assert re.search(r"^elastic: no space left for .*repeat the command to resume$", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
    left = [path.name for path in (tmp_path / "out").rglob("*")]
    assert "manifest.json" not in left
    assert not [name for name in left if name.endswith((".tmp", "train.bin"))]
    prepare(corpus, tmp_path / "out", tokenizer="bytes", length=100)
    prepare(corpus, tmp_path / "whole", tokenizer="bytes", length=100)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_damaged_part_is_not_gathered(corpus, tmp_path):
    for index in range(2):
        prepare(corpus, tmp_path / "out", tokenizer="bytes", length=100, shard=(index, 2))
    part = max((tmp_path / "out" / ".work").glob("*.bin"), key=os.path.getsize)
    content = bytearray(part.read_bytes())
    content[7] ^= 1
    part.write_bytes(content)
    with pytest.raises(ValueError, match=f"{part.name} is damaged: delete it"):
        prepare(corpus, tmp_path / "out", tokenizer="bytes", length=100)


def test_tokens_of_the_shared_corpora(shared, tmp_path):
    import pyarrow.parquet as parquet

    path = shared / "data" / "proofs" / "validation.parquet"
    prepare(path, tmp_path / "out", tokenizer=shared / "tokenizers" / "llama2", shares=(1, 0, 0))
    table = parquet.read_table(path, columns=["id", "tokens"]).to_pydict()
    rows = samples(tmp_path / "out", "train")
    counted = {document["id"]: document["tokens"] for document in rows.documents}
    assert counted == dict(zip(table["id"], table["tokens"], strict=True))
    assert {len(row["input_ids"]) for row in rows} == {32768}
