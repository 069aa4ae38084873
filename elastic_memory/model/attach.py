"""Attach a memory to a pretrained model, and detach it again."""

import copy
from collections.abc import Iterable
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn

from elastic_memory.common.defaults import BLOCK_SIZE
from elastic_memory.common.hooks import has_hooks
from elastic_memory.memory.contract import check_type, with_new_names
from elastic_memory.memory.counts import extra_parameters
from elastic_memory.model.backbone import MemoryBackbone
from elastic_memory.model.configuration import MEMORY, MemorySettings, geometry_of, refuse_dropout
from elastic_memory.model.modeling import MemoryCausalLM, memory_layers, name_causal_lm, refuse_spread
from elastic_memory.model.saved_defaults import RECORD, defaults, recorded, warn_of_defaults

# Decoders whose layers consist of PARTS and nothing else (tests/model/test_families.py).
FAMILIES = ("arcee", "gemma", "jais2", "llama", "mistral", "qwen2", "qwen3")
PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
SAVED = "elastic_memory"  # the key under which settings travel in the model's own config.json
# The class that FSDP wraps as a layer; tensor and pipeline plans do not hold with a memory.
WRAPPED = {"_no_split_modules": ["MemoryLayer"], "supports_tp_plan": False, "supports_pp_plan": False}
DEFAULTS: dict[str, Any] = {
    "memory": MEMORY, "memory_layers": None, "local_attention": "block", "memory_order": None,
    "memory_points": None, "sampling": None, "sampling_options": None, "memory_options": {},
    "block_size": BLOCK_SIZE,
}  # fmt: skip
# A buffer saved with the weights of a model with memory. If they are loaded into a model without one, transformers
# warns that this key was not used.
REMINDER = "elastic_memory_attach_memory_restores_the_memory"


def attach_memory(
    model: Any,
    layers: list[int] | None = None,
    order: int | None = None,
    points: int | None = None,
    sampling: str | None = None,
    block_size: int | None = None,
    memory: str | None = None,
    local_attention: str | None = None,
    sampling_options: dict[str, float] | None = None,
    window: int | None = None,
    silent: bool | None = None,
    **memory_options: Any,
) -> Any:
    """Give a pretrained Llama or another of FAMILIES a memory, in place; its own weights stay where they are.

    Settings that are not given are those the model was saved with, if it was saved with this memory; else elastic
    memory in blocks of 2,048. In its first block the model computes what it did before.

    A new memory is `silent`: until it is trained, every block is computed as without memory. That adds one parameter
    per head, the blend (choices.md, "silent start"). With `silent=False` memory has its full weight from the start.
    """
    _check(model)
    config = model.config
    if callable(sampling):
        raise ValueError("sampling: give a name, which can be saved; a function of your own goes to set_retrieval")
    named = {
        "memory": memory, "memory_layers": _listed(layers), "local_attention": local_attention, "memory_order": order,
        "memory_points": points, "sampling": sampling, "sampling_options": sampling_options, "block_size": block_size,
        "window": window,
    }  # fmt: skip
    given = {name: value for name, value in named.items() if value is not None}
    saved = getattr(config, SAVED, None) or {}
    again = bool(saved) and memory in (None, saved["memory"])
    values = DEFAULTS | (_kept(saved, given) if again else {}) | given
    values["memory_options"] = values["memory_options"] | memory_options
    settings = _settings(model, values)
    if _starts_silent(silent, settings, again):
        values["memory_options"]["silent"] = True
        settings = _settings(model, values)
    if again and not hasattr(config, RECORD):
        warn_of_defaults(settings, model.name_or_path)
    elif again:
        values |= recorded(settings, getattr(config, RECORD))
        settings = _settings(model, values)

    # Everything that may fail comes before the first change.
    layers_with_memory = memory_layers(model.model, settings)
    _initialise(layers_with_memory, model, values["memory"])
    if again:
        _restore(layers_with_memory, model.name_or_path)
    config = _own_config(model)
    _install(layers_with_memory, model)
    setattr(config, SAVED, values)
    setattr(config, RECORD, defaults(settings))
    return model


