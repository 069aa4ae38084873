"""Throughput of `elastic prepare` beside the tokenizer alone, on the same documents and cores.

    python benchmarks/prepare.py [--tokenizer FOLDER] [--source FILES] [--quick] [--out benchmarks/results]

The tokenizer alone is `encode_batch` of the library tokenizers over whole documents, with its own threads; preparation
reads, checks, tokenizes, cuts and writes. The two are interleaved three times in one process; the best time counts.
"""

import argparse
import datetime
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

from elastic_memory.common.environment import environment
from elastic_memory.data import load_tokenizer, prepare
from elastic_memory.data.corpora import find_parts


def documents(source: str, limit: int) -> list[str]:
    """The first documents of a corpus, `limit` bytes of them or a little more."""
    texts: list[str] = []
    for part in find_parts([source], "text", Counter()):
        for document in part.documents():
            texts.append("".join(document.chunks))
            limit -= len(texts[-1].encode())
            if limit <= 0:
                return texts
    return texts


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--source", default="stdlib")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--quick", action="store_true", help="a few megabytes instead of 32")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()

    tokenizer = load_tokenizer(arguments.tokenizer)
    # `bytes` copies memory, which is no measure of anything: its preparation is measured alone
    alone = tokenizer.tokenizer.backend_tokenizer.encode_batch if hasattr(tokenizer, "tokenizer") else None
    texts = documents(arguments.source, (4 if arguments.quick else 32) << 20)
    size = sum(len(text.encode()) for text in texts) / 1e6
    load = round(os.getloadavg()[0], 1)
    times: dict[str, list[float]] = {"tokenizer": [], "prepare": []}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "texts.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for turn in range(3):
            if alone:
                times["tokenizer"].append(seconds(lambda: alone(texts, add_special_tokens=False)))
            out = Path(folder) / f"rows{turn}"
            run = dict(tokenizer=arguments.tokenizer, length=arguments.length)
            times["prepare"].append(seconds(lambda out=out, run=run: prepare(source, out, **run)))
    rates = {name: round(size / min(taken), 2) for name, taken in times.items() if taken}
    record = {
        "date": datetime.date.today().isoformat(),
        "environment": environment(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load,
        "tokenizer": tokenizer.name,
        "megabytes": round(size, 1),
        "megabytes_per_second": rates,
        "ratio": round(rates["prepare"] / rates["tokenizer"], 2) if alone else None,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"prepare-{tokenizer.name}-{record['date']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
