"""Which memory is worth its floats in a pretrained model, at little cost: only the layer with memory is trained.

    python benchmarks/frozen_trunk.py MODEL --adapted RUN --data ROWS --work WORK \\
      --out benchmarks/results/frozen-trunk-DATE.json

All layers get the same sliding window. The hidden states that enter layer `--layer` are then the same for every
design, so they are computed once and kept in WORK. Each design trains the attention of that layer (0.9M weights of
SmolLM2, and the memory's own) on the same rows in the same order. It is measured on test rows twice as long:
perplexity, LongPPL, and recall of repeated spans. Each seed trains on other rows.
RUN is MODEL fine-tuned without memory under that window (`elastic attach MODEL --memory none --local sliding`, then
`elastic train --from`). Without that, a model trained with full attention misses the first tokens of a text, which it
has learned to attend to. Without `--adapted`, designs start from MODEL itself; full attention and attention sinks
always use MODEL. Designs are those of `elastic reproduce real-model`; designs already in `--out` are skipped. Several
processes may write to one `--out`, for instance one per seed. `--save DIR` keeps whole models. On a CPU with Linux
MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 saves a fifth of the time.
"""

import argparse
import copy
import fcntl
import hashlib
import json
import math
import os
import time
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

from elastic_memory.common.environment import environment, hardware
from elastic_memory.common.files import write_json
from elastic_memory.common.strict import read_yaml
from elastic_memory.data import samples
from elastic_memory.evaluation.copies import copy_losses
from elastic_memory.evaluation.inputs import Spread, token_ids
from elastic_memory.evaluation.loading import load_model, starting_model, tokenizer_of
from elastic_memory.evaluation.losses import evaluating, whole_losses
from elastic_memory.evaluation.sinks import sink_losses
from elastic_memory.memory import MEMORIES
from elastic_memory.memory.counts import GATES
from elastic_memory.model import attach_memory, detach_memory
from elastic_memory.reproduction.real_measures import by_document, find_keys, key_loss
from elastic_memory.reproduction.real_model import Study
from elastic_memory.reproduction.tables.real_model import BASE, DESIGNS, PLANS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PIECE = 256 if DEVICE == "cpu" else 8192  # tokens whose logits are in memory at once
PLAN = (
    "split", "layer", "window", "block", "order", "length", "steps", "batch", "rows", "key_rows", "copy_rows",
    "span", "distances", "rate", "gate_rate",
)  # fmt: skip


def attached(model, design: str, layer: int, args):
    """The model with a sliding window in all layers, and the memory of a design in one."""
    settings = DESIGNS[design]
    kind = MEMORIES[settings["memory"]]
    sizes = {name: args.order for name in ("order", "points") if kind.has_option(name)}
    local = {"local_attention": "sliding", "block_size": args.block, "window": args.window}
    layers = None if design == BASE else [layer]
    return attach_memory(model, layers=layers, **settings, **sizes, **local)


def below(model, layer: int):
    """The model up to a layer, in place: its output is what enters that layer."""
    model.model.layers, model.model.norm = model.model.layers[:layer], nn.Identity()
    model.config.num_hidden_layers = layer
    return model


def above(model, layer: int):
    """The model from a layer on, in place: it takes what enters that layer as `inputs_embeds`."""
    model.model.layers = model.model.layers[layer:]
    model.config.num_hidden_layers = len(model.model.layers)
    return model


def trunk(args):
    """The model that all designs start from, without memory."""
    return copy.deepcopy(loaded_trunk(args.model, args.adapted))


@cache
def loaded_trunk(model, adapted):
    return (detach_memory(load_model(adapted)) if adapted else load_model(model)).float()


def narrow():
    return torch.autocast(DEVICE, torch.bfloat16)


def hidden_states(rows, length: int, name: str, args):
    """The hidden states that enter the layer, by row, in a file that is written once and read lazily."""
    path = args.work / f"{args.trunk}-{name}-{length}-{len(rows)}.safetensors"
    if not path.exists():
        lower = attached(below(trunk(args), args.layer), BASE, 0, args).bfloat16()
        lower.model.embed_tokens.float()  # for a residual stream in float32
        held = {}
        with evaluating(lower), narrow():
            for index, row in enumerate(rows):
                ids = token_ids(row)[None, :length].to(DEVICE)
                held[str(index)] = lower.model(ids).last_hidden_state[0].bfloat16().cpu()
                print(f"{name}: row {index + 1} of {len(rows)}", end="\r", flush=True)
        args.work.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")  # two processes may compute them at once
        save_file(held, own)
        own.rename(path)
    return safe_open(path, "pt")


