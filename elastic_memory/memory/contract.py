"""What a memory is.

A sample is read in blocks. Before a block, `read` turns the state left by all earlier blocks into a *reading*, which
the block's queries use; after it, `write` adds the block to the state. State and reading are values, tuples of tensors
whose first axis is the row of the batch: passed in, returned, never kept on `self`. Block 0 has no reading, unless the
mechanism `reads_start`. With a sliding window of several blocks, memory holds only what leaves it: reading and writing
then lag behind, and `seen` counts the tokens in memory.

A mechanism is one subclass in one file: `start`, `read`, `write`, and `mix` if its reading does not join the block's
softmax (`shares_softmax`). It never sees masks, padding or positions in the sample: rows at different positions,
streaming, caches and gradient checkpointing are the caller's work. Two kinds of memory have a subclass of their own:

    ParallelMemory        the state depends on keys and values only: all blocks of a sample are read at once
    SummaryTokenMemory    the state is made of tokens that pass through the layer with each block
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from numbers import Integral, Real
from types import NoneType
from typing import Any, ClassVar, NamedTuple, Self, get_args, get_origin

import torch
from torch import nn

from elastic_memory.common.names import suggest
from elastic_memory.memory.tools import Reading, group_by_size
from elastic_memory.shapes import Bool, Float, Tensor

State = tuple[Tensor, ...]
Heads = Float[Tensor, "batch head token dim"]
KeyValues = Float[Tensor, "batch kv_head token dim"]
Blocks = Float[Tensor, "batch block head token dim"]

RENAMED = {"road": "algorithm"}  # earlier names of options


def with_new_names(options: dict[str, Any] | None) -> dict[str, Any] | None:
    """Options of a saved model under their present names."""
    return options and {RENAMED.get(name, name): value for name, value in options.items()}


@dataclass(frozen=True)
class Geometry:
    """The shape of the layer a memory lives in."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    block_size: int
    initializer_range: float = 0.02
    scale: float | None = None  # of attention scores; None: 1 / sqrt(head_dim)
    features: int | None = None  # of a head without its padding (`pad_heads`); None: all
    sliding: bool = False  # whether attention slides instead of being block-local


class Host(NamedTuple):
    """What a memory may ask of the layer it lives in."""

    # (x [batch, head, token, dim], positions [token]) -> x rotated; 0 is the position behind the last token in memory
    rope: Callable[[Tensor, Tensor], Tensor]
    project: Callable[[Tensor], tuple[Tensor, Tensor]]  # tokens of the residual stream -> raw keys, values


class Block(NamedTuple):
    """A complete block, or the last of a sample, as `write` gets it."""

    key: KeyValues  # before rotary positions
    value: KeyValues
    output: Float[Tensor, "batch token width"] | None = None  # of the layer; for summary-token memories
    tail: Float[Tensor, "batch tail width"] | None = None  # the layer's output for the memory's `tail`


def _at_two_thirds(layers: int) -> list[int]:
    return [layers * 2 // 3]


def _as_large_as_infini(multiple: int, geometry: Geometry) -> int:
    return multiple * geometry.head_dim * geometry.layers // 2


@dataclass(frozen=True, kw_only=True)
class MemoryInfo:
    """What presets, catalogues and reports need to know of a mechanism; nothing here changes what it computes."""

    source: str = ""
    phrase: str = ""
    # Number of layers -> indices of those with memory in the paper: the 9th of 12.
    layers: Callable[[int], list[int]] = _at_two_thirds
    # (multiple, geometry) -> `order`; 1x is the paper's memory size, that of Infini-Transformer in the whole model.
    order_at: Callable[[int, Geometry], int | None] = _as_large_as_infini
    # Sizes of the state's parts -> floats per row, as the paper counts them.
    paper_floats: Callable[..., int] = lambda *parts: sum(parts)


# Annotation of an option -> the type it accepts, and that type in words. Strings are checked by the mechanism, which
# knows the allowed ones.
TYPES: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"), int: (Integral, "a whole number"), float: (Real, "a number"),
    dict: (dict, "names and their values"), NoneType: (NoneType, "None"),
}  # fmt: skip


