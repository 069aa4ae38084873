"""The time of a decoding step (one token per row) by kernel, beside the time that reading its bytes would take.

    python benchmarks/decoding.py --preset 100m --rows 1 8 64 --out benchmarks/results/decoding-h200.json     # on a GPU
    python benchmarks/decoding.py --out decoding.json                                  # on any machine: the plain step

A step is a captured graph, replayed with half a block open. `fused` uses our own kernels, `plain` those of torch; the
two are interleaved. Kernels are timed one after the other: in a step they overlap, and each would include the time that
it waits for the one before.
"""

import argparse
import datetime
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import elastic_memory as em
from elastic_memory.common.environment import environment
from elastic_memory.fast import decoder

TERABYTES = 4.3
OURS = ("_project", "_attend", "_merge", "_expand", "_contract")


def decoders(model, rows: int, opened: int) -> dict[str, decoder.Decoder]:
    """A decoder of each kind, with its captured step."""
    size, device, kernels = model.config.block_size, model.device, decoder._kernels
    base = em.MemoryCache(model, static=True)
    ids = torch.randint(0, model.config.vocab_size, (rows, size + opened), device=device)
    for piece in ids.split(size, dim=1):
        model(piece, past_key_values=base, logits_to_keep=1)
    found = {}
    for kind in ("fused", "plain") if device.type == "cuda" else ("plain",):
        decoder._kernels = kernels if kind == "fused" else lambda device: None
        cache = base.fork()
        model(ids[:, :1], past_key_values=cache)
        found[kind] = cache.decoder
    decoder._kernels = kernels
    return found


def replay(own: decoder.Decoder, opened: int, repeats: int) -> float:
    """Seconds of a step."""
    reach = next(reach for reach in own.reaches if opened < reach)
    run = own.graphs[reach][0].replay if own.graphs else lambda: own._step(reach)
    own.positions.fill_(opened)
    wait = torch.cuda.synchronize if own.graphs else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - begin) / repeats


def kernels(own: decoder.Decoder, opened: int, steps: int = 5) -> dict[str, tuple[float, float]]:
    """Launches and microseconds of a step, by name of the kernel."""
    from elastic_memory.fast.kernels import decoding

    table: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    early, decoding._early = decoding._early, lambda x: {"EARLY": False}
    own._step(own.reaches[-1])  # compiles
    own.positions.fill_(opened)
    with profile(activities=[ProfilerActivity.CUDA]) as log:
        for _ in range(steps):
            own._step(own.reaches[-1])
            torch.cuda.synchronize()
    decoding._early = early
    for event in log.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name if event.name in OURS else "others"
            table[name][0] += 1 / steps
            table[name][1] += event.device_time / steps
    return {name: (count, us) for name, (count, us) in table.items()}


def least_bytes(model: em.MemoryLlamaForCausalLM, rows: int, opened: int) -> dict[str, float]:
    """What each of our kernels must read in a step: weights once, and the columns of every row."""
    config = model.config
    stored, layers, width = config.stored(), config.num_hidden_layers, config.hidden_size
    heads, inner = stored.num_attention_heads * stored.head_dim, config.intermediate_size
    columns = layers * opened + (config.memory_points or 0) * len(model.memories)
    numbers = {
        "_project": layers * 3 * width * heads,
        "_attend": 2 * rows * heads * columns,
        "_expand": layers * 2 * width * inner,
        "_contract": layers * width * inner,
        "_merge": layers * width * heads,
    }
    return {name: 2.0 * count for name, count in numbers.items()}


@torch.no_grad()
def measure(model, rows: int, repeats: int) -> dict:
    opened = model.config.block_size // 2
    found = decoders(model, rows, opened)
    taken: dict[str, list[float]] = {kind: [] for kind in found}
    for _ in range(5):
        for kind, own in found.items():
            taken[kind].append(replay(own, opened, repeats))
    result: dict = {"rows": rows, "opened": opened}
    result["step_us"] = {kind: round(1e6 * statistics.median(times), 1) for kind, times in taken.items()}
    if "fused" in found:
        floor = least_bytes(model, rows, opened)
        result["floor_us"] = round(sum(floor.values()) / TERABYTES / 1e6, 1)
        result["kernels"] = [
            {"kernel": name, "launches": round(count), "us": round(us, 1)}
            | ({"floor_us": round(floor[name] / TERABYTES / 1e6, 1)} if name in floor else {})
            for name, (count, us) in sorted(kernels(found["fused"], opened).items(), key=lambda item: -item[1][1])
        ]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=30, help="steps that are timed together")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    config = em.MemoryLlamaConfig.preset(args.preset, memory="elastic", pad_heads=cuda and args.preset != "tiny")
    model = em.MemoryLlamaForCausalLM(config).eval()
    if cuda:
        model = model.cuda().bfloat16()
        model.compile_blocks()
    record = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads",
        "torch": torch.__version__, "environment": environment(), "preset": args.preset, "runs": [],
    }  # fmt: skip
    for rows in args.rows:
        found = measure(model, rows, args.repeats)
        record["runs"].append(found)
        print(json.dumps(found), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
