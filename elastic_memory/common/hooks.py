"""Hooks, which run besides `forward` when a module is called."""

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has forward or backward hooks."""
    return any(getattr(module, name) for name in HOOKS)
