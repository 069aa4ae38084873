"""Streams of any length in constant memory: time and bytes at 2k to 1M tokens of history.

    python benchmarks/streaming.py --preset tiny --out benchmarks/results/streaming-cpu.json
    python benchmarks/streaming.py --preset 100m --batches 1 64 --full --out ...       # on a GPU

For each length: prefill tokens/s; decode tokens/s, averaged over a whole block, including its end and its share of
building operators; bytes of the cache with an open block, of the memory file, and of the device. The floor of a
decoding step is the time to read its weights, half a block and the memory tokens at 4.3 TB/s. `--full` adds full
attention with a KV cache, where that fits, and our memory without captured steps, as full attention has none.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

import elastic_memory as em
from elastic_memory.common.environment import environment
from elastic_memory.memory.elastic import ElasticMemory
from elastic_memory.streaming.reader import AT_ONCE


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
    for _ in range(3):  # closes the block that the prompt left full, captures the step
        model(ids, past_key_values=cache)
    begin = clock(device)
    for _ in range(steps):
        model(ids, past_key_values=cache)
    return (clock(device) - begin) / steps


def building(model, block_size):
    """Seconds per block for operators, which are built for a stretch of blocks at once."""
    memory = next(iter(model.memories.values()), None)
    if not isinstance(memory, ElasticMemory):
        return 0.0
    device, blocks, seconds = model.device, 16, []
    for far in (2**20, 2**21):  # the first time warms up
        begin = clock(device.type)
        for block in range(far, far + blocks):
            memory.bank.step(block * block_size, (block + 1) * block_size, device)
            memory.bank.reconstruction((block + 1) * block_size, device, every=block_size)
        seconds.append((clock(device.type) - begin) / blocks)
    return seconds[-1]


def floor(model, batch):
    """Tokens/s if a step took only the time of reading its bytes."""
    config = model.config
    columns = config.num_hidden_layers * config.block_size / 2 + (config.memory_points or 0) * len(model.memories)
    held = 2 * config.num_key_value_heads * config.head_dim * columns
    weights = model.num_parameters() - (0 if config.tie_word_embeddings else model.model.embed_tokens.weight.numel())
    return batch / ((weights + batch * held) * model.dtype.itemsize / 4.3e12)


def measure(model, lengths, batch, steps, static):
    cache, rows, read = em.MemoryCache(model, static=static), [], 0
    block, chunk = model.config.block_size, max(model.config.block_size, AT_ONCE // batch)
    operators = building(model, block)
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
            "decode_tokens_per_s": batch / (step + operators / block),
            "operators_ms_per_block": 1e3 * operators,
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
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 32768, 262144, 1048576])
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, help="tokens decoded; default one block")
    parser.add_argument("--full", action="store_true", help="full attention with a KV cache beside it")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    results = {"environment": environment(), "preset": args.preset, "threads": torch.get_num_threads(), "runs": []}
    elastic, full = dict(memory="elastic"), dict(memory="none", local_attention="full")
    kinds = {"elastic": (elastic, True), "elastic, steps not captured": (elastic, False), "full": (full, False)}
    for name, (settings, static) in kinds.items():
        if not static and not args.full:
            continue
        for batch in args.batches:
            config = em.MemoryLlamaConfig.preset(args.preset, pad_heads=cuda and args.preset != "tiny", **settings)
            model = em.MemoryLlamaForCausalLM(config).eval()
            if cuda:
                model = model.cuda().bfloat16()
                model.compile_blocks()
            # A full cache grows with the history, and so does the time of each token: only short histories, few steps.
            lengths = [n for n in args.lengths if n * batch <= (2**21 if static else 2**15)]
            steps = args.steps or (config.block_size if static else 128)
            print(f"{name}, batch {batch}", flush=True)
            rows = measure(model, lengths, batch, steps, static)
            run = {"attention": name, "batch": batch, "rows": rows}
            if settings is elastic:
                run["decode_floor_tokens_per_s"] = floor(model, batch)
            results["runs"].append(run)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
