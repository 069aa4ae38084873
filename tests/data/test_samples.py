import json
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import elastic_memory as em
from elastic_memory.data import prepare, samples

WRONG = [(b"8.5", b"uint16", b"{}"), (b"8", b"object", b"{}"), (b"8", b"uint16", b'{"train": {"rows": -1}}')]


@pytest.fixture
def folder(tmp_path):
    texts = ["ab " * 100, "cd " * 50, "ef " * 120]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"id": text[:2], "text": text}) + "\n" for text in texts))
    prepare(tmp_path / "c.jsonl", tmp_path / "rows", tokenizer="bytes", length=40, shares=(1.0, 0.0, 0.0))
    return tmp_path / "rows"


def test_rows_are_long_tensors_of_one_length(folder):
    rows = em.data.samples(folder, split="train")
    assert len(rows) == 300 // 40 + 150 // 40 + 360 // 40
    row = rows[0]["input_ids"]
    assert row.dtype == torch.int64
    assert bytes(row.tolist()) == (b"ab " * 100)[:40]
    assert torch.equal(rows[-1]["input_ids"], rows[len(rows) - 1]["input_ids"])
    assert len(list(rows)) == len(rows)
    for index in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            rows[index]


def test_every_row_knows_its_document(folder):
    rows = samples(folder, "train")
    for index in range(len(rows)):
        document = rows.documents[rows.document(index)]
        assert document["id"].encode() in bytes(rows[index]["input_ids"].tolist())
    assert [document["tokens"] for document in rows.documents] == [300, 150, 360]


def test_a_loader_reads_the_same_rows_and_sends_its_workers_no_data(folder):
    rows = samples(folder, "train")
    assert len(rows.documents) == 3  # all that is read lazily has been read
    rows[0]
    assert len(ForkingPickler.dumps(rows)) < 1000
    loader = DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context="fork")
    read = torch.cat([batch["input_ids"] for batch in loader])
    assert torch.equal(read, torch.stack([row["input_ids"] for row in rows]))


def test_a_changed_row_cannot_reach_the_file(folder):
    before = (folder / "train.bin").read_bytes()
    samples(folder, "train")[0]["input_ids"].zero_()
    assert (folder / "train.bin").read_bytes() == before


def test_what_is_missing_is_said(folder, tmp_path):
    with pytest.raises(ValueError, match=r"no split 'tset': known: train"):
        samples(folder, "tset")
    with pytest.raises(FileNotFoundError, match="make it with elastic prepare"):
        samples(tmp_path / "nowhere", "train")
    (tmp_path / "begun" / ".work").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="is not finished"):
        samples(tmp_path / "begun", "train")


@pytest.mark.parametrize(
    "manifest",
    [b"", b"{", b"[]", b"{}", b"\xff", b"[" * 10_000, b'{"format": 2}', b'{"format": "elastic-memory rows 1"}']
    + [b'{"format": "elastic-memory rows 1", "length": %s, "dtype": "%s", "splits": %s}' % wrong for wrong in WRONG],
)
def test_a_broken_manifest_is_refused(manifest, folder):
    (folder / "manifest.json").write_bytes(manifest)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        samples(folder, "train")


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_a_shortened_file_is_noticed_on_opening(share, folder):
    content = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"train\.bin has [\d,]+ bytes, the manifest says"):
        samples(folder, "train")


@pytest.mark.parametrize("name", ["train.bin", "train.jsonl"])
def test_one_flipped_bit_is_noticed_by_verification(name, folder):
    samples(folder, "train").verify()
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 4
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        samples(folder, "train").verify()


def test_an_id_outside_the_vocabulary_is_noticed_by_verification(folder):
    import hashlib

    rows = np.fromfile(folder / "train.bin", dtype="<u2")
    rows[100] = 256
    rows.tofile(folder / "train.bin")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["train"]["sha256"] = hashlib.sha256(rows.tobytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="has the id 256, outside the vocabulary of 256"):
        samples(folder, "train").verify()
