"""Every record says where it comes from: when, at which commit, with which versions, on which machine."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORDS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("results", "results/runs", "benchmarks/results")
    for path in (ROOT / folder).glob("*.json")
    if not path.stem.endswith("-small")  # tables and claims, made of the runs
)
NEEDED = {
    "date": {"date"}, "commit": {"commit", "commits"}, "versions": {"torch", "cuda"},
    "machine": {"device", "machine", "platform"},
}  # fmt: skip
# What records lack that were made before their programs noted it. No new ones: measure again instead.
LACKING = {
    "results/speed-paper.json": {"date"},
    "results/runs/real-small-proofs-keys.json": {"date", "commit", "versions", "machine"},
    "benchmarks/results/approximate-joins-2026-11-16.json": {"date", "versions"},
    "benchmarks/results/infini-gates-cpu-2026-11-16.json": {"machine"},
    "benchmarks/results/joining-cpu-2026-11-16.json": {"date", "versions"},
    "benchmarks/results/operators-cpu-2026-11-15.json": {"commit"},
    "benchmarks/results/operators-cuda-2026-11-15.json": {"commit"},
    "benchmarks/results/prepare-bytes-2026-11-15.json": {"commit", "versions"},
    "benchmarks/results/prepare-llama2-2026-11-15.json": {"commit", "versions"},
    "benchmarks/results/streaming-cpu-2026-11-15.json": {"versions"},
    "benchmarks/results/streaming-h200-2026-11-15.json": {"date"},
}


def fields(content: object) -> Iterator[str]:
    """All names in a record whose values are known."""
    if isinstance(content, dict):
        for name, value in content.items():
            if value is not None:
                yield name
            yield from fields(value)
    elif isinstance(content, list):
        for value in content:
            yield from fields(value)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_says_where_it_comes_from(name):
    known = set(fields(json.loads((ROOT / name).read_text())))
    assert {what for what, names in NEEDED.items() if not names & known} <= LACKING.get(name, set())


@pytest.mark.parametrize("name", [name for name in RECORDS if "/runs/small-" in name])
def test_a_run_says_what_it_was_trained_and_measured_on(name):
    record = json.loads((ROOT / name).read_text())
    trained = record["trained"]
    assert trained["recipe"]["training"]["seed"] == record["model"]["seed"]
    assert len(trained["data"]) == len(trained["tokenizer"]) == 64 and trained["sample_order"]
    for part in (trained, *record["measured"]):
        assert part["date"] and part["commit"] and not part["commit"].endswith("dirty") and part["python"]
    for entry in record["measured"]:
        assert len(entry["data"]["sha256"]) == 64 and entry["device"] and entry["torch"] and entry["transformers"]
        if "longppl" in entry["metrics"]:
            assert len(entry["metrics"]["longppl"]["reference"]["weights"]) == 64


@pytest.mark.parametrize("name", [name for name in RECORDS if "/runs/small-" in name])
def test_the_numbers_of_a_run_are_those_of_its_documents(name):
    """Nothing is typed: perplexities follow from the losses of documents, of all tokens and of key tokens."""
    measured = json.loads((ROOT / name).read_text())["measured"]
    once = [(metric, json.dumps(entry["conditions"])) for entry in measured for metric in entry["metrics"]]
    assert len(once) == len(set(once))
    for metrics in (entry["metrics"] for entry in measured):
        for metric in metrics.keys() & {"ppl", "longppl"}:
            for part in metrics["ppl"].values() if metric == "ppl" else [metrics["longppl"]]:
                loss, tokens = (math.fsum(numbers) for numbers in zip(*part["by_document"].values(), strict=True))
                assert tokens == part["key_tokens" if metric == "longppl" else "tokens"]
                assert part[metric] == pytest.approx(math.exp(loss / tokens), rel=1e-9)


def test_runs_of_one_seed_saw_the_same_samples():
    seen = {}
    for name in (name for name in RECORDS if "/runs/small-" in name):
        record = json.loads((ROOT / name).read_text())
        trained, model = record["trained"], record["model"]
        key = model["corpus"], model["seed"], trained["tokens"]
        assert seen.setdefault(key, trained["sample_order"]) == trained["sample_order"], name
