"""Large corpora and kills. The sizes named in the reliability table are reached with the variables below."""

import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import time

import pytest

from elastic_memory.data import parts, prepare, samples
from tests.data.conftest import tree

DOCUMENTS = int(os.environ.get("ELASTIC_DOCUMENTS", 100_000))
EMPTY_FILES = int(os.environ.get("ELASTIC_EMPTY_FILES", 100_000))
HUGE_BYTES = int(os.environ.get("ELASTIC_HUGE_BYTES", 512 << 20))

pytestmark = pytest.mark.faults


def killed_after(seconds, *arguments, **options):
    """Prepare in a process of its own and kill it; whether it was still at work."""
    process = multiprocessing.get_context("fork").Process(target=prepare, args=arguments, kwargs=options)
    process.start()
    process.join(seconds)
    alive = process.is_alive()
    process.kill()
    process.join()
    return alive


def kill_and_compare(source, folder, kills, **options):
    start, worked = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    whole = multiprocessing.get_context("fork").Process(target=prepare, args=(source, folder / "whole"), kwargs=options)
    whole.start()
    whole.join()
    taken, worked = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - worked
    moments = random.Random(0)
    # each run is killed after a part of what is left to do, so that the later ones die while gathering
    killed = [killed_after(moments.uniform(0, taken / 3), source, folder / "killed", **options) for _ in range(kills)]
    assert sum(killed) >= 3
    prepare(source, folder / "killed", **options)
    assert tree(folder / "killed") == tree(folder / "whole")
    return worked


def test_a_large_corpus_killed_many_times_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART", 2 << 20)
    words = random.Random(0)
    with open(tmp_path / "c.jsonl", "w") as file:
        for i in range(DOCUMENTS):
            text = f"document {i}: " + "the cat sat on the mat. " * words.randrange(40)
            file.write(json.dumps({"id": f"d{i}", "text": text}) + "\n")
    size = (tmp_path / "c.jsonl").stat().st_size
    # seconds of work, not of the clock: other programs may be running
    seconds = kill_and_compare(tmp_path / "c.jsonl", tmp_path, 20, tokenizer="bytes", length=256, workers=2)
    print(f"{size / 1e6 / seconds:.1f} MB per second of work with {DOCUMENTS} documents")
    assert size / 1e6 / seconds >= 5
    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    kept = sum(facts["documents"] for facts in manifest["splits"].values())
    assert kept + sum(manifest["skipped"].values()) == DOCUMENTS


def test_empty_files_in_great_number(tmp_path):
    folder = tmp_path / "files"
    for i in range(EMPTY_FILES):
        if i % 1000 == 0:
            (folder / f"{i // 1000:04d}").mkdir(parents=True)
        os.close(os.open(folder / f"{i // 1000:04d}" / f"{i % 1000:03d}.txt", os.O_CREAT | os.O_WRONLY))
    (folder / "good.txt").write_text("the cat sat on the mat. " * 100)
    kill_and_compare(folder, tmp_path, 8, tokenizer="bytes", length=256)
    manifest = json.loads((tmp_path / "whole" / "manifest.json").read_text())
    assert manifest["skipped"] == {"empty": EMPTY_FILES}


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_huge_document_takes_little_memory(kind, tmp_path, tokenizer_folders):
    size = HUGE_BYTES if kind == "bytes" else HUGE_BYTES // 8
    block = "the theory of the thing, naïve — and the cat sat on the mat by the door; " * 1000
    with open(tmp_path / "huge.txt", "w") as file:
        for _ in range(size // len(block.encode()) + 1):
            file.write(block)
    program = (
        "import resource, sys\nfrom elastic_memory.data import prepare\n"
        "prepare(sys.argv[1], sys.argv[2], tokenizer=sys.argv[3], shares=(1.0, 0.0, 0.0))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    arguments = [str(tmp_path / "huge.txt"), str(tmp_path / "out"), str(tokenizer_folders.get(kind, "bytes"))]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    peak = int(done.stdout) * 1024
    print(f"{size / 1e9:.2f} GB document, {kind}: peak {peak / 2**30:.2f} GiB")
    assert peak < 2 << 30
    if kind == "bytes":
        assert samples(tmp_path / "out", "train").documents[0]["tokens"] == (tmp_path / "huge.txt").stat().st_size
