"""Whether a module does more than its `forward` when it is called."""

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody hooked it."""
    return any(getattr(module, name) for name in HOOKS)
