"""The number of a model's parameters, without the padding of `pad_heads`."""

from typing import Any

import torch

from elastic_memory.model.configuration import MemoryLlamaConfig
from elastic_memory.model.modeling import MemoryLlamaForCausalLM


def count_parameters(config: Any) -> int:
    """Trainable parameters of one of our models, without building it."""
    plain = type(config).from_dict(config.to_dict() | {"pad_heads": False})
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in MemoryLlamaForCausalLM(plain).parameters())


def parameters_of(model: Any) -> int:
    """Parameters of any model, counted in the same way."""
    ours = isinstance(model.config, MemoryLlamaConfig)
    return count_parameters(model.config) if ours else model.num_parameters()
