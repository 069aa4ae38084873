"""Does full attention learn more slowly than attention in blocks? Block 0, where both are the same function, tells.

Both start from the same weights and see the same samples; float32 on a CPU, no kernels of our own.

python benchmarks/full_attention.py --out benchmarks/results/full-attention-cpu-DATE.json
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

LENGTH = 1024  # 16 blocks, as in the tables


def measure(folder: Path, attention: str, steps: int, seed: int) -> dict:
    recipe = load_recipe("smoke/none").replace(
        **{
            "training.length": LENGTH,
            "training.tokens": steps * 4096,
            "training.seed": seed,
            "training.warmup": 0.04,
            "model.config": {"local_attention": attention},
        }
    )
    out = folder / f"{attention}-{steps}-{seed}"
    trained = train(recipe, folder / "rows", out)
    model, rows = load_model(str(next(out.iterdir()))), Spread(samples(folder / "rows", "test"), 32)
    found = em.evaluation.perplexity(model, rows, batch_size=8)
    facts = {"attention": attention, "steps": steps, "seed": seed, "data": trained["data"]}
    return facts | {"ppl": found.ppl, "block0": found.by_block[0], "last_block": found.by_block[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        prepare("stdlib", Path(name) / "rows", tokenizer="bytes", length=LENGTH)
        pairs = [(kind, seed) for seed in options.seeds for kind in ("block", "full")]
        rows = [measure(Path(name), kind, options.steps, seed) for kind, seed in pairs]
    options.out.write_text(json.dumps({**environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
