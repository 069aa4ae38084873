"""The error of approximate joins: models with several memory layers, or with sliding attention.

    python benchmarks/approximate_joins.py --out benchmarks/results/approximate-joins.json

Small byte-level models are trained on Python's standard library. Each model reads four files separately, joins the
memories, and predicts the next block of the last file. This is compared with reading the files in order: losses in nats
per byte (also without the earlier files), the relative distance of the states, and the mean KL divergence of the
predictions. As a control, joins are exact in a model with one memory layer and attention inside blocks.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F

import elastic_memory as em
from elastic_memory.common.environment import environment

SHAPE = dict(hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
             vocab_size=256, block_size=64)  # fmt: skip
ELASTIC = dict(memory="elastic", memory_order=32, memory_points=32)
MODELS = {
    "elastic, one layer": ELASTIC | dict(memory_layers=[2]),
    "elastic, two layers": ELASTIC | dict(memory_layers=[1, 2]),
    "elastic, four layers": ELASTIC | dict(memory_layers=[0, 1, 2, 3]),
    "elastic, one layer, sliding": ELASTIC | dict(memory_layers=[2], local_attention="sliding"),
    "infini, linear, four layers": dict(memory="infini", memory_options={"update": "linear"}),
}


def texts(device):
    """Bytes of the standard library: one text to train on, and 16 files to read."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    bodies = [torch.tensor(list(path.read_bytes())) for path in files if path.stat().st_size > 8192]
    return torch.cat(bodies[16:]).to(device), [body.to(device) for body in bodies[:16]]


def train(model, text, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 20, (steps - step) / (steps / 2))
        starts = torch.randint(len(text) - 512, (8,), generator=generator).tolist()
        rows = torch.stack([text[start : start + 512] for start in starts])
        loss = model(rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def read(model, parts, closed):
    cache = em.MemoryCache(model)
    for part in parts:
        if closed and cache.columns:
            cache.close()
        model(part[None], past_key_values=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def compare(model, bodies, length):
    """Over several groups of four files: losses of the next block, distance of states, divergence of predictions."""
    block, totals = model.config.block_size, []
    for first in range(0, len(bodies), 4):
        parts = [body[:length] for body in bodies[first : first + 4]]
        following = bodies[first + 3][None, length : length + block]
        ordered = read(model, parts, closed=model.config.local_attention == "block")
        joined = em.MemoryCache.join([read(model, [part], False) for part in parts], approximate=True)
        pairs = [(a.double(), b.double()) for one, two in zip(joined.streams, ordered.streams, strict=True)
                 for a, b in zip(one.state, two.state, strict=True)]  # fmt: skip
        distance = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        alone = read(model, parts[3:], False)
        logs = [
            model(following, past_key_values=one).logits[0, :-1].log_softmax(-1) for one in (ordered, joined, alone)
        ]
        losses = [float(F.nll_loss(log, following[0, 1:])) for log in logs]
        divergence = float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())
        totals.append([*losses, distance, divergence])
    names = ["loss_in_order", "loss_joined", "loss_without_earlier_files", "state_distance", "divergence"]
    return dict(zip(names, torch.tensor(totals).mean(0).tolist(), strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--length", type=int, default=1000, help="bytes of each file that are read")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, bodies = texts(device)
    results = {"environment": environment(), "steps": args.steps, "length": args.length, "models": {}}
    for name, settings in MODELS.items():
        torch.manual_seed(0)
        model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny", **(SHAPE | settings))).to(device)
        trained = train(model.train(), text, args.steps)
        row = {"training_loss": trained} | compare(model.eval(), bodies, args.length)
        results["models"][name] = row
        print(name, json.dumps(row), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
