"""Fingerprints of models: hashes of all weights, and of every setting that changes what a model computes."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from elastic_memory.shapes import Tensor

# Settings that do not change what a trained model computes in one call.
NOTES = {
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "id2label", "initializer_range", "label2id", "memory_defaults", "pad_token_id", "pretraining_tp",
    "problem_type", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
# Settings of a memory as given; fingerprints hold those in effect instead, defaults included.
GIVEN = {
    "elastic_memory", "memory", "memory_layers", "memory_options", "memory_order", "memory_points", "sampling",
    "sampling_options", "window",
}  # fmt: skip
IN_EFFECT = "memory."  # prefix of the settings in effect
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

_hashed: WeakKeyDictionary[nn.Module, tuple[list[Any], str]] = WeakKeyDictionary()


def fingerprint(model: Any) -> str:
    """A hash of weights, settings, and how memories are read at present."""
    retrieval = [repr(memory.retrieval) for memory in getattr(model, "memories", {}).values()]
    described = json.dumps([weights_hash(model), settings(model), retrieval], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()


def settings(model: Any) -> dict[str, Any]:
    """All that a model's function depends on besides its weights, as JSON; of memories the options in effect."""
    kept = given(model)
    if not hasattr(model, "memories"):
        return kept
    effect = {"layers": list(model.memories), **local_settings(model)}
    for memory in list(model.memories.values())[:1]:  # all are of one kind and have the same options
        effect |= {"kind": type(memory).__name__} | memory.built_with
    kept = {name: value for name, value in kept.items() if name not in GIVEN}
    return kept | {f"{IN_EFFECT}{name}": value for name, value in _json(effect).items()}


def local_settings(model: Any) -> dict[str, Any]:
    """What a token sees without memory."""
    locality = model.base_model.layers[0].locality
    window = {"window": locality.window} if locality.lag else {}  # which files of earlier versions do not know
    return {"block_size": locality.block_size, "local_attention": locality.kind} | window


def given(model: Any) -> dict[str, Any]:
    """The settings in which a model's configuration differs from its defaults, as JSON."""
    return _json({name: value for name, value in model.config.to_diff_dict().items() if name not in NOTES})


def _json(values: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(values, default=str))


def weights_hash(model: nn.Module) -> str:
    """SHA-256 of every tensor of a model, computed again only when one of them has changed.

    torch counts in-place changes (`_version`), but not those of `.data`: hence the sums.
    """
    tensors = [part for name, tensor in model.state_dict().items() for part in _parts(name, tensor)]
    sums = torch.stack([_sum(tensor).cpu() for _, tensor in tensors]).tolist() if tensors else []
    counts = [0 if tensor.is_inference() else tensor._version for _, tensor in tensors]
    places = [(name, tensor.data_ptr(), tensor.dtype, tensor.shape) for name, tensor in tensors]
    now = [places, counts, sums]
    if model not in _hashed or _hashed[model][0] != now:
        digest = hashlib.sha256()
        for name, tensor in tensors:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        _hashed[model] = now, digest.hexdigest()
    return _hashed[model][1]


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors inside a tensor: itself, or the parts of a quantised or distributed one."""
    if not isinstance(tensor, Tensor):
        return
    if tensor.is_meta:
        raise ValueError(f"{name} is not in memory, so the model cannot be identified: load it without offloading")
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor.detach()
        return
    for inner in tensor.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{inner}", getattr(tensor, inner))


def _sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, eight bytes at a time where possible: as fast as memory bandwidth allows."""
    flat = tensor.contiguous().flatten()
    size = flat.element_size()
    together = max(1, 8 // size)
    whole = flat.numel() % together == 0 and flat.storage_offset() % together == 0
    return flat.view(torch.int64 if whole else INTEGERS[size]).sum(dtype=torch.int64)
