import gzip
import json
import sysconfig
from collections import Counter

import pyarrow
import pyarrow.parquet as parquet
import pytest

from elastic_memory.data import CORPORA, prepare, samples
from elastic_memory.data.corpora import Hub, find_parts
from elastic_memory.data.parts import SPLITS
from tests.data.conftest import tree

HUBS = [name for name, corpus in CORPORA.items() if isinstance(corpus, Hub)]


@pytest.fixture(scope="module")
def standard_library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stdlib") / "rows"
    return folder, prepare("stdlib", folder, tokenizer="bytes", length=4096)


def test_the_standard_library_has_long_documents_in_every_split(standard_library):
    _, manifest = standard_library
    assert list(manifest["splits"]) == list(SPLITS)
    assert all(facts["rows"] >= 50 for facts in manifest["splits"].values())
    assert manifest["longest"] > 200_000
    assert list(manifest["source"]["licences"]) == ["PSF-2.0"]


def test_the_standard_library_is_the_same_each_time(standard_library, tmp_path):
    folder, _ = standard_library
    prepare("stdlib", tmp_path / "again", tokenizer="bytes", length=4096, workers=1)
    assert tree(tmp_path / "again") == tree(folder)


def test_a_package_is_one_document_in_alphabetical_order(standard_library):
    folder, _ = standard_library
    rows = samples(folder, "test")
    first = next(i for i in range(len(rows)) if rows.documents[rows.document(i)]["id"] == "asyncio")
    with open(sysconfig.get_paths()["stdlib"] + "/asyncio/__init__.py", encoding="utf-8") as file:
        start = file.read(100)
    assert bytes(rows[first]["input_ids"].tolist()).decode().startswith(f"# asyncio/__init__.py\n{start}")


def test_nothing_third_party_is_taken_for_the_standard_library():
    files = [file for part in CORPORA["stdlib"].parts() for file in part.files]
    assert len(files) == len(set(files)) > 300
    assert not [file for file in files if "site-packages" in file or "/test/" in file]


@pytest.mark.parametrize("name", HUBS)
def test_hub_corpora_are_read_through_datasets(name, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    corpus = CORPORA[name]
    texts = {}
    for split, pattern in corpus.files.items():
        for shard in range(2):
            path = tmp_path / "hub@abc" / pattern.replace("*", f"{shard}")
            path.parent.mkdir(parents=True, exist_ok=True)
            texts[path] = [f"{split} {shard} {i} " + "the cat sat. " * 20 for i in range(3)]
            if corpus.builder == "parquet":
                parquet.write_table(pyarrow.table({corpus.text: texts[path]}), path)
            else:
                path.write_bytes(
                    gzip.compress("".join(json.dumps({corpus.text: text}) + "\n" for text in texts[path]).encode())
                )
    monkeypatch.setattr(Hub, "root", lambda self: str(tmp_path / "hub@abc"))
    parts = find_parts([name], None, Counter())
    assert len(parts) == len(texts)
    assert [part.split for part in parts] == [
        split if len(corpus.files) > 1 else None for split in corpus.files for _ in range(2)
    ]
    read = [("".join(document.chunks), document.licence) for part in parts for document in part.documents()]
    assert read == [(text, corpus.licence) for group in texts.values() for text in group]
    manifest = prepare(name, tmp_path / "rows", tokenizer="bytes", length=100)
    assert sum(facts["documents"] for facts in manifest["splits"].values()) == len(read)
    assert manifest["source"]["sha256"] == {str(tmp_path / "hub@abc"): "abc"}


@pytest.mark.parametrize("name", HUBS)
def test_a_hub_out_of_reach_is_said_in_one_line(name, tmp_path):
    with pytest.raises(ValueError, match=f"cannot reach {CORPORA[name].hub} on the Hugging Face hub"):
        prepare(name, tmp_path / "rows", tokenizer="bytes")
    assert not (tmp_path / "rows").exists()


def test_every_corpus_states_its_licence():
    assert {"pg19", "proof-pile", "fineweb-edu", "stdlib"} <= CORPORA.keys()
    assert all(corpus.licence for corpus in CORPORA.values())
