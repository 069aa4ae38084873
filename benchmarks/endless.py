"""Perplexity, memory and time by position in one very long stream.

    python benchmarks/endless.py RUN --text rows16k/books --beside SmolLM2.gguf --out benchmarks/results/endless.json

RUN is a model with memory, for instance one that `elastic reproduce real-model --keep-weights` left. `--text` is a text
file, or a folder of prepared rows, whose test rows are read one after another. The model reads `--tokens` of it as one
stream. The model `--beside` reads the first `--until` tokens with full attention, far enough to see where it breaks.
A plot of the perplexities stands beside the JSON, as PNG.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

from elastic_memory.common.environment import environment
from elastic_memory.data import samples
from elastic_memory.evaluation.inputs import token_ids
from elastic_memory.evaluation.loading import load_model, tokenizer_of
from elastic_memory.evaluation.losses import empty_cache, evaluating, token_losses
from elastic_memory.report import plots

PARTS = 128  # of a stream: one row of results each


def tokens_of(text, model, count):
    """The first `count` tokens of a text."""
    if (text / "manifest.json").exists():
        rows = samples(text, "test")
        found = torch.cat([token_ids(rows[i]) for i in range(min(len(rows), -(-count // rows.length)))])
    else:
        found = token_ids(tokenizer_of(model).encode(text.read_text(encoding="utf-8")))
    if len(found) < count:
        raise SystemExit(f"{text} has {len(found):,} tokens: give more text, or --tokens {len(found)}")
    return found[:count]


def held_bytes(cache):
    """Bytes of keys, values and memory, in a MemoryCache or a cache of transformers."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes()
    return sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))


def clock(model):
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def stream(model, ids, call, narrow):
    """For each part: where it ends, its perplexity, seconds per 1,000 tokens, bytes of the cache and of the device."""
    cuda, rows, cache = model.device.type == "cuda", [], empty_cache(model)
    part = max(1, len(ids) // PARTS // call) * call
    with evaluating(model), torch.autocast(model.device.type, torch.bfloat16, enabled=narrow):
        for first in range(0, len(ids) - 1, part):
            last, losses = min(first + part, len(ids) - 1), []
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            begun = clock(model)
            for start in range(first, last, call):
                end = min(start + call, last)
                output = model(ids[None, start:end].to(model.device), past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                losses.append(token_losses(output.logits, ids[None, start + 1 : end + 1]))
            seconds = clock(model) - begun
            rows.append({
                "position": last,
                "ppl": math.exp(torch.cat(losses, dim=1).double().mean()),
                "seconds_per_1000": 1000 * seconds / (last - first),
                "cache_bytes": held_bytes(cache),
                "device_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model with memory: a run or a folder")
    parser.add_argument("--text", type=Path, required=True, help="a text file, or a folder of prepared rows")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--call", type=int, default=1024, help="tokens read at a time")
    parser.add_argument("--beside", help="a model without memory, such as the untouched one")
    parser.add_argument("--until", type=int, default=16384, help="tokens that the model --beside reads")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 on a CPU too, as on a GPU")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    narrow = args.bf16 or torch.cuda.is_available()
    ids = tokens_of(args.text, args.model, args.tokens)
    streams = {"with memory": (args.model, ids)}
    if args.beside:
        streams["full attention"] = (args.beside, ids[: args.until])
    results = {"environment": environment(), "text": args.text.name, "tokens": len(ids), "call": args.call, "runs": []}
    results |= {"precision": "bfloat16" if narrow else "float32"}
    for name, (path, some) in streams.items():
        print(name, flush=True)
        rows = stream(load_model(path), some, args.call, narrow)
        results["runs"].append({"attention": name, "model": Path(path).name, "rows": rows})
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    series = {
        run["attention"]: tuple([row[key] for row in run["rows"]] for key in ("position", "ppl"))
        for run in results["runs"]
    }
    figure = plots.lines(series, "tokens read", "perplexity")
    figure.axes[0].set(xscale="log", yscale="log")
    plots.save(figure, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
