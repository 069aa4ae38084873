"""Whether this machine can run a recipe, checked before any file is written or memory allocated."""

import os
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.integrations.integration_utils import get_available_reporting_integrations

import elastic_memory as em
from elastic_memory.data.start import StartingModel
from elastic_memory.model.configuration import head_dim
from elastic_memory.training.build import build_config
from elastic_memory.training.lora import check_lora
from elastic_memory.training.recipe import Recipe

MOST_SAMPLES = 200_000_000  # their order is kept in memory
STATE = 16  # bytes per parameter: float32 weight, gradient and two optimizer moments
WEIGHT = 4  # of these, the weight


def check(recipe: Recipe, start: StartingModel | None = None) -> None:
    """Refuse too many samples, a model that cannot be built or does not fit, and trackers that are not installed."""
    installed = get_available_reporting_integrations()
    for name in recipe.execution.report_to:
        if name not in installed:
            known = ", ".join(installed) or "none"
            raise ValueError(f"execution.report_to: {name!r} is not installed; installed here: {known}")
    training = recipe.training
    if training.steps * training.batch > MOST_SAMPLES:
        raise ValueError(
            f"training.tokens: {training.tokens:,} are {training.steps * training.batch:,} samples of "
            f"{training.length:,} tokens, at most {MOST_SAMPLES:,} are possible: use longer samples"
        )
    check_lora(training.lora)
    config = start.config if start else build_config(recipe)
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"model: {config.num_attention_heads} heads do not divide by num_key_value_heads "
            f"{config.num_key_value_heads}"
        )
    _check_memory(config, recipe.execution.device, training.lora is not None)
    if start:
        return
    try:
        with torch.device("meta"):
            em.MemoryLlamaForCausalLM(config)
    except (LookupError, TypeError, AttributeError, AssertionError, RuntimeError, StrictDataclassError) as error:
        raise ValueError(f"model: cannot be built ({type(error).__name__}: {_first_line(error)})") from None


def _check_memory(config: Any, device: str, frozen: bool) -> None:
    """Refuse a model whose weights and optimizer state (none if `frozen`) exceed all devices' memory."""
    width = config.num_attention_heads * head_dim(config)
    layer = config.hidden_size * (2 * width + 3 * config.intermediate_size)
    needed = (WEIGHT if frozen else STATE) * (config.num_hidden_layers * layer + config.vocab_size * config.hidden_size)
    if torch.cuda.is_available() and device != "cpu":
        each = torch.cuda.get_device_properties(0).total_memory
    else:
        each = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = each * int(os.environ.get("WORLD_SIZE", "1"))
    if needed > available:
        raise ValueError(
            f"model: weights and optimizer need {needed / 1e9:,.0f} GB or more, "
            f"{available / 1e9:,.0f} GB are available: choose a smaller model or more devices"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