def check_type(name: str, value: Any, annotation: Any) -> None:
    """Refuse an option that does not fit its annotation; annotations beyond `TYPES` are not checked."""
    parts = [annotation] if get_origin(annotation) in TYPES or annotation in TYPES else get_args(annotation)
    kinds = [get_origin(part) or part for part in parts]
    if annotation is Parameter.empty or not kinds or not TYPES.keys() >= set(kinds):
        return
    bool_as_number = isinstance(value, bool) and bool not in kinds  # bool is a subclass of int
    if bool_as_number or not isinstance(value, tuple(TYPES[kind][0] for kind in kinds)):
        raise ValueError(f"{name}={value!r}: give {' or '.join(TYPES[kind][1] for kind in kinds)}")


class Memory(nn.Module):
    """One mechanism in one layer."""

    info: ClassVar[MemoryInfo] = MemoryInfo()
    shares_softmax: bool = False  # the reading is (key, value): further columns in the block's own softmax
    # The reading is (key, value, score), with scores [batch, 1 or kv_head, column, 1] added to those of attention.
    adds_score: bool = False
    raw_queries: bool = False  # its columns are scored with queries before rotary positions
    reads_start: bool = False  # block 0 reads the empty state
    reach: int | None = None  # tokens before a block that can influence it; None: the whole history
    no_sliding: str | None = "its blocks are read one after another"  # why `local_attention="sliding"` is undefined
    widens: int = 0  # tokens that the memory keeps by widening the layer's sliding window instead of in its state
    no_join: str | None = "it defines no join"  # why the states of two parts do not give the state of the whole
    built_with: dict[str, Any]  # every option, given or left to its default
    retrieval: Any = None  # settings that readings depend on; when they change, caches read their state again
    # How far each query head uses the memory: its output is local + blend (mixed - local), where `local` is attention
    # without memory and `mixed` with it. None: mixed, and no parameter.
    blend: nn.Parameter | None
    # (query, key) before rotary positions -> what attention and memory use instead; None: use them unchanged
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def __init__(self, geometry: Geometry, *, detach_every: int | None = None):
        super().__init__()
        if detach_every is not None and detach_every < 1:
            raise ValueError(f"detach_every={detach_every}: give a number of blocks from 1 on, or None for no cut")
        self.geometry = geometry
        self.detach_every = detach_every
        self.register_parameter("blend", None)

    def start(self, batch: int, device: torch.device | str | None = None) -> State:
        """The empty state, float32."""
        raise NotImplementedError

    def read(self, state: State, seen: int, host: Host) -> Reading:
        """The reading for a block after `seen` tokens; axis 2 of each tensor is the column.

        The number of columns depends on `seen` alone.
        """
        raise NotImplementedError

    def write(self, state: State, block: Block, seen: int) -> State:
        """The state after `block`, which begins at token `seen`."""
        raise NotImplementedError

    def mix(
        self, local: Heads, query: Heads, rotated: Heads, reading: Reading, visible: Bool[Tensor, "batch column"] | None
    ) -> Heads:
        """Combine the block's own attention with the reading (mechanisms that do not share its softmax).

        `visible`: which columns a row has, if rows differ; a row without any keeps `local`.
        """
        raise NotImplementedError

    # Optional from here on.

    def reset(self) -> None:
        """Initialise the parameters, if there are any."""

    def join(self, state: State, seen: int, other: State, other_seen: int) -> State:
        """The state of two histories of `seen` and `other_seen` tokens in sequence, each read from an empty state.

        Computed in the precision of the states. A mechanism that defines it sets `no_join` to None.
        """
        raise ValueError(f"{type(self).__name__} cannot join two states: {self.no_join}")

    def set_retrieval(self, **changes: Any) -> None:
        """Change how the state is read, at run time."""
        raise ValueError(f"{type(self).__name__} has no retrieval settings: how it is read is fixed when it is built")

    def adapt(self, state: State) -> tuple[State, str | None]:
        """Fit a state made under other retrieval settings to the present ones; also returns a warning, or None."""
        return state, None

    # For callers.

    @classmethod
    def build(cls, geometry: Geometry, options: dict[str, Any]) -> Self:
        """Construct the mechanism; an option that it does not have is an error that names those it has.

        Every mechanism has the option `silent`: a learned blend by head that starts at zero, so that the layer
        computes what it would without memory until it is trained (choices.md, "silent start").
        """
        own = {name: value for name, value in options.items() if name != "silent"}
        known = [name for name in signature(cls.__init__).parameters if name not in ("self", "geometry")]
        for name in own:
            if not cls.has_option(name):
                hint = suggest(name, [*known, "silent"])
                if RENAMED.get(name) in known:
                    hint = f"did you mean {RENAMED[name]!r}? It had this name in earlier versions"
                raise ValueError(f"{cls.__name__} has no option {name!r}: {hint}")
            check_type(name, own[name], signature(cls.__init__).parameters[name].annotation)
        memory = cls(geometry, **own)
        silent = options.get("silent", False)
        check_type("silent", silent, bool)
        if silent:
            if not memory.start(1, "meta"):
                raise ValueError(f"silent=True has no effect: {cls.__name__} has no memory state here; leave it out")
            memory.blend = nn.Parameter(torch.zeros(geometry.heads))
        memory.built_with = {name: own.get(name, signature(cls).parameters[name].default) for name in known}
        memory.built_with |= {"silent": True} if silent else {}
        return memory

    def initialise(self) -> None:
        """Initialise all parameters, the blend too."""
        self.reset()
        if self.blend is not None:
            nn.init.zeros_(self.blend)

    @classmethod
    def has_option(cls, name: str) -> bool:
        """Whether the mechanism takes this argument."""
        return name in signature(cls.__init__).parameters

    def cut(self, state: State, block: int) -> State:
        """The state that enters block number `block`, detached where `detach_every` says so."""
        if self.detach_every and block % self.detach_every == 0:
            return tuple(part.detach() for part in state)
        return state


