"""The tables of docs/speed.md and the README's headline, written from the dated results in benchmarks/results.

python -m elastic_memory.report.speed        # in the root of the repository
"""

import json
from pathlib import Path
from typing import Any

from elastic_memory.report.catalogue import insert
from elastic_memory.report.tables import Table

LENGTHS = {2048: "2k", 4096: "4k", 32768: "32k", 262144: "256k", 1048576: "1M"}


def benchmark_records(root: Path, what: str) -> list[Path]:
    """All records of a benchmark, the newest last."""
    folder = root / "benchmarks" / "results"
    paths = sorted(folder.glob(f"{what}-*.json"), key=lambda path: (path.stem[-10:], path.name))
    if not paths:
        raise FileNotFoundError(f"{folder} has no {what}-*.json: run the benchmark first")
    return paths


def newest(root: Path, what: str) -> dict[str, Any]:
    """The newest record of a benchmark."""
    return json.loads(benchmark_records(root, what)[-1].read_text())


def headline(root: Path) -> str:
    """The README's summary of speed."""
    cells = json.loads((root / "results" / "speed-paper.json").read_text())["cells"]
    peers = {row["name"]: row for row in newest(root, "peers")["peers"]}
    stream = newest(root, "streaming-h200")["runs"][0]["rows"]  # captured steps of one row
    ours, theirs = peers["Transformer++"], peers["transformers Llama"]
    flat = stream[-1]["decode_tokens_per_s"] / stream[0]["decode_tokens_per_s"]
    small, large = (cells[f"Elastic, exponential|{multiple}x"]["training_ratio"] for multiple in (1, 16))
    return (
        f"On one H200 the 100m model without memory trains at {ours['tokens_per_s'] / 1e3:.0f}k tokens/s on samples of "
        f"32,768 tokens, {ours['tokens_per_s'] / theirs['tokens_per_s']:.1f} times as fast as transformers' Llama with "
        f"full attention. Elastic Memory trains at {small:.0%} of the baseline's throughput at 1x and at {large:.0%} "
        f"at 16x (runs interleaved in one process). Decoding after a million tokens is {flat:.2f} times as fast as "
        "after two thousand. Details: [docs/speed.md](docs/speed.md).\n"
    )


def training(root: Path) -> str:
    """The table of `elastic reproduce speed`."""
    return (root / "results" / "speed-paper.md").read_text()


def inference(root: Path) -> str:
    """The table of `elastic reproduce inference`, from the same measurements."""
    return (root / "results" / "inference-paper.md").read_text()


def attention(root: Path) -> str:
    """Other attention kernels and head dimensions."""
    record = newest(root, "attention")
    rows = [
        [
            f"{row['memory']} {row['multiple']}x" if row["memory"] != "none" else "none",
            "padded to 96" if row["pad_heads"] else "90",
            row.get("attention", "torch's"),
            f"{row['tokens_per_second'] / 1e3:.0f}k",
            f"{row['ratio_to_none']:.3f}",
            row["commit"],
        ]
        for row in record["rows"]
    ]
    columns = ["memory", "head dimension", "attention", "tokens/s", "ratio", "commit"]
    note = f"{record['what']}. {record['device']}, torch {record['torch']}, {record['date']}."
    return Table("Attention kernels at 100m", columns, rows, note).markdown()


