"""What a memory is.

A sample is read in blocks. Before a block, `read` turns the state left by all earlier blocks into a *reading*, which
the block's queries use; after it, `write` folds the block into the state. State and reading are values, tuples of
tensors whose first axis is the row of the batch: passed in, returned, never kept on `self`. Block 0 has no reading,
unless a mechanism wants to look at its empty state.

A mechanism is one subclass in one file. It never sees masks, padding or positions in the sample: rows with clocks of
their own, streaming, caches and gradient checkpointing are the caller's work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import nn

from elastic_memory.shapes import Bool, Float, Tensor

State = tuple[Tensor, ...]
Reading = tuple[Tensor, ...]


@dataclass(frozen=True)
class Geometry:
    """The layer a memory lives in."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    block_size: int
    initializer_range: float = 0.02
    scale: float | None = None  # of attention scores; None: 1 / sqrt(head_dim)
    features: int | None = None  # of a head that are not padding (`pad_heads`); None: all


class Host(NamedTuple):
    """What a memory may ask of the layer it lives in."""

    rope: Callable[[Tensor, Tensor], Tensor]  # (x [batch, head, token, dim], positions [token]) -> x rotated
    project: Callable[[Tensor], tuple[Tensor, Tensor]]  # tokens of the residual stream -> raw keys, values


class Block(NamedTuple):
    """A block that is complete, or the last of a sample, as `write` sees it."""

    key: Float[Tensor, "batch kv_head token dim"]  # before rotary positions
    value: Float[Tensor, "batch kv_head token dim"]
    output: Float[Tensor, "batch token width"] | None = None  # what left the layer, if the memory has a `tail`
    tail: Float[Tensor, "batch tail width"] | None = None  # what left it of the tail


class Floats(NamedTuple):
    """Size of the state of one row in one layer."""

    carried: int
    paper: int  # as the paper counts it