def train(upper, rows, states, args) -> list[float]:
    """Fine-tune the layer's attention; the loss of each step, beyond the window."""
    upper.requires_grad_(False).bfloat16()  # what stays as it is; the residual stream is float32
    attention = upper.model.layers[0].self_attn.requires_grad_(True).float()
    named = dict(attention.named_parameters())
    gates = [one for name, one in named.items() if name.endswith(GATES)]
    others = [one for name, one in named.items() if not name.endswith(GATES)]
    groups = [{"params": gates, "lr": args.gate_rate}, {"params": others, "lr": args.rate}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0, betas=(0.9, 0.95))
    warm = max(1, args.steps // 10)

    def share(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.05 + 0.95 * (1 + math.cos(math.pi * (step - warm) / (args.steps - warm))) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    losses = []
    upper.train()
    for step in range(args.steps):
        chosen = range(step * args.batch, (step + 1) * args.batch)
        ids = torch.stack([token_ids(rows[index])[: args.length] for index in chosen]).to(DEVICE)
        with narrow():
            hidden = leaving(upper, states, chosen)[:, args.window : -1]
            losses.append(backward(upper.lm_head, hidden.flatten(0, 1), ids[:, args.window + 1 :].flatten()))
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"step {step + 1} of {args.steps}, loss {losses[-1]:.4f}", end="\r", flush=True)
    return losses


def leaving(upper, states, chosen):
    """The output of the last layer for some rows."""
    entering = torch.stack([states.get_tensor(str(index)) for index in chosen]).to(DEVICE).float()
    return upper.model(inputs_embeds=entering, use_cache=False).last_hidden_state


def backward(head, hidden, targets) -> float:
    """Backpropagate the mean loss of all tokens and return it; only the logits of `PIECE` tokens exist at a time."""
    leaf, total = hidden.detach().requires_grad_(), torch.zeros((), device=DEVICE)
    for some, those in zip(leaf.split(PIECE), targets.split(PIECE), strict=True):
        loss = cross_entropy(head(some).float(), those, reduction="sum") / len(targets)
        loss.backward()
        total += loss.detach()
    hidden.backward(leaf.grad)
    return total.item()


def token_losses(upper, rows, states):
    """The loss of every token of every row but its first."""
    losses = []
    with evaluating(upper), narrow():
        for index, row in enumerate(rows):
            hidden, targets = leaving(upper, states, [index])[0, :-1], token_ids(row)[1:].to(DEVICE)
            pieces = zip(hidden.split(PIECE), targets.split(PIECE), strict=True)
            parts = [cross_entropy(upper.lm_head(some).float(), those, reduction="none") for some, those in pieces]
            losses.append(torch.cat(parts).double().cpu().numpy())
            print(f"measured row {index + 1} of {len(rows)}", end="\r", flush=True)
    return losses


def text_losses(upper, args, texts):
    """The same for rows of token ids that were made for a measurement; their hidden states are kept in WORK too."""
    states = hidden_states(texts, texts.shape[1], hashlib.sha256(texts.numpy().tobytes()).hexdigest()[:16], args)
    return torch.stack([torch.from_numpy(row) for row in token_losses(upper, texts, states)])


def recall(read, rows, args):
    """For each distance the losses of `copy_losses`: copies, and the same spans in a text where they are new."""
    some = Spread(rows, args.copy_rows)
    return {str(distance): copy_losses(read, some, distance, args.span) for distance in args.distances}


def adaptation(args):
    """The settings with which RUN was fine-tuned, for the record."""
    if not args.adapted:
        return None
    training = read_yaml((Path(args.adapted) / "recipe.yaml").read_text(), "recipe.yaml")["training"]
    return {name: training[name] for name in ("tokens", "length", "batch_tokens", "learning_rate", "seed")}


def check(design: str, rows, args) -> float:
    """The largest difference in logits between the upper layers and the whole model, in float32."""
    whole = attached(trunk(args), design, args.layer, args)
    upper = attached(above(trunk(args), args.layer), design, 0, args)
    ids = token_ids(rows[0])[None, : 2 * args.window].to(DEVICE)
    with evaluating(whole), evaluating(upper):
        expected = whole(ids, output_hidden_states=True, use_cache=False)
        found = upper(inputs_embeds=expected.hidden_states[args.layer], use_cache=False)
    return float((found.logits - expected.logits).abs().max())


def save(upper, design: str, args) -> None:
    """Write the whole model with the trained layer to a folder, which every command reads."""
    whole = attached(trunk(args), design, args.layer, args)
    whole.model.layers[args.layer].self_attn.load_state_dict(upper.model.layers[0].self_attn.state_dict())
    folder = args.save / f"{design.replace(' ', '-')}-seed{args.seed}"
    tokenizer_of(args.model).save(folder)
    whole.save_pretrained(folder)


def trained(design: str, tested, outputs, args):
    """Train a design; returns its record and its losses on the test rows."""
    seen = samples(args.data, "train")
    if len(seen) < args.steps * args.batch:
        raise SystemExit(f"{args.data} has {len(seen)} training rows, {args.steps} steps of {args.batch} need more")
    order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(args.seed)).tolist()
    rows = [seen[index] for index in order[: args.steps * args.batch]]
    inputs = hidden_states(rows, args.length, f"train-seed{args.seed}", args)
    torch.manual_seed(args.seed)
    upper = attached(above(trunk(args), args.layer), design, 0, args)
    begun = time.monotonic()
    losses = train(upper, rows, inputs, args)
    after = time.monotonic()
    found = token_losses(upper, tested, outputs)
    blend = upper.model.layers[0].memory.blend
    run = {
        "losses": [round(loss, 5) for loss in losses],
        "blend": None if blend is None else [round(value, 4) for value in blend.tolist()],
        "memory": upper.memory_report(),
        "recall": recall(partial(text_losses, upper, args), tested, args),
        "logits_off": check(design, tested, args),
        "seconds": {"training": after - begun, "measuring": time.monotonic() - after},
    }
    if args.save:
        save(upper, design, args)
    return run, found