def roofline(root: Path) -> str:
    """Floor and measured time of every part, by model size."""
    record = newest(root, "roofline")
    models = sorted(record["models"], key=lambda model: model["floor_ms"])
    rows = []
    for parts in zip(*(model["parts"] for model in models), strict=True):
        rows.append([parts[0]["part"], *(f"{one['floor_ms']:.1f} / {one['measured_ms']:.1f}" for one in parts)])
    rows.append(["sum / kernels", *(f"{model['floor_ms']:.1f} / {model['busy_ms']:.1f}" for model in models)])
    rows.append(["step", *(f"{model['step_ms']:.1f}" for model in models)])
    rows.append(["step over floor", *(f"{model['step_over_floor']:.2f}" for model in models)])
    rows.append(["tokens/s", *(f"{model['tokens_per_s'] / 1e3:.0f}k" for model in models)])
    rows.append(["commit", *(model["commit"] for model in models)])
    rows.append(["share of 989 TFLOP/s", *(f"{100 * model['share_of_989_tflops']:.0f}%" for model in models)])
    note = (
        f"Transformer++, {models[0]['tokens']:,} tokens a step, bf16. Ceilings: {record['ceilings']['bf16_tflops']} "
        f"TFLOP/s, {record['ceilings']['terabytes_per_s']} TB/s. {record['device']}, torch {record['torch']}, "
        f"{record['date']}."
    )
    title = "Floor / measured milliseconds of a training step"
    return Table(title, ["part", *(model["preset"] for model in models)], rows, note).markdown()


def peers(root: Path) -> str:
    """Other implementations at the same model size."""
    record = newest(root, "peers")
    rows = [
        [
            f"{row['name']} {row['version']}" if row.get("version") else row["name"],
            f"{row['parameters'] / 1e6:.0f}M" if "failed" not in row else "-",
            f"{row['tokens_per_s'] / 1e3:.0f}k" if "failed" not in row else row["failed"],
            f"{row['ratio']:.{2 if row['ratio'] > 0.1 else 3}f}" if "failed" not in row else "-",
            f"{row['peak_gib']:.0f} GiB" if "failed" not in row else "-",
        ]
        for row in record["peers"]
    ]
    notes = " ".join(
        f"*{row['name']}*: {row['note']}." for row in record["peers"] if row.get("package") and "note" in row
    )
    later: dict[str, list[str]] = {}
    for row in record["peers"]:
        if "commit" in row:
            later.setdefault(row["commit"], []).append(row["name"])
    others = "".join(
        f"; {', '.join(names)}: another process, against Transformer++ there, commit {commit}"
        for commit, names in later.items()
    )
    note = (
        f"Training steps of {record['length']:,}-token samples, one process, {record['device']}, {record['date']}, "
        f"commit {record['environment']['commit']}{others}. {notes}"
    )
    return Table("Peers", ["model", "parameters", "tokens/s", "ratio", "peak memory"], rows, note).markdown()


def streaming(root: Path, what: str) -> str:
    """Prefill and decoding speed and memory by length of history."""
    record, rows = newest(root, what), []
    for run in record["runs"]:
        for row in run["rows"]:
            floor = run.get("decode_floor_tokens_per_s")
            share = (
                f" ({100 * row['decode_tokens_per_s'] / floor:.0f}%)" if floor and record["preset"] != "tiny" else ""
            )
            rows.append(
                [
                    f"{run['attention']}, batch {run['batch']}",
                    LENGTHS.get(row["history"], f"{row['history']:,}"),
                    f"{row['prefill_tokens_per_s']:,.0f}",
                    f"{row['decode_tokens_per_s']:,.0f}{share}",
                    f"{row['cache_bytes'] / 2**20:,.1f}",
                    f"{row['file_bytes'] / 2**20:.2f}" if "file_bytes" in row else "-",
                    f"{row['device_bytes'] / 2**20:,.0f}" if row.get("device_bytes") else "-",
                ]
            )
    where = record["environment"].get("device") or f"{record['threads']} CPU threads"
    notes = " ".join(f"*{run['attention']}*: {run['note']}." for run in record["runs"] if "note" in run)
    note = f"Preset {record['preset']}, {where}, commit {record['environment']['commit']}. {notes}"
    columns = ["cache", "history", "prefill tokens/s", "decode tokens/s", "MiB a row", "MiB in a file", "MiB on device"]
    return Table("Streams", columns, rows, note).markdown()


