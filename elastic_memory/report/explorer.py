"""What the memory microscope looks at: documents read by models, and memory files.

A document is read three times: with its memory, with memory erased at every block (P4), and once more block by block to
see what each head looks at. All numbers are rounded for the page; `evaluation` has them in full.
"""

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from elastic_memory.common.defaults import MEMORY_SUFFIX
from elastic_memory.data.tokenizers import Skip, Tokenizer, encode, pieces
from elastic_memory.evaluation.losses import block_size_of, has_blocks, streamed_losses, window_losses
from elastic_memory.evaluation.reconstruction import Signal, keys_and_values, reconstructed
from elastic_memory.memory import MEMORIES
from elastic_memory.memory.contract import Geometry
from elastic_memory.operators import Bank
from elastic_memory.report.attention_view import views
from elastic_memory.report.single_page import render
from elastic_memory.sampling import SAMPLINGS
from elastic_memory.shapes import Float, Int, Tensor
from elastic_memory.streaming import memory_file

SCRIPTS = ("hippo.js", "signals.js", "document.js", "explore.js")
PASSES = 4  # of a model over a document
FEATURES = 12  # of keys and values of one document or memory file that the page draws
ORDERS = (16, 64, 256)  # of memory whose reconstructions are compared, beside the model's own
AGES = 24  # groups of tokens by age


def page(subjects: Sequence[dict[str, Any]], title: str = "Memory microscope", *, live: bool = False) -> str:
    """The page, as HTML; a `live` one sends pasted text back to its server, to be read by the models."""
    data = {"subjects": list(subjects), "samplings": list(SAMPLINGS), "live": live}
    return render("explore.html", SCRIPTS, data, live=live, title=title)


