"""Memory for a model that exists already: attach it, train or use it, take it off again."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn

from elastic_memory.memory import Geometry
from elastic_memory.model.backbone import MemoryBackbone
from elastic_memory.model.configuration import MemorySettings, refuse_dropout
from elastic_memory.model.modeling import MemoryCausalLM, install, name_causal_lm

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SAVED = "elastic_memory"  # the key under which settings travel in the model's own config.json
WRAPPED = {"_no_split_modules": ["MemoryLayer"]}  # what FSDP takes for a layer
DEFAULTS: dict[str, Any] = {
    "memory": "elastic", "memory_layers": None, "local_attention": "block", "memory_order": None,
    "memory_points": None, "sampling": None, "sampling_options": None, "memory_options": {}, "block_size": 2048,
}  # fmt: skip


def attach_memory(
    model: Any,
    layers: list[int] | None = None,
    order: int | None = None,
    points: int | None = None,
    sampling: str | None = None,
    block_size: int = 2048,
    memory: str = "elastic",
    local_attention: str = "block",
    sampling_options: dict[str, float] | None = None,
    **memory_options: Any,
) -> Any:
    """Give a pretrained Llama, Mistral, Qwen2 or Qwen3 a memory, in place; its own weights stay where they are.

    Without further arguments, a model that was saved with memory gets the memory it was saved with. Elastic memory adds
    no parameters. Until a first block is complete the model computes what it did before, inside one block.
    """
    config = model.config
    if isinstance(model, MemoryCausalLM):
        raise ValueError(f"{type(model).__name__} has a memory already: detach_memory(model) first")
    if config.model_type not in FAMILIES or not hasattr(model, "lm_head"):
        raise ValueError(f"{type(model).__name__}: memory can be attached to causal LMs of {', '.join(FAMILIES)}")
    refuse_dropout(config)
    if callable(sampling):
        raise ValueError("sampling: give a name, which can be saved; a function of your own goes to set_retrieval")
    given = {
        "memory": memory, "memory_layers": layers, "local_attention": local_attention, "memory_order": order,
        "memory_points": points, "sampling": sampling, "sampling_options": sampling_options,
        "memory_options": memory_options, "block_size": block_size,
    }  # fmt: skip
    saved = getattr(config, SAVED, None)
    again = bool(saved) and given == DEFAULTS
    values = dict(saved) if again else dict(given)
    settings = MemorySettings(geometry=_geometry(config, values.pop("block_size")), **values)
    window = getattr(config, "sliding_window", None)
    if window and (settings.local_attention == "full" or settings.geometry.block_size > window):
        raise ValueError(
            f"{type(model).__name__} looks back {window} tokens, which block_size={settings.geometry.block_size} with "
            f"local_attention={settings.local_attention!r} exceeds: give a block_size up to {window}"
        )

    backbone = model.model
    original = (model.__class__, backbone.__class__, backbone.layers)
    install(backbone, settings)
    _match(backbone, model)
    if again:
        _restore(backbone, model.name_or_path)
    backbone.__class__ = type(f"Memory{original[1].__name__}", (MemoryBackbone, original[1]), WRAPPED)
    model.__class__ = type(f"Memory{original[0].__name__}", (MemoryCausalLM, original[0]), WRAPPED)
    name_causal_lm(model.__class__)
    # Plain attributes: the original layers must not be registered twice.
    object.__setattr__(model, "_before_memory", original)
    setattr(config, SAVED, values | {"block_size": settings.geometry.block_size})
    return model


def detach_memory(model: Any) -> Any:
    """Undo `attach_memory`: the model it was, with the weights it has now."""
    original = getattr(model, "_before_memory", None)
    if original is None:
        raise ValueError(f"{type(model).__name__} has no attached memory")
    model.__class__, model.model.__class__, model.model.layers = original
    object.__delattr__(model, "_before_memory")
    if hasattr(model.config, SAVED):
        delattr(model.config, SAVED)
    return model


def _geometry(config: Any, block_size: int) -> Geometry:
    return Geometry(
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        layers=config.num_hidden_layers,
        block_size=block_size,
        initializer_range=config.initializer_range,
    )


@torch.no_grad()
def _restore(backbone: Any, name: str) -> None:
    """Memory's own parameters from the checkpoint, where a model that knew of no memory left them."""
    wanted = {
        f"model.layers.{index}.self_attn.memory.{part}": parameter
        for index, layer in enumerate(backbone.layers)
        for part, parameter in layer.memory.named_parameters()
    }
    if not wanted:
        return
    folder = name if Path(name).is_dir() else snapshot_download(name, local_files_only=True)
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for found in wanted.keys() & set(stored.keys()):
                wanted.pop(found).copy_(stored.get_tensor(found))
    if wanted:
        raise ValueError(f"{name}: its memory was saved without {min(wanted)}")


def _match(backbone: Any, model: nn.Module) -> None:
    """New parameters go where the layer's own are, in their precision, initialised."""
    for layer in backbone.layers:
        like = layer.self_attn.q_proj.weight
        layer.memory.to(device=like.device, dtype=like.dtype)
        layer.memory.reset()
        layer.train(model.training)
