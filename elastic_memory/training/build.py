"""From a recipe to a model, and the cost of one token."""

from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError

import elastic_memory as em
from elastic_memory.data.start import StartingModel
from elastic_memory.model.attach import SAVED
from elastic_memory.model.configuration import head_dim
from elastic_memory.training.lora import add_lora
from elastic_memory.training.recipe import Recipe

LARGEST = {
    "num_hidden_layers": 10_000, "hidden_size": 1_000_000, "intermediate_size": 10_000_000, "vocab_size": 100_000_000,
    "num_attention_heads": 100_000, "num_key_value_heads": 100_000, "head_dim": 100_000, "block_size": 100_000_000,
    "window": 100_000_000, "memory_order": 100_000, "memory_points": 100_000, "max_position_embeddings": 10**12,
}  # fmt: skip


def build_config(recipe: Recipe) -> Any:
    """The model's configuration, which itself refuses unknown or invalid fields."""
    model = recipe.built
    fields = dict(model.config)
    for key in fields:
        if key.startswith("_") or key.endswith("_implementation"):
            raise ValueError(f"model.config.{key}: not a setting of the model: leave it out")
        _check_size(f"model.config.{key}", fields[key], LARGEST.get(key))
    _check_size("model.memory_multiple", model.memory_multiple, 1000)
    if model.sampling is not None:
        fields["sampling"] = model.sampling
    if model.order_per_multiple is not None:
        fields["memory_order"] = model.order_per_multiple * model.memory_multiple
    try:
        config = em.MemoryLlamaConfig.preset(
            model.preset, memory=model.memory, memory_multiple=model.memory_multiple, **fields
        )
    except (StrictDataclassError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"model.config: {str(error).strip().splitlines()[-1].strip()}") from None
    _check_size("memory_order, which follows from memory_multiple", config.memory_order, LARGEST["memory_order"])
    return config


def _check_size(key: str, value: Any, largest: int | None) -> None:
    if largest and value is not None and not (type(value) is int and 1 <= value <= largest):
        raise ValueError(f"{key}: {str(value)[:80]}, expected a whole number from 1 to {largest:,}")


def build_model(recipe: Recipe) -> Any:
    """A fresh model, its weights drawn from the recipe's seed."""
    transformers.set_seed(recipe.training.seed)
    model = em.MemoryLlamaForCausalLM(build_config(recipe))
    if recipe.execution.compile:
        model.compile_blocks()
    return model


def start_model(start: StartingModel, recipe: Recipe) -> Any:
    """The model that fine-tuning starts from, in float32, with the adapters that the recipe asks for."""
    transformers.set_seed(recipe.training.seed)
    model = start.load().float()
    if recipe.training.lora:
        add_lora(model, recipe.training.lora)
    if recipe.execution.compile:
        model.compile_blocks()
    return model


def flops_per_token(config: Any, length: int) -> float:
    """Floating-point operations of one token, forward and backward: matrix products and causal local attention.

    The memory's own work is not counted, so that utilisation compares between memories.
    """
    width, keys_width = (heads * head_dim(config) for heads in (config.num_attention_heads, config.num_key_value_heads))
    layer = 2 * config.hidden_size * (width + keys_width) + 3 * config.hidden_size * config.intermediate_size
    matrices = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    local = getattr(config, SAVED, None) or vars(config)
    size = local["block_size"]
    window = local.get("window") or size
    keys = {"block": size / 2, "sliding": window, "full": length / 2}[local["local_attention"]]
    return 6 * matrices + 12 * config.num_hidden_layers * keys * width


PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "B200": 2250e12}


def peak_flops(device: str) -> float | None:
    """Dense bf16 peak of an accelerator, by name, from its data sheet; None if unknown."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device), None)
