"""Low-rank adapters while fine-tuning: added by peft, merged into the weights at the end."""

import importlib.util
from typing import Any

from elastic_memory.training.recipe import Lora


def check_lora(lora: Lora | None) -> None:
    """Refuse adapters if peft is not installed."""
    if lora is not None and importlib.util.find_spec("peft") is None:
        raise ValueError(
            "training.lora needs the package peft: pip install 'elastic-memory[lora]', or --set training.lora=null to "
            "train all weights"
        )


def add_lora(model: Any, lora: Lora) -> None:
    """Adapters on the layers' matrices named in `targets`; they and the memory's own parameters are trained."""
    from peft import LoraConfig, inject_adapter_in_model

    names = {name.rpartition(".")[2] for name, _ in model.base_model.layers.named_modules()}
    unknown = [target for target in lora.targets if target not in names]
    if unknown:
        raise ValueError(f"training.lora.targets: the layers of {type(model).__name__} have no {', '.join(unknown)}")
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets)  # type: ignore[arg-type]
    inject_adapter_in_model(config, model)
    for memory in model.memories.values():
        memory.requires_grad_(True)


def merge_lora(model: Any) -> None:
    """Add each adapter to its matrix, and replace the adapted module by the plain one."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapters = {name: part for name, part in model.named_modules() if isinstance(part, BaseTunerLayer)}
    for name, part in adapters.items():
        part.merge()
        model.set_submodule(name, part.get_base_layer())
    model.requires_grad_(True)
    vars(model).pop("peft_config", None)
