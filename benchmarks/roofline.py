"""The time of a training step by part: measured, the floor that the chip allows, and the gap between them.

    python benchmarks/roofline.py --presets 100m 200m 400m --out benchmarks/results/roofline-h200.json

A floor is what counted operations and bytes take at the best that was measured on an H200: 790 TFLOP/s for a large
bf16 product, 4.3 TB/s for a copy. Measured times are those of the step's own kernels, sorted into parts by the
operation that launched them; the rest of the step is gaps. Parts are those of Transformer++; with `--memory`, all other
kernels are in "memory and other", which has no floor.
"""

import argparse
import datetime
import json
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import elastic_memory as em
from elastic_memory.common.environment import environment

TERAFLOPS, TERABYTES, PEAK = 790, 4.3, 989
PARTS = (
    "projections of attention", "attention", "MLP products", "head", "cross-entropy", "norms and residuals", "rotary",
    "SwiGLU", "embedding", "optimizer, clipping, casts", "memory and other",
)  # fmt: skip


def floors(config: em.MemoryLlamaConfig, tokens: int) -> dict[str, tuple[float, float]]:
    """TFLOP and GB of each part, forward and backward, for heads without padding."""
    width, hidden, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    inner, layers = config.num_attention_heads * config.head_dim, config.num_hidden_layers
    with torch.device("meta"):
        parameters = em.MemoryLlamaForCausalLM(config).num_parameters()

    def product(count: int, into: int, out: int) -> tuple[float, float]:
        # Three products; each reads two and writes one of the activations or of their gradients.
        return count * 6 * tokens * into * out, count * 2 * tokens * 3 * (into + out)

    counts = {
        "projections of attention": product(4 * layers, width, inner),
        # Backward recomputes the scores: 2.5 times the forward pass.
        "attention": (layers * 3.5 * 2 * tokens * config.block_size * inner, layers * 2 * tokens * 12 * inner),
        "MLP products": product(3 * layers, width, hidden),
        "head": product(1, width, vocabulary),
        "cross-entropy": (0, 2 * 2 * tokens * vocabulary),
        "norms and residuals": (0, (2 * layers + 1) * 8 * 2 * tokens * width),
        "rotary": (0, layers * 8 * 2 * tokens * inner),
        "SwiGLU": (0, layers * 8 * 2 * tokens * hidden),  # 2 read, 1 written; 3 read, 2 written
        "embedding": (0, 16 * tokens * width),
        "optimizer, clipping, casts": (0, 38 * parameters),
    }
    return {part: (flop / 1e12, moved / 1e9) for part, (flop, moved) in counts.items()}


def part_of(operation: str, shapes: list, kernel: str, config: em.MemoryLlamaConfig, tokens: int) -> str:
    """The part a kernel belongs to, by the operation that launched it and by its name."""
    width, hidden, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    inner = config.num_attention_heads * config.stored().head_dim
    if "attention" in operation:
        return "attention"
    if operation in ("aten::mm", "aten::addmm", "aten::bmm"):
        sizes = {size for shape in shapes for size in shape} - {tokens}
        if vocabulary in sizes:
            return "head"
        if hidden in sizes:
            return "MLP products"
        return "projections of attention" if sizes <= {width, inner} else "memory and other"
    marks = {
        "cross-entropy": ("softmax", "nll", "_losses"),
        "SwiGLU": ("silu",),
        "rotary": ("cat_mul", "cat_clone_mul", "neg_slice"),
        "norms and residuals": ("rsqrt", "pow", "view_add"),
        "optimizer, clipping, casts": ("multi_tensor", "to_copy_t", "to_copy_0", "adam", "splitK"),
        "embedding": ("gather", "embedding", "scatter", "unrolled_elementwise"),
    }
    text = operation + kernel
    if not kernel.startswith("triton") and ("embedding" in text or "gather" in text):
        return "embedding"
    return next((part for part, words in marks.items() if any(word in text for word in words)), "memory and other")


def measured(preset: str, memory: str, rows: int, length: int, steps: int) -> dict:
    config = em.MemoryLlamaConfig.preset(preset, memory=memory, pad_heads=True)
    with torch.device("cuda"):
        model = em.MemoryLlamaForCausalLM(config).train()
    model.compile_blocks()
    ids = torch.randint(0, config.vocab_size, (rows, length), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / steps
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as recorded:
        step()
        torch.cuda.synchronize()
    tokens, times, names = rows * length, defaultdict(float), defaultdict(float)
    for event in recorded.events():
        for kernel in event.kernels:
            part = part_of(event.name, event.input_shapes, kernel.name, config, tokens)
            times[part] += kernel.duration / 1e3
            names[part, f"{event.name} {kernel.name}"[:120]] += kernel.duration / 1e3
    return {"seconds": seconds, "parts": dict(times), "kernels": names, "config": config, "tokens": tokens}


def table(preset: str, memory: str, found: dict) -> dict:
    """Parts with floor, measured time and gap, in milliseconds."""
    counts, lines = floors(found["config"], found["tokens"]), []
    for part in PARTS:
        flop, moved = counts.get(part, (0.0, 0.0))
        floor = max(flop / TERAFLOPS, moved / TERABYTES / 1e3) * 1e3
        time_ms = found["parts"].get(part, 0.0)
        numbers = {
            "tflop": flop,
            "gigabytes": moved,
            "floor_ms": floor,
            "measured_ms": time_ms,
            "gap_ms": time_ms - floor,
        }
        lines.append({"part": part} | {name: round(value, 2) for name, value in numbers.items()})
    step, busy, floor = found["seconds"] * 1e3, sum(found["parts"].values()), sum(line["floor_ms"] for line in lines)
    # As published figures count: no recomputation in attention's backward pass, 3 times the forward pass.
    model_tflop = sum(line["tflop"] * (3 / 3.5 if line["part"] == "attention" else 1) for line in lines)
    return {
        "preset": preset, "memory": memory, "tokens": found["tokens"],
        "step_ms": round(step, 1), "busy_ms": round(busy, 1), "floor_ms": round(floor, 1),
        "step_over_floor": round(step / floor, 2),
        "tokens_per_s": round(found["tokens"] / found["seconds"]),
        "share_of_989_tflops": round(model_tflop / found["seconds"] / PEAK, 3),
        "parts": lines,
        "largest_kernels": sorted(
            ([part, name, round(value, 2)] for (part, name), value in found["kernels"].items()), key=lambda row: -row[2]
        )[:60],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["100m"])
    parser.add_argument("--memory", default="none")
    parser.add_argument("--rows", type=int, default=4, help="samples of a step")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=8, help="timed without a profiler")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("a roofline needs a GPU")
    record = {
        "date": datetime.date.today().isoformat(), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "environment": environment(), "ceilings": {"bf16_tflops": TERAFLOPS, "terabytes_per_s": TERABYTES},
        "models": [],
    }  # fmt: skip
    for preset in args.presets:
        found = table(preset, args.memory, measured(preset, args.memory, args.rows, args.length, args.steps))
        record["models"].append(found | {"commit": record["environment"].get("commit")})
        print(f"{preset}: {found['step_ms']} ms a step, floor {found['floor_ms']}, {found['tokens_per_s']:,} tokens/s")
        for line in found["parts"]:
            print(f"  {line['part']:28s} floor {line['floor_ms']:6.1f}  measured {line['measured_ms']:6.1f}")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
