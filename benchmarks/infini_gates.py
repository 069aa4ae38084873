"""Infini-Transformer's norm and gates on the smoke recipe: validation PPL by variant and seed, half an hour on a CPU.

python benchmarks/infini_gates.py --out benchmarks/results/infini-gates-cpu-DATE.json
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

import elastic_memory as em
from elastic_memory.common.environment import environment
from elastic_memory.data import prepare, samples
from elastic_memory.evaluation.inputs import Spread
from elastic_memory.evaluation.loading import load_model
from elastic_memory.training.recipe import load_recipe
from elastic_memory.training.session import train

# Memory, where the norm is, the gates' logits at the start, the scale of their learning rate.
VARIANTS = [
    ("none", None, None, 1.0), ("infini", "none", 0.0, 1.0), ("infini", "none", -3.0, 1.0),
    ("infini", "none", -2.0, 10.0), ("infini", "none", -3.0, 10.0), ("infini", "output", -3.0, 10.0),
    ("infini", "qk", -3.0, 10.0),
]  # fmt: skip


def measure(folder: Path, variant: tuple, seed: int) -> dict:
    memory, norm, gate, scale = variant
    options = {} if norm is None else {"memory_options": {"memory_norm": norm, "first_gate": gate}}
    recipe = load_recipe(f"smoke/{memory}").replace(
        **{
            "training.tokens": 300 * 4096,
            "training.seed": seed,
            "training.warmup": 0.04,
            "training.gate_lr_scale": scale,
            "model.config": options,
        }
    )
    out = folder / f"{memory}-{norm}-{gate}-{scale}-{seed}"
    train(recipe, folder / "rows", out)
    model = load_model(str(next(out.iterdir())))
    found = em.evaluation.perplexity(model, Spread(samples(folder / "rows", "test"), 64), batch_size=16)
    facts = {"memory": memory, "norm": norm, "gate": gate, "gate_lr_scale": scale, "seed": seed}
    return facts | {"ppl": found.ppl, "block0": found.by_block[0], "last_block": found.by_block[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        prepare("stdlib", Path(name) / "rows", tokenizer="bytes", length=512)
        rows = [measure(Path(name), variant, seed) for seed in options.seeds for variant in VARIANTS]
    options.out.write_text(json.dumps({**environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
