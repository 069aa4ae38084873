"""What peft must know about our models: the default modules for adapters."""

import sys


def tell_peft(model_type: str) -> None:
    """Give `model_type` the default targets of Llama, whose modules it has; peft has no call to register one."""
    constants = sys.modules.get("peft.utils.constants")
    for name, targets in vars(constants).items() if constants else ():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and "llama" in targets:
            targets.setdefault(model_type, targets["llama"])