def generate(root: Path) -> str:
    """`model.generate` beside transformers' Llama."""
    record, rows = newest(root, "generate-h200"), []
    for run in record["runs"]:
        batch = f"{run['rows']} rows" if run["rows"] > 1 else "1 row"
        llama = next(x for x in record["runs"] if x["rows"] == run["rows"] and x["way"] == "transformers' Llama")
        ratio = run["tokens_per_s"] / llama["tokens_per_s"]
        rows.append([batch, run["way"], f"{run['tokens_per_s']:,.0f}", f"{ratio:.1f}"])
    first, long = record["first_token"], record["reading"]
    same = ", ".join(f"{name} {share:.0%}" for name, share in record["agreement"].items())
    after = first["two_tokens_ms"] - first["prefill_ms"]
    note = (
        f"Preset {record['preset']}, bf16, prompts of {first['prompt']:,} tokens, whose prefill does not count. A warm "
        f"model gives its second token {after:.0f} ms after a prefill of {first['prefill_ms']:.0f} ms. A prompt of "
        f"{long['prompt']:,} tokens is read at {long['tokens_per_s'] / 1e3:,.0f}k tokens/s. Share of 64 tokens that "
        f"agree with the plain path before the first difference: {same}. {record['device']}, torch {record['torch']}, "
        f"transformers {record['transformers']}, commit {record['environment']['commit']}."
    )
    return Table("generate", ["batch", "model", "tokens/s", "times Llama"], rows, note).markdown()


def decoding(root: Path) -> str:
    """A decoding step by kernel."""
    record, rows = newest(root, "decoding-h200"), []
    for run in record["runs"]:
        batch, step, floor = f"{run['rows']} rows" if run["rows"] > 1 else "1 row", run["step_us"], run["floor_us"]
        rows.append([batch, "step", "-", f"{floor:.0f}", f"{step['fused']:.0f}", f"{step['plain']:.0f}"])
        for one in run["kernels"]:
            least = f"{one['floor_us']:.0f}" if "floor_us" in one else "-"
            rows.append([batch, one["kernel"].strip("_"), str(one["launches"]), least, f"{one['us']:.0f}", "-"])
    columns = ["batch", "what", "launches", "floor", "our kernels", "torch's"]
    note = (
        f"Microseconds; preset {record['preset']} with half a block open. A step is a captured graph whose kernels "
        f"overlap; kernels are timed one after the other. {record['device']}, torch {record['torch']}, "
        f"{record['date']}, commit {record['environment']['commit']}."
    )
    return Table("A decoding step", columns, rows, note).markdown()


def operators(root: Path) -> str:
    """Building operators, on a CPU and on a GPU."""
    records = [newest(root, f"operators-{device}") for device in ("cpu", "cuda")]

    def cell(one: dict[str, Any]) -> str:
        # Below 10 MB the peak is the allocator's.
        peak = f", {one['peak_over_returned']:.1f}x" if one["returned_mb"] > 10 else ""
        return f"{one['seconds']:.2g} s{peak}"

    rows = [
        [here["case"], cell(here), cell(there)]
        for here, there in zip(*(record["results"] for record in records), strict=True)
    ]
    columns = ["case", f"{records[0]['device']}, {records[0]['threads']} threads", records[1]["device"]]
    note = (
        f"Seconds, and peak memory over what is returned; {records[0]['date']}, torch {records[1]['torch']} on the GPU."
    )
    return Table("Building operators", columns, rows, note).markdown()


def page(root: Path, text: str) -> str:
    """`text` with its tables updated."""
    tables = {
        "training": training(root),
        "inference": inference(root),
        "attention": attention(root),
        "roofline": roofline(root),
        "peers": peers(root),
        "streaming": streaming(root, "streaming-h200"),
        "generate": generate(root),
        "decoding": decoding(root),
        "streaming-cpu": streaming(root, "streaming-cpu"),
        "operators": operators(root),
    }
    for mark, table in tables.items():
        text = insert(text, table, mark)
    return text


def write(root: Path) -> None:
    """Bring the page up to date."""
    path = root / "docs" / "speed.md"
    path.write_text(page(root, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write(Path.cwd())
