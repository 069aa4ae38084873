"""Streams of any length in constant memory: time and bytes at 2k to 1M tokens of history.

    python benchmarks/streaming.py --preset tiny --out benchmarks/results/streaming-cpu.json
    python benchmarks/streaming.py --preset 100m --batches 1 64 --full --out ...       # on a GPU

For each length: prefill tokens/s, decode tokens/s averaged over a whole block, bytes of the cache (with a block open,
and of the memory file), bytes the device holds. `--full` adds full attention with a KV cache, where that still fits.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

import elastic_memory as em
from elastic_memory.training.environment import environment


def clock(device):
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.inference_mode()
def prefill(model, cache, batch, start, stop, chunk):
    """Read tokens start..stop; seconds."""
    device = model.device.type
    ids = torch.randint(0, model.config.vocab_size, (batch, chunk), device=device)
    begin = clock(device)
    for place in range(start, stop, chunk):
        model(ids[:, : min(chunk, stop - place)], past_key_values=cache, logits_to_keep=1)
    return clock(device) - begin


@torch.inference_mode()
def decode(model, cache, batch, steps):
    """Seconds per step; the blocks that close on the way are part of it."""
    device = model.device.type
    ids = torch.randint(0, model.config.vocab_size, (batch, 1), device=device)
    for _ in range(3):
        model(ids, past_key_values=cache)
    begin = clock(device)
    for _ in range(steps):
        model(ids, past_key_values=cache)
    return (clock(device) - begin) / steps


def measure(model, lengths, batch, steps, static, chunk):
    cache, rows, read = em.MemoryCache(model, static=static), [], 0
    prefill(model, em.MemoryCache(model), batch, 0, 2 * chunk, chunk)  # warm-up
    for length in lengths:
        seconds, tokens = prefill(model, cache, batch, read, length, chunk), length - read
        read = length
        fork = cache.fork()
        step = decode(model, fork, batch, steps)
        held = torch.cuda.memory_allocated() if model.device.type == "cuda" else None
        row = {
            "history": length,
            "prefill_tokens_per_s": batch * tokens / seconds,
            "decode_tokens_per_s": batch / step,
            "cache_bytes": fork.nbytes() // batch,
            "device_bytes": held,
        }
        del fork
        if cache.locality.kind != "full":
            with tempfile.TemporaryDirectory() as folder:
                cache.save(Path(folder) / "memory")
                row["file_bytes"] = (Path(folder) / "memory").stat().st_size // batch
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 32768, 262144, 1048576])
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, help="tokens decoded; default one block")
    parser.add_argument("--full", action="store_true", help="full attention with a KV cache beside it")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    results = {"environment": environment(), "preset": args.preset, "threads": torch.get_num_threads(), "runs": []}
    kinds = {"elastic": dict(memory="elastic"), "full": dict(memory="none", local_attention="full")}
    for name, settings in kinds.items():
        if name == "full" and not args.full:
            continue
        for batch in args.batches:
            config = em.MemoryLlamaConfig.preset(args.preset, pad_heads=cuda and args.preset != "tiny", **settings)
            model = em.MemoryLlamaForCausalLM(config).eval()
            if cuda:
                model = model.cuda().bfloat16()
            # A full cache grows with history, and so does the time of each token: short ones and few steps will do.
            lengths = [n for n in args.lengths if name == "elastic" or n * batch <= 2**15]
            steps = args.steps or config.block_size
            print(f"{name}, batch {batch}", flush=True)
            rows = measure(
                model, lengths, batch, steps if name == "elastic" else min(steps, 256), name == "elastic",
                config.block_size,
            )  # fmt: skip
            results["runs"].append({"attention": name, "batch": batch, "rows": rows})
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