class ParallelMemory(Memory):
    """A memory whose state depends on keys and values only, so that all blocks of a sample are read at once."""

    no_sliding: str | None = None

    def read_all(self, key: KeyValues, value: KeyValues, host: Host) -> Sequence[Reading]:
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

    def mix_all(self, local: Blocks, query: Blocks, rotated: Blocks, readings: Sequence[Reading]) -> Blocks:
        """`mix` for all blocks of a sample, with the readings of `read_all`; readings of one size go together."""
        parts = []
        for first, last, reading in group_by_size(query.shape[1], readings):
            own, raw, at_positions = (x[:, first:last].flatten(0, 1) for x in (local, query, rotated))
            if reading:
                own = self.mix(own, raw, at_positions, reading, None)
            parts.append(own.unflatten(0, (-1, last - first)))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def history(self, signal: Tensor, block: int) -> Tensor:
        """The tokens before block number `block`, detached up to the last cut of `detach_every`."""
        size = self.geometry.block_size
        cut = block // self.detach_every * self.detach_every * size if self.detach_every else 0
        past, near = signal[:, :, :cut], signal[:, :, cut : block * size]
        return torch.cat((past.detach(), near), dim=2) if cut else near


class SummaryTokenMemory(Memory):
    """A memory of tokens that pass through the layer with each block: its state depends on the layer's output."""

    front_size: int  # tokens of `front`
    per_row_parameters: ClassVar[bool] = False  # whether `write` and `tail` support batched (per-row) parameters

    def front(self, state: State) -> Float[Tensor, "batch front width"]:
        """The memory tokens in front of the next block; `read` returns their keys and values.

        It is faster to send them through the layer together with the block.
        """
        raise NotImplementedError

    def tail(self) -> Float[Tensor, "*row tail width"]:
        """Summary tokens behind each block: they attend to the block and to each other; the block does not see them."""
        raise NotImplementedError
