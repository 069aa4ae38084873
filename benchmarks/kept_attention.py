"""How much of full attention a memory keeps in one layer of a pretrained model: a first look at designs, untrained.

    python benchmarks/kept_attention.py MODEL --data ROWS --out benchmarks/results/kept-attention-DATE.json

The layers below see a sliding window alone. In layer `--layer`, what each query head returns with a design, blended
with attention to the window as well as a blend can, is compared with what it returns if it sees all tokens: the squared
error, relative to that of the window alone, in the second half of some rows. 0 is full attention, 1 the window. The
first block of a row is left out: heads look at a text's first token whatever it is (attention sink), which would
outweigh all else. Designs are those of `elastic reproduce real-model`; options may follow a name, their values as JSON:
"merged far rounds=1". MODEL is a GGUF file, a folder, a name on the hub or a run.
"""

import argparse
import json
import statistics
from argparse import Namespace
from pathlib import Path

import torch

from benchmarks.frozen_trunk import above, attached, below
from elastic_memory.common.environment import environment, hardware
from elastic_memory.common.files import write_json
from elastic_memory.data import samples
from elastic_memory.evaluation.inputs import Spread, token_ids
from elastic_memory.evaluation.loading import load_model
from elastic_memory.evaluation.losses import evaluating
from elastic_memory.model import detach_memory
from elastic_memory.reproduction.tables.real_model import BASE, DESIGNS

FULL = "wider window"  # by the length of the rows
DEFAULT = "wider window, elastic cells, key-value means, merged far, merged slow keys"


def loaded(model: str):
    """The model without memory, in float32."""
    found = load_model(model)
    return (detach_memory(found) if hasattr(found, "memories") else found).float()


def entering(rows, args):
    """The hidden states that enter the layer, by row, without those of the first block."""
    model = attached(below(loaded(args.model), args.layer), BASE, 0, args)
    with evaluating(model):
        return [model.model(token_ids(row)[None], use_cache=False).last_hidden_state[:, args.block :] for row in rows]


def returned(text: str, states, args):
    """What the heads of the layer return with a design in full use, one [token, head, dim] for each row."""
    words = text.split()
    name = " ".join(word for word in words if "=" not in word)
    changes = dict(word.split("=") for word in words if "=" in word)
    model = above(loaded(args.model), args.layer)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    if changes:
        DESIGNS[text] = DESIGNS[name] | {option: json.loads(value) for option, value in changes.items()}
    model = attached(model, text, 0, args)
    for memory in model.memories.values():
        if memory.blend is not None:
            memory.blend.data.fill_(1)
    attention, found = model.model.layers[0].self_attn, []

    def keep(_, inputs) -> None:
        found.append(inputs[0][0].unflatten(-1, (-1, attention.head_dim)))

    attention.o_proj.register_forward_pre_hook(keep)
    with evaluating(model):
        for state in states:
            model.model(inputs_embeds=state, use_cache=False)
    return found


def errors(design, window, full) -> list[float]:
    """For each head what the best blend b leaves of |full - window|^2 in |window + b (design - window) - full|^2."""
    mine, local, exact = (torch.cat([x[len(x) // 2 :] for x in rows]).double() for rows in (design, window, full))
    change, wanted = mine - local, exact - local
    product, squared, whole = ((a * b).sum((0, 2)) for a, b in ((change, wanted), (change, change), (wanted, wanted)))
    return (1 - product**2 / (squared * whole).clamp_min(1e-30)).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, a folder, a name on the hub or a run")
    parser.add_argument("--data", type=Path, required=True, help="rows in the model's tokens")
    parser.add_argument("--designs", default=DEFAULT)
    parser.add_argument("--layer", type=int, default=20)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--order", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--split", default="validation", help="where the rows are from")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tested = samples(args.data, args.split)
    states = entering(Spread(tested, args.rows), args)
    whole = Namespace(**vars(args) | {"order": tested.length})
    window, full = returned(BASE, states, args), returned(FULL, states, whole)
    plan = {name: getattr(args, name) for name in ("layer", "window", "block", "order", "rows", "split")}
    record = {
        "plan": plan | {"model": Path(args.model).name},
        "data": {"corpus": args.data.name, "sha256": tested.fingerprint},
        "environment": environment() | {"hardware": hardware()},
        "errors": {},
    }
    for design in (name.strip() for name in args.designs.split(",")):
        record["errors"][design] = errors(returned(design, states, args), window, full)
        print(f"{design:40} {statistics.mean(record['errors'][design]):.3f}", flush=True)
        write_json(args.out, record)


if __name__ == "__main__":
    main()