class Memory(nn.Module):
    """One mechanism in one layer."""

    # Facts about the mechanism: for the layer that runs it, and for the catalogue.
    source: ClassVar[str] = ""
    phrase: ClassVar[str] = ""
    reach: int | None = None  # tokens before a block that can influence it; None: the whole history
    shares_softmax: bool = False  # the reading is (key, value): further columns in the block's own softmax
    parallel: ClassVar[bool] = True  # the state depends on keys and values only, so all blocks are read at once
    by_row: ClassVar[bool] = False  # works as well if its parameters have an axis of rows in front
    reads: ClassVar[bool] = True  # something, at some time
    reads_start: bool = False  # block 0 reads the empty state
    front_size: int = 0  # tokens of `front`, for which positions are then computed once
    no_sliding: str | None = None  # why `local_attention="sliding"` is undefined, where it is
    no_join: str | None = "it does not say how"  # why states of parts do not give the state of the whole
    retrieval: Any = None  # what readings depend on besides the state; when it changes, open readings are made anew
    # (query, key) -> both as the layer and its memory shall use them, before rotary positions; None: as they are
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def __init__(self, geometry: Geometry, *, detach_every: int | None = None):
        super().__init__()
        if detach_every is not None and detach_every < 1:
            raise ValueError(f"detach_every={detach_every}: give a number of blocks from 1 on, or None for no cut")
        self.geometry = geometry
        self.detach_every = detach_every

    @classmethod
    def build(cls, geometry: Geometry, options: dict[str, Any]) -> Self:
        """Construct the mechanism; an option that it does not have is an error that names those it has."""
        known = [name for name in signature(cls.__init__).parameters if name not in ("self", "geometry")]
        for name in options:
            if not cls.has_option(name):
                near = get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise ValueError(f"{cls.__name__} has no option {name!r}{hint} It has: {', '.join(known) or 'none'}")
        return cls(geometry, **options)

    @classmethod
    def has_option(cls, name: str) -> bool:
        """Whether the mechanism takes this argument."""
        return name in signature(cls.__init__).parameters

    @classmethod
    def layers(cls, count: int) -> list[int]:
        """Where the paper puts it in a model of `count` layers: the 9th of 12."""
        return [count * 2 // 3]

    @classmethod
    def order_at(cls, multiple: int, geometry: Geometry) -> int | None:
        """`order` at a multiple of the paper's memory size, which is Infini-Transformer's over the whole model."""
        return multiple * geometry.head_dim * geometry.layers // 2

    def reset(self) -> None:
        """Initialise the parameters, if there are any."""

    def start(self, batch: int, device: torch.device | str | None = None) -> State:
        """The empty state, float32."""
        raise NotImplementedError

    def read(self, state: State, seen: int, host: Host) -> Reading:
        """What a block may look at when `seen` tokens came before it; axis 2 of each tensor is the column.

        The number of columns depends on `seen` alone.
        """
        raise NotImplementedError

    def write(self, state: State, block: Block, seen: int) -> State:
        """The state after `block`, which begins at token `seen`."""
        raise NotImplementedError

    def join(self, state: State, seen: int, other: State, other_seen: int) -> State:
        """The state after two histories one after the other, each read from its beginning, of `seen` and `other_seen`
        tokens; in the precision of the states. Optional: a mechanism that has it sets `no_join` to None.
        """
        raise ValueError(f"{type(self).__name__} cannot join two states: {self.no_join}")

    def front(self, state: State) -> Float[Tensor, "batch front width"] | None:
        """Tokens right before the next block, if keys and values of these are all there is to read.

        With whole blocks they go through the layer, which costs less than to `read` them.
        """
        return None

    def tail(self) -> Float[Tensor, "tail width"] | None:
        """Tokens that go through the layer behind each block: they see it and each other, nobody sees them."""
        return None

    def mix(
        self,
        local: Float[Tensor, "batch head token dim"],
        query: Float[Tensor, "batch head token dim"],
        rotated: Float[Tensor, "batch head token dim"],
        reading: Reading,
        visible: Bool[Tensor, "batch column"] | None,
    ) -> Float[Tensor, "batch head token dim"]:
        """Combine the block's own attention with the reading (mechanisms that do not share its softmax).

        `visible` is given when rows have readings of different sizes; a row without any keeps `local`.
        """
        raise NotImplementedError

    def mix_all(
        self,
        local: Float[Tensor, "batch block head token dim"],
        query: Float[Tensor, "batch block head token dim"],
        readings: Sequence[Reading],
    ) -> Float[Tensor, "batch block head token dim"] | None:
        """`mix` for all blocks of a sample at once, with the readings of `read_all`; None: `mix` is called instead."""
        return None

    def read_all(
        self, key: Float[Tensor, "batch kv_head token dim"], value: Float[Tensor, "batch kv_head token dim"], host: Host
    ) -> Sequence[Reading]:
        """The readings of blocks 1, 2, ... of a whole sample, of block 0 too if it `reads_start`.

        A loop over blocks, unless a mechanism knows better.
        """
        size = self.geometry.block_size
        state = self.start(key.shape[0], key.device)
        readings = [self.read(state, 0, host)] if self.reads_start else []
        for index, seen in enumerate(range(0, key.shape[2] - size, size), 1):
            block = Block(key[:, :, seen : seen + size], value[:, :, seen : seen + size])
            state = self.cut(self.write(state, block, seen), index)
            readings.append(self.read(state, seen + size, host))
        return readings

    def history(self, signal: Tensor, block: int) -> Tensor:
        """The tokens before block number `block`, detached as far as `detach_every` says."""
        size = self.geometry.block_size
        cut = block // self.detach_every * self.detach_every * size if self.detach_every else 0
        past, near = signal[:, :, :cut], signal[:, :, cut : block * size]
        return torch.cat((past.detach(), near), dim=2) if cut else near

    def cut(self, state: State, block: int) -> State:
        """The state that enters block number `block`, detached where `detach_every` says so."""
        if self.detach_every and block % self.detach_every == 0:
            return tuple(part.detach() for part in state)
        return state

    def set_retrieval(self, **changes: Any) -> None:
        """Change how the state is read, at run time."""
        raise ValueError(f"{type(self).__name__} has no retrieval to set: what it reads is settled when it is built")

    def adapt(self, state: State) -> tuple[State, str | None]:
        """Fit a state made under other retrieval settings to the present ones, and say what was done."""
        return state, None

    @property
    def floats(self) -> Floats:
        """Size of the state per row."""
        carried = sum(part.numel() for part in self.start(1, "meta"))
        return Floats(carried, carried)

    @property
    def extra_parameters(self) -> int:
        """Trainable parameters the mechanism adds to its layer."""
        return sum(parameter.numel() for parameter in self.parameters())

    def gates(self) -> dict[str, Tensor]:
        """What to log during training: the openness of each head's gate, where there is one."""
        return {name: gate.detach().sigmoid() for name, gate in self.named_parameters() if name.endswith("gate")}


def gated(
    gate: Float[Tensor, " head"],
    remembered: Float[Tensor, "batch head token dim"],
    local: Float[Tensor, "batch head token dim"],
    visible: Bool[Tensor, "batch column"] | None,
) -> Float[Tensor, "batch head token dim"]:
    """g remembered + (1 - g) local with g = sigmoid(gate), and `local` alone in rows that have no reading."""
    openness = gate.sigmoid()[:, None, None]
    mixed = (local + openness * (remembered - local)).to(local.dtype)
    return mixed if visible is None else torch.where(visible.any(1)[:, None, None, None], mixed, local)


def real_features(dim: int, stored: int, device: torch.device | None = None) -> Bool[Tensor, " stored"]:
    """Which of a head's `stored` features are among its `dim` real ones: padding stands behind either half."""
    half = torch.arange(stored // 2, device=device) < dim // 2
    return torch.cat((half, half))


def constant(number: int) -> int:
    """A number on which a compiled graph may depend: dynamo makes a constant of what `range` takes."""
    return len(range(number))


def wide(x: Tensor) -> Tensor:
    """In float32 at least, as states are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def one_of(name: str, value: Any, names: Sequence[str]) -> Any:
    """`value`, if it is one of `names`."""
    if value not in names:
        raise ValueError(f"{name}={value!r}: there are {', '.join(names)}")
    return value


def full_precision(function: Callable) -> Callable:
    """Run a method without autocast: state is float32 whatever the activations are."""

    def run(self: Memory, state: State, *args: Any) -> Any:
        with torch.autocast(state[0].device.type if state else "cpu", enabled=False):
            return function(self, state, *args)

    run.__doc__ = function.__doc__
    return run