def _own_config(model: Any) -> Any:
    """A copy of the model's config, in all its parts: other models made from the same object must not change."""
    shared = model.config
    own = copy.deepcopy(shared)
    for part in model.modules():
        if getattr(part, "config", None) is shared:
            part.config = own
    return own


def _install(layers: nn.ModuleList, model: Any) -> None:
    """Replace the layers of the model, and its classes."""
    backbone = model.model
    original = (model.__class__, backbone.__class__, backbone.layers)
    backbone.layers = layers
    backbone.__class__ = with_memory(MemoryBackbone, original[1])
    model.__class__ = with_memory(MemoryCausalLM, original[0])
    name_causal_lm(model.__class__)
    model.register_buffer(REMINDER, torch.zeros((), dtype=torch.uint8, device=model.device))
    # Plain attributes: the original layers must not be registered twice.
    object.__setattr__(model, "_before_memory", original)


def detach_memory(model: Any) -> Any:
    """Undo `attach_memory`: the original classes and layers, with the present weights."""
    _refuse_wrapped(model, "detach_memory")
    original = getattr(model, "_before_memory", None)
    if original is None:
        raise ValueError(f"{type(model).__name__} has no attached memory")
    model.__class__, model.model.__class__, model.model.layers = original
    object.__delattr__(model, "_before_memory")
    delattr(model, REMINDER)
    for key in (SAVED, RECORD):
        if hasattr(model.config, key):
            delattr(model.config, key)
    return model


@cache
def with_memory(mixin: type, original: type) -> type:
    """The class `original` with a memory. It has no importable name: instances are pickled by its two base classes."""

    def reduce(self: Any) -> tuple:
        return _new, (mixin, original), vars(self)

    return type(f"Memory{original.__name__}", (mixin, original), WRAPPED | {"__reduce__": reduce})


def _new(mixin: type, original: type) -> Any:
    return object.__new__(with_memory(mixin, original))


def _check(model: Any) -> None:
    """Refuse models that no memory can be attached to."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model {model!r:.200}: give a loaded model, such as AutoModelForCausalLM.from_pretrained(...)"
        )
    _refuse_wrapped(model, "attach_memory")
    if isinstance(model, MemoryCausalLM):
        raise ValueError(f"{type(model).__name__} has a memory already: detach_memory(model) first")
    if model.config.model_type not in FAMILIES or not hasattr(model, "lm_head"):
        raise ValueError(f"{type(model).__name__}: memory can be attached to causal LMs of {', '.join(FAMILIES)}")
    refuse_dropout(model.config)
    refuse_spread(model)
    _refuse_other_parts(model)
    for index, layer in enumerate(model.model.layers):
        for name, part in ((f"layers.{index}", layer), (f"layers.{index}.self_attn", layer.self_attn)):
            if has_hooks(part):
                raise ValueError(f"{name} has hooks, which its replacement would not have: remove them, and hook again")


def _listed(layers: Any) -> list[int] | None:
    """The layers as a list, which config.json can hold."""
    if layers is None:
        return None
    if isinstance(layers, Integral | str) or not isinstance(layers, Iterable):
        raise ValueError(f"layers={layers!r}: give a list of layer numbers, such as [8]")
    if not list(layers):
        raise ValueError("layers=[] gives no layer a memory: leave layers out for the default, or name one")
    return list(layers)


def _refuse_other_parts(model: Any) -> None:
    """Refuse what a memory layer would leave out, silently: further parts, partial rotary positions, other scales."""
    found = []
    for layer in model.model.layers:
        attention = layer.self_attn
        found += [name for name, _ in layer.named_children() if name not in PARTS]
        found += [f"self_attn.{name}" for name, _ in attention.named_children() if name not in ATTENTION_PARTS]
        if abs(attention.scaling * attention.head_dim**0.5 - 1) > 1e-6:
            found.append(f"attention scores scaled by {attention.scaling}")
    rotated, size = 2 * len(model.model.rotary_emb.inv_freq), model.model.layers[0].self_attn.head_dim
    if rotated != size:
        found.append(f"rotary positions of {rotated} of {size} features")
    if getattr(model.config, "use_bidirectional_attention", False):
        found.append("bidirectional attention")
    if found:
        raise ValueError(
            f"{type(model).__name__} has {', '.join(sorted(set(found)))}: memory can be attached to layers of "
            "q_proj, k_proj, v_proj, o_proj, norms and an MLP, with plain rotary positions"
        )


def _refuse_wrapped(model: Any, function: str) -> None:
    if hasattr(model, "get_base_model"):  # peft's
        raise ValueError(f"{type(model).__name__} wraps the model: {function}(model.get_base_model()) works in place")


def _kept(saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The saved settings that still apply: options of one sampling do not fit another, only sliding has a window."""
    other = "sampling" in given and given["sampling"] != saved["sampling"]
    options = {"memory_options": with_new_names(saved.get("memory_options")) or {}}
    slides = given.get("local_attention", "sliding") == "sliding"
    return saved | options | ({"sampling_options": None} if other else {}) | ({} if slides else {"window": None})