def document(
    model: Any, tokenizer: Tokenizer, text: str, name: str, most: int,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:  # fmt: skip
    """The first `most` tokens of a text, as a model reads them; `watch` is told how many it has read, of how many."""
    if not has_blocks(model):
        raise ValueError(f"{name} is a {type(model).__name__} without memory: em.attach_memory gives it one")
    ids, whole = _tokens(text, tokenizer, most)
    if len(ids) < 2:
        raise ValueError(f"a text of {len(ids)} tokens: give one of 2 or more, so that there is one to predict")
    block, rows = block_size_of(model), ids[None]
    with _watched(model, PASSES * len(ids), watch):
        signals = keys_and_values(model, ids)
        return {
            "kind": "document",
            "name": name,
            "memory": describe(model),
            "block_size": block,
            "whole": whole,
            "tokens": texts_of(ids.tolist(), tokenizer),
            "kept": _rounded(streamed_losses(model, rows, block)[0]),
            "erased": _rounded(window_losses(model, rows, block, block)[0]),
            "layers": [view.data() for view in views(model, ids, block)],
            "ages": by_age(model, signals),
            "features": _features(signals),
        }


@contextmanager
def _watched(model: Any, total: int, watch: Callable[[int, int], None]) -> Iterator[None]:
    """After every call of the model, tell `watch` how many tokens it has read."""
    done = 0

    def count(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal done
        done += inputs[0].shape[1]
        watch(done, total)

    handle = model.register_forward_hook(count)
    try:
        yield
    finally:
        handle.remove()


def describe(model: Any) -> str:
    """The memories of a model in a phrase."""
    kinds = {cls: kind for kind, cls in MEMORIES.items()}
    told = [f"{kinds[type(memory)]} in layer {index}" for index, memory in model.memories.items()]
    return ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "") or "no memory"


def texts_of(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    """The text that each token adds; of tokens that make up one character, the last one has it."""
    found = [""] * len(ids)
    start = 0
    for index in range(len(ids)):
        before = ids[max(start - 1, 0) : start]
        text = tokenizer.decode(ids[max(start - 1, 0) : index + 1])[len(tokenizer.decode(before)) if before else 0 :]
        if not text.endswith("\ufffd") or index - start > 6 or index + 1 == len(ids):
            found[index], start = text, index + 1
    return found


def by_age(model: Any, signals: dict[tuple[int, str], Signal]) -> list[dict[str, Any]]:
    """How alike each layer's keys and values and their reconstructions are, by age, for several orders."""
    found = []
    for (layer, part), signal in signals.items():
        tokens = len(signal)
        bank = model.memories[layer].retrieval if layer in model.memories else None
        own = bank.order if isinstance(bank, Bank) else None
        orders = sorted({order for order in (*ORDERS, own) if order})
        edges = np.unique(np.geomspace(1, tokens + 1, AGES + 1).astype(int))
        similar = {str(order): _rounded(similarity(signal, order, edges)) for order in orders}
        ages = [float(age) for age in np.sqrt(edges[:-1] * (edges[1:] - 1.0))]
        found.append({"layer": layer, "part": part, "own": own, "ages": ages, "orders": similar})
    return found


def similarity(signal: Signal, order: int, edges: np.ndarray) -> Float[Tensor, " group"]:
    """Mean cosine between tokens and their reconstruction, the mean token taken away; token by age, 1 the newest.

    Group i holds ages `edges[i]` to `edges[i+1] - 1`.
    """
    mean, pairs = signal.mean(0), reconstructed(signal, order)
    cosines = [torch.cosine_similarity(back - mean, piece - mean, dim=-1).mean(-1) for piece, back in pairs]
    newest_first = torch.cat(cosines).flip(0).cpu()
    return torch.stack([newest_first[first - 1 : last - 1].mean() for first, last in pairwise(edges)])


def memory_files(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The subjects of memory files: headers, and features of largest variance, the same in all files if possible."""
    opened = []
    for path in paths:
        told = memory_file.describe(path)
        opened.append((path, told, _polynomials(path, told)))
    chosen: list[tuple[str, int, int]] = []
    subjects = []
    for path, told, states in opened:
        energy = {
            (name, head, feature): float(one.square().sum())
            for name, state in states.items()
            for head, heads in enumerate(state[0, :, 1:].unbind(0))
            for feature, one in enumerate(heads.unbind(1))
        }
        if not chosen or not set(chosen) <= energy.keys():
            chosen = sorted(energy, key=lambda place: -energy[place])[:FEATURES]
        subjects.append(_memory_subject(path, told, states, chosen))
    return subjects


def _memory_subject(
    path: Path, told: dict[str, Any], states: dict[str, Tensor], chosen: list[tuple[str, int, int]]
) -> dict[str, Any]:
    settings: dict[str, Any] = told["settings"] if isinstance(told.get("settings"), dict) else {}
    features = [
        {"name": f"{name}, head {head}, feature {feature}", "state": packed(states[name][0, head, :, feature])}
        for name, head, feature in chosen
    ]
    sampling, points = settings.get("memory.sampling"), settings.get("memory.points")
    parts = (told.get("parts") or [[]])[0]
    return {
        "kind": "memory",
        "name": path.name.removesuffix(MEMORY_SUFFIX),
        "memory": ", ".join(dict.fromkeys(name.rsplit(" ", 1)[0] for name in states)) or "no polynomial to draw",
        "model": str(told.get("model") or ""),
        "tokens": told["seen"][0],
        "open": told["opened"][0],
        "parts": [[str(name or "unnamed"), tokens] for name, tokens, _ in parts],
        "sampling": sampling if sampling in SAMPLINGS else None,
        "points": points if type(points) is int and points > 0 else None,
        "features": features,
    }


def _polynomials(path: Path, told: dict[str, Any]) -> dict[str, Float[Tensor, "row head order dim"]]:
    """The coefficients in a memory file, by layer and part; memories without a polynomial have none."""
    tensors = safetensors.torch.load(path.read_bytes())
    classes = {cls.__name__: cls for cls in MEMORIES.values()}
    found = {}
    for index, (kind, shapes) in enumerate(told["config"]["layers"]):
        if kind not in classes or len(shapes) < 2 or len(shapes[0]) != 3:
            continue
        heads, _, dim = shapes[0]
        geometry = Geometry(heads * dim, heads, heads, dim, 12, told["config"]["block_size"])
        if isinstance(classes[kind].build(geometry, {}).retrieval, Bank):
            for part, name in enumerate(("key", "value")):
                found[f"layer {index} {name}"] = tensors[f"layers.{index}.state.{part}"]
    return found


def _features(signals: dict[tuple[int, str], Signal]) -> list[dict[str, Any]]:
    """The features of largest variance, equally many of each layer's keys and values."""
    each = max(1, FEATURES // max(1, len(signals)))
    found = []
    for (layer, part), signal in list(signals.items())[:FEATURES]:
        variance = signal.var(dim=0, correction=0).flatten()
        for place in variance.topk(min(each, len(variance))).indices.tolist():
            head, feature = divmod(place, signal.shape[2])
            name = f"layer {layer} {part}, head {head}, feature {feature}"
            found.append({"name": name, "values": packed(signal[:, head, feature])})
    return found


def packed(values: Float[Tensor, " number"]) -> str:
    """Float32 numbers as text: little-endian, base64."""
    return base64.b64encode(values.detach().cpu().float().numpy().astype("<f4").tobytes()).decode()


def _tokens(text: str, tokenizer: Tokenizer, most: int) -> tuple[Int[Tensor, " token"], bool]:
    """The first `most` tokens of a text, and whether they are all."""
    found: list[int] = []
    try:
        for ids in _encoded(text, tokenizer):
            found += ids
            if len(found) > most:
                break
    except Skip as reason:
        raise ValueError(f"the text cannot be read: {reason}") from None
    return torch.tensor(found[:most], dtype=torch.long), len(found) <= most


def _encoded(text: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    for piece in pieces([text], tokenizer):
        yield encode(piece, tokenizer).tolist()


def _rounded(values: Tensor) -> list[float]:
    """Numbers with five digits: what a page shows, in half the space."""
    return [float(f"{value:.5g}") for value in values.tolist()]
