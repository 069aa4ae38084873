"""Reading a long prompt in order against reading its blocks in parallel and joining them: time, and error of the state.

    python benchmarks/joining.py --preset tiny --out benchmarks/results/joining-cpu.json
    python benchmarks/joining.py --preset 100m --lengths 1048576 --out ...             # on a GPU
    torchrun --nproc-per-node 2 benchmarks/joining.py --lengths 65536 --out ...        # several processes, a share each

Both ways read the same row, interleaved. `state_error` is the relative distance of the joined state from the one read
in order, in the model's precision. `state_error_float32` is the same in float32, on the first --exact tokens, and
`logits_error_float32` the largest difference of the next token's logits there. `join_ms` is the time of one join of two
states, including building its operators.
"""

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch

import elastic_memory as em
from elastic_memory.common.environment import environment
from elastic_memory.streaming.reader import AT_ONCE


def clock(device):
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def prompt(model, length):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.config.vocab_size, (1, length), generator=generator).to(model.device)


@torch.inference_mode()
def in_order(model, ids, group=None):
    """The usual prefill: pieces of whole blocks, one after another."""
    cache = em.MemoryCache(model)
    begin = clock(model.device.type)
    for piece in ids.split(max(model.config.block_size, AT_ONCE), dim=1):
        model(piece, past_key_values=cache, logits_to_keep=1)
    return cache, clock(model.device.type) - begin


@torch.inference_mode()
def side_by_side(model, ids, group=None):
    """`MemoryCache.read`, which reads blocks in parallel."""
    cache = em.MemoryCache(model)
    begin = clock(model.device.type)
    cache.read(ids, group=group)
    return cache, clock(model.device.type) - begin


def distance(cache, expected):
    """The relative distance between the states of two caches."""
    pairs = zip(cache.streams, expected.streams, strict=True)
    states = [(a.double(), b.double()) for one, two in pairs for a, b in zip(one.state, two.state, strict=True)]
    return max((float((a - b).norm() / b.norm()) for a, b in states), default=0.0)


@torch.inference_mode()
def agreement(model, ids, group):
    """Errors of states and of the next logits, in float32."""
    exact = em.MemoryLlamaForCausalLM(model.config).eval().to(model.device)
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    caches = [read(exact, ids, group)[0] for read in (in_order, side_by_side)]
    logits = [exact(ids[:, :1], past_key_values=cache).logits.double() for cache in caches]
    return distance(caches[1], caches[0]), float((logits[1] - logits[0]).abs().max())


@torch.inference_mode()
def join_ms(model):
    """Milliseconds of one join, its operators built anew each time."""
    memory = next(iter(model.memories.values()))
    state, times = tuple(part.double() for part in memory.start(1, model.device)), []
    for tokens in range(1, 8):
        begin = clock(model.device.type)
        memory.join(state, tokens, state, 1000)
        times.append(clock(model.device.type) - begin)
    return 1e3 * median(times[1:])


def measure(model, length, exact, repeats, group):
    ids, kinds = prompt(model, length), {"in_order": in_order, "side_by_side": side_by_side}
    for read in kinds.values():
        read(model, ids[:, : 2 * AT_ONCE], group)  # warm-up
    seconds, caches = {name: [] for name in kinds}, {}
    for _ in range(repeats):
        for name, read in kinds.items():
            caches[name], taken = read(model, ids, group)
            seconds[name].append(taken)
    row = {"tokens": length}
    row |= {f"{name}_tokens_per_s": length / median(times) for name, times in seconds.items()}
    row |= {f"{name}_seconds": times for name, times in seconds.items()}
    row["ratio"] = row["side_by_side_tokens_per_s"] / row["in_order_tokens_per_s"]
    row["state_error"] = distance(caches["side_by_side"], caches["in_order"])
    row["state_error_float32"], row["logits_error_float32"] = agreement(model, ids[:, :exact], group)
    row["join_ms"] = join_ms(model)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 1048576])
    parser.add_argument("--exact", type=int, default=131072, help="tokens on which float32 is compared")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cuda, group = torch.cuda.is_available(), None
    if "RANK" in os.environ:
        torch.distributed.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=10))
        group = torch.distributed.group.WORLD
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = em.MemoryLlamaForCausalLM(
        em.MemoryLlamaConfig.preset(args.preset, pad_heads=cuda and args.preset != "tiny")
    ).eval()
    if cuda:
        model = model.cuda().bfloat16()
    results = {
        "environment": environment(), "preset": args.preset, "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", 1)), "rows": [],
    }  # fmt: skip
    for length in args.lengths:
        row = measure(model, length, args.exact, args.repeats, group)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(row), flush=True)
            results["rows"].append(row)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    if group is not None:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
