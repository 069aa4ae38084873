"""What sliding attention costs in training: windows against blocks of as many tokens, without memory and with one.

    python benchmarks/sliding.py --out benchmarks/results/sliding-h200.json     # on a GPU: the shape of SmolLM2-135M
    python benchmarks/sliding.py --tiny --out sliding.json                      # on any machine

A step is forward, backward, clipping and AdamW in bf16, with compiled layers; models are interleaved in one process.
Ratios are times relative to block-local attention with the same memory. Losses of the path without masks are compared
with those of the path with masks first.
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import torch

import elastic_memory as em
from elastic_memory.common.environment import environment
from elastic_memory.evaluation.throughput import Workload, throughput
from elastic_memory.fast import windows

SMOLLM2 = dict(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    head_dim=64, vocab_size=49152, block_size=1024,
)  # fmt: skip
TINY = dict(num_hidden_layers=2, block_size=16)
ELASTIC = dict(memory="elastic", memory_order=540, memory_points=512)


def variants(shape: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of the models that are timed: the first of each memory is the base of its ratios."""
    size, layer = shape["block_size"], shape["num_hidden_layers"] * 2 // 3
    found = {}
    for memory, settings in {"none": {"memory": "none"}, "elastic": ELASTIC | {"memory_layers": [layer]}}.items():
        found[f"{memory}, block"] = settings
        found[f"{memory}, sliding"] = settings | {"local_attention": "sliding"}
        found[f"{memory}, sliding, blocks of {size // 4}"] = settings | {
            "local_attention": "sliding", "window": size, "block_size": size // 4,
        }  # fmt: skip
    return found


def build(shape: dict[str, Any], settings: dict[str, Any], device: str) -> Any:
    torch.manual_seed(0)
    return em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny", **(shape | settings))).to(device)


@torch.no_grad()
def losses(shape: dict[str, Any], settings: dict[str, Any], length: int, device: str) -> dict[str, float]:
    """The loss of one row, by the kernels where they run, and by masks."""
    model = build(shape, settings, device)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1)).to(device)
    found, supports = {}, windows.supports
    for name, chosen in {"loss": supports, "loss_with_masks": lambda query, key: False}.items():
        windows.supports = chosen
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found[name] = model(ids, labels=ids, logits_to_keep=1).loss.item()
    windows.supports = supports
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--length", type=int, help="tokens of a row (default 16,384)")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--only", nargs="+", metavar="MEMORY", default=["none", "elastic"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device, shape = "cuda" if torch.cuda.is_available() else "cpu", TINY if args.tiny else SMOLLM2
    length = args.length or (96 if args.tiny else 16_384)
    work = Workload(length, args.rows, decoded=0, repeats=args.repeats)
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads",
        "torch": torch.__version__, "environment": environment(), "shape": shape, "length": length, "rows": args.rows,
        "models": [],
    }  # fmt: skip
    for memory in args.only:
        chosen = {name: own for name, own in variants(shape).items() if name.startswith(f"{memory},")}
        checks = {name: losses(shape, own, length, device) for name, own in chosen.items() if "sliding" in name}
        models = {name: build(shape, own, device) for name, own in chosen.items()}
        for model in models.values():
            if not args.tiny:
                model.compile_blocks()
        for row in throughput(models, work):
            found = {
                "name": row.name,
                "training_tokens_per_s": round(row.training * length),
                "training_time_ratio": round(1 / row.training_ratio, 3),
                "evaluation_time_ratio": round(1 / row.inference_ratio, 3),
                "peak_memory": row.peak_memory,
                **checks.get(row.name, {}),
            }
            record["models"].append(found)
            print(json.dumps(found), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
