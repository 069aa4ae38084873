"""What reports and logs say of a memory in use: its size, its parameters, how far it is used."""

from typing import NamedTuple

from elastic_memory.memory.contract import Memory
from elastic_memory.shapes import Tensor

GATES = ("gate", "gain", "blend")  # name suffixes of parameters that get a learning rate of their own


class Floats(NamedTuple):
    """Size of the state of one row in one layer."""

    carried: int
    paper: int  # as the paper counts it


def state_floats(memory: Memory) -> Floats:
    """Size of the state per row."""
    parts = [part.numel() for part in memory.start(1, "meta")]
    if memory.widens:  # raw keys and values, which the layer keeps in its window
        parts += [memory.widens * memory.geometry.kv_heads * memory.geometry.head_dim] * 2
    return Floats(sum(parts), memory.info.paper_floats(*parts))


def extra_parameters(memory: Memory) -> int:
    """Trainable parameters that the mechanism adds to its layer."""
    return sum(parameter.numel() for parameter in memory.parameters())


def gates(memory: Memory) -> dict[str, Tensor]:
    """How far each head's gate is open, and its `blend`, for memories that have them."""
    open_by = {name: gate.detach().sigmoid() for name, gate in memory.named_parameters() if name.endswith("gate")}
    return open_by if memory.blend is None else open_by | {"blend": memory.blend.detach()}
