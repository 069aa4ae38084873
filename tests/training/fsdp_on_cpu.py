"""The command `elastic` with FSDP2 over gloo: accelerate offers it for GPUs alone, torch runs it on CPUs too."""

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from elastic_memory.cli import main

original = AcceleratorState.__init__


def with_fsdp(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    """As for GPUs: a process group and a plugin make FSDP."""
    first = not AcceleratorState._shared_state
    original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if first and fsdp_plugin is not None:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        if self.mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self.mixed_precision)


if __name__ == "__main__":
    AcceleratorState.__init__ = with_fsdp  # type: ignore[method-assign]
    main()