def untrained(design: str, tested, args):
    """The record and losses of the untouched model, with full attention or attention sinks."""
    model = load_model(args.model).bfloat16()
    sinks = DESIGNS[design]["untrained"] == "sinks"
    one = partial(sink_losses, model, window=args.window) if sinks else partial(whole_losses, model)

    def read(texts):
        losses = []
        for ids in texts:
            losses.append(one(ids[None])[0])
            print(f"{design}: row {len(losses)} of {len(texts)}", end="\r", flush=True)
        return torch.stack(losses)

    losses = read(torch.stack([token_ids(row) for row in tested])).double().numpy()
    return {"recall": recall(read, tested, args)}, list(losses)


@contextmanager
def recording(path, plan, data):
    """Lock, read and at the end write the record; exits if it is of another plan."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = json.loads(path.read_text()) if path.exists() else {"plan": plan, "data": data, "runs": {}}
        if (content["plan"], content["data"]) != (plan, data):
            raise SystemExit(f"{path} is the record of another plan: {content['plan']}")
        yield content
        write_json(path, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, a folder or a name on the hub")
    parser.add_argument("--adapted", help="a run of MODEL without memory that all designs start from")
    parser.add_argument(
        "--data", type=Path, required=True, help="rows in the model's tokens, twice as long as --length"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for hidden states")
    parser.add_argument("--designs", default=f"{BASE}, wider window, elastic cells, key-value means")
    parser.add_argument("--split", default="test", help="the split that is measured")
    parser.add_argument("--layer", type=int, default=20)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--order", type=int, default=256)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a training row")
    parser.add_argument("--steps", type=int, default=48, help="training steps")
    parser.add_argument("--batch", type=int, default=1, help="rows of a step")
    parser.add_argument("--rows", type=int, default=16, help="rows that are measured")
    parser.add_argument(
        "--key-rows", type=int, default=5, help="of these: rows in which LongPPL's key tokens are found"
    )
    parser.add_argument("--copy-rows", type=int, default=6, help="rows that get copies, for recall")
    parser.add_argument("--span", type=int, default=64, help="tokens of a copy")
    parser.add_argument("--distances", type=int, nargs="+", default=[1024, 4096], help="of a copy from its original")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--gate-rate", type=float, default=3e-2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="folder for the models")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    plan = {name: getattr(args, name) for name in PLAN} | {"model": Path(args.model).name, "adapted": adaptation(args)}
    study = Study(PLANS["smoke"], args.work, args.data.parent, args.model)
    study.unpack()
    args.model = study.model
    rows = samples(args.data, args.split)
    plan["weights"] = starting_model(args.adapted).sha256 if args.adapted else study.weights_hash()
    facts = [plan["weights"], rows.fingerprint, args.layer, args.window, args.rows]
    args.trunk = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    data = {"corpus": args.data.name, "sha256": rows.fingerprint}
    tested = Spread(rows, args.rows)
    outputs = hidden_states(tested, rows.length, args.split, args)
    with recording(args.out, plan, data) as content:
        if "keys" not in content:
            content["keys"] = find_keys(load_model(args.model).bfloat16(), tested, args.key_rows, args.window)
        keys, runs = content["keys"], content["runs"]
    for design in (name.strip() for name in args.designs.split(",")):
        if str(args.seed) in runs.get(design, {}):
            continue
        free = "untrained" in DESIGNS[design]
        run, losses = untrained(design, tested, args) if free else trained(design, tested, outputs, args)
        run |= {
            "documents": by_document(tested, losses, args.window),
            "longppl": key_loss(losses, keys),
            "environment": environment() | {"hardware": hardware()},
        }
        with recording(args.out, plan, data) as content:
            content["runs"].setdefault(design, {})[str(args.seed)] = run
        print(design, {name: run.get(name) for name in ("blend", "seconds", "logits_off")}, flush=True)


if __name__ == "__main__":
    main()