def _starts_silent(silent: bool | None, settings: MemorySettings, again: bool) -> bool:
    """Whether the memory has blends: as given or saved; by default a new memory, if it has a state."""
    check_type("silent", silent, bool | None)
    had = bool(settings.memory_options.get("silent"))
    if again and silent not in (None, had):
        raise ValueError(
            f"silent={silent}: this memory was trained and saved {'with' if had else 'without'} blends; leave silent "
            "out, or give another memory"
        )
    if again or silent is not None:
        return had or bool(silent)
    with torch.device("meta"):
        return any(settings.memory_at(layer).start(1, "meta") for layer in settings.layers())


def _settings(model: Any, values: dict[str, Any]) -> MemorySettings:
    """The settings, checked against the model's own window."""
    values = dict(values)
    settings = MemorySettings(geometry=geometry_of(model.config, values.pop("block_size")), **values)
    window = getattr(model.config, "sliding_window", None)
    if window and (settings.local_attention == "full" or settings.locality.window > window):
        name = "block_size" if settings.window is None else "window"
        raise ValueError(
            f"{type(model).__name__} looks back {window} tokens, which {name}={settings.locality.window} with "
            f"local_attention={settings.local_attention!r} exceeds: give a {name} up to {window}"
        )
    return settings


@torch.no_grad()
def _restore(layers: nn.ModuleList, name: str) -> None:
    """Load the memory's own parameters, which a model without memory left in the checkpoint."""
    wanted = {
        f"model.layers.{index}.self_attn.memory.{part}": parameter
        for index, layer in enumerate(layers)
        for part, parameter in layer.memory.named_parameters()
    }
    if not wanted:
        return
    folder = name if Path(name).is_dir() else snapshot_download(name, local_files_only=True)
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for found in wanted.keys() & set(stored.keys()):
                there, here = stored.get_tensor(found), wanted.pop(found)
                if there.shape != here.shape:
                    raise ValueError(
                        f"{found} is {list(there.shape)} in {name} and {list(here.shape)} with these settings: "
                        "give the sizes that it was trained with, or memory=... for another one"
                    )
                here.copy_(there)
    if wanted:
        raise ValueError(f"{name}: its memory was saved without {min(wanted)}")


def _initialise(layers: nn.ModuleList, model: Any, memory: str) -> None:
    """Initialise new parameters, on the device and in the precision of their layer."""
    for layer in layers:
        like = layer.input_layernorm.weight  # projections may be quantised
        if like.is_meta and hasattr(layer.input_layernorm, "_hf_hook") and extra_parameters(layer.memory):
            raise ValueError(
                f"parameters of {memory!r} have no place in an offloaded layer: attach before offloading, or, if the "
                "blend is its only parameter, with silent=False"
            )
        layer.memory.to(device=like.device, dtype=like.dtype)
        layer.memory.initialise()
        layer.train(model.training)
