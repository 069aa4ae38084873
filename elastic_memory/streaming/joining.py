"""Joining memories: caches one after another, and the blocks of a long text, which are then read in parallel.

If attention is block-local and one layer has a memory, the keys and values of a block depend on that block alone. Then
parts that were read separately and joined equal the whole text read in order, up to rounding. Joins are computed in
float64 and states stored in float32: a thousand parts are as precise as one.
"""

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from elastic_memory.attention import without_cudnn
from elastic_memory.common.hooks import has_hooks
from elastic_memory.memory import Block, Memory, State
from elastic_memory.shapes import Int, Tensor
from elastic_memory.streaming import memory_file
from elastic_memory.streaming.fingerprint import settings, weights_hash
from elastic_memory.streaming.reader import AT_ONCE, Reader

if TYPE_CHECKING:
    from elastic_memory.streaming.cache import MemoryCache


class History(NamedTuple):
    """The memory of some tokens: its state, in float64, and their number."""

    state: State
    tokens: int

    def then(self, other: "History", memory: Memory) -> "History":
        """This history, followed by the other."""
        if not self.tokens or not other.tokens:
            return self if self.tokens else other
        state = memory.join(self.state, self.tokens, other.state, other.tokens)
        return History(state, self.tokens + other.tokens)


def inexact(model: Any) -> str | None:
    """Why parts that are read separately and joined differ from the text read in order; None if they do not."""
    layers = [index for index, layer in enumerate(model.base_model.layers) if layer.memory.start(1, "meta")]
    if model.base_model.layers[0].locality.sliding:
        return "sliding attention looks back across the border between two parts"
    if len(layers) > 1:
        return f"layers {', '.join(map(str, layers[1:]))} remember what layer {layers[0]} read from its own memory"
    return None


def check_joinable(model: Any, approximate: bool = False) -> None:
    """Refuse a model whose memories cannot be joined, or only approximately."""
    if model.base_model.layers[0].locality.kind == "full":
        raise ValueError("full attention keeps every token instead of a memory: there is nothing to join")
    if model.base_model.layers[0].locality.lag:
        raise ValueError("a window of several blocks holds tokens that no memory holds yet: give window=block_size")
    for memory in model.memories.values():
        if memory.no_join:
            raise ValueError(f"{type(memory).__name__} cannot join: {memory.no_join}")
    reason = inexact(model)
    if reason and not approximate:
        raise ValueError(
            f"{reason}, so joined parts equal the text read in order only approximately: approximate=True "
            "(--approximate) joins them anyway; docs/composing.md says how large the error is"
        )


# -- caches one after another ------------------------------------------------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def join(caches: Iterable["MemoryCache"], approximate: bool) -> "MemoryCache":
    """The cache that has read what these have read, in this order. They are taken one at a time, and not changed."""
    before: _Ended | None = None
    last: MemoryCache | None = None
    for number, cache in enumerate(caches, 1):
        _check(cache, last, f"cache {number}{f' ({name})' if (name := getattr(cache, 'name', None)) else ''}")
        if last is None:
            check_joinable(cache.model, approximate)
        else:
            before = _Ended(last) if before is None else before.then(_Ended(last), last)
        last = cache
    if last is None:
        raise ValueError("no caches to join: give at least one")
    result = last.fork()
    if before is not None:
        before.put_before(result)
    return result


class _Ended:
    """All that a cache has read, its open block included, as texts that have ended; histories by layer and row."""

    def __init__(self, cache: "MemoryCache"):
        self.columns, self.texts = cache.columns, cache.texts
        self.parts = [cache.ended_parts(row) for row in range(cache.batch)]
        self.histories = {
            index: [_history(cache, index, row, whole=True) for row in range(cache.batch)]
            for index, stream in enumerate(cache.streams)
            if stream.state
        }

    def then(self, other: "_Ended", cache: "MemoryCache") -> "_Ended":
        """This, followed by the other."""
        self.columns, self.texts = self.columns + other.columns, self.texts + other.texts
        self.parts = [[*one, *two] for one, two in zip(self.parts, other.parts, strict=True)]
        for index, rows in self.histories.items():
            memory = cache.streams[index].memory
            pairs = zip(rows, other.histories[index], strict=True)
            self.histories[index] = [one.then(two, memory) for one, two in pairs]
        return self

    def put_before(self, cache: "MemoryCache") -> None:
        """Put this history before that of `cache`."""
        states = {}
        for index, rows in self.histories.items():
            own = [_history(cache, index, row, whole=False) for row in range(cache.batch)]
            memory = cache.streams[index].memory
            joined = [one.then(two, memory).state for one, two in zip(rows, own, strict=True)]
            states[index] = tuple(torch.cat(parts).float() for parts in zip(*joined, strict=True))
        cache.prepend(states, self.parts, self.columns, self.texts)


def _history(cache: "MemoryCache", index: int, row: int, whole: bool) -> History:
    """The history of a row in one layer; with `whole` its open block included."""
    stream, seen, opened = cache.streams[index], cache.seen[row], cache.opened[row] if whole else 0
    state = tuple(part[row : row + 1] for part in stream.state)
    if opened:
        state = stream.memory.write(state, stream.block([row], opened), seen)
    return History(tuple(part.double() for part in state), seen + opened)


def _check(cache: Any, last: "MemoryCache | None", what: str) -> None:
    """Refuse an object that is no cache, and a cache whose model or shape differs from the last one's."""
    if not isinstance(cache, Reader):
        raise ValueError(f"{what} is a {type(cache).__name__}: give MemoryCaches")
    if not any(cache.clock):
        raise ValueError(f"{what} has read nothing: leave it out")
    for stream in cache.streams:
        held, wanted = (
            [list(part.shape[1:]) for part in state] for state in (stream.state, stream.memory.start(1, "meta"))
        )
        if held != wanted:
            raise ValueError(f"{what} was read at another order: its state is {held}, the model's is {wanted} now")
    if last is None or (cache.model is last.model and cache.batch == last.batch and cache.device == last.device):
        return
    if cache.batch != last.batch or cache.device != last.device:
        raise ValueError(
            f"{what} has {cache.batch} rows on {cache.device}, those before it {last.batch} on {last.device}"
        )
    here, there = ({**settings(one.model), **memory_file.shape_of(one.model)} for one in (last, cache))
    different = [f"{name} {there.get(name)} instead of {here[name]}" for name in here if there.get(name) != here[name]]
    if different:
        raise ValueError(f"{what} was read by another model: {'; '.join(different)}"[:500])
    if weights_hash(cache.model) != weights_hash(last.model):
        raise ValueError(f"{what} was read by a model of other weights: its state cannot be used with this one")


# -- blocks in parallel ------------------------------------------------------------------------------------------------


def read(cache: "MemoryCache", ids: Int[Tensor, "batch token"], group: Any = None) -> None:
    """Read `ids`: whole blocks in parallel, and the last block as usual."""
    cache.begin(len(ids), ids.device)
    if group is not None:
        check_joinable(cache.model)
        _check_same_tokens(cache, ids, group)
    done = read_blocks(cache, ids, group)
    cache.model.base_model(input_ids=ids[:, done:], past_key_values=cache, keep=1)


@torch.inference_mode(False)
@torch.no_grad()
def read_blocks(cache: "MemoryCache", ids: Int[Tensor, "batch token"], group: Any = None) -> int:
    """Read whole blocks of `ids` in parallel. Returns how many columns that were: 0 if it would not be exact."""
    cache.begin(len(ids), ids.device)
    cache.mark()
    cache.refresh()
    uniform = len(set(zip(cache.seen, cache.opened, strict=True))) == 1
    probed = any(attention.corrupt is not None for attention in cache.attentions)
    known = cache.tokens is not None or not any(cache.opened)
    joinable = not inexact(cache.model) and not any(memory.no_join for memory in cache.memories)
    opened, size = cache.opened[0], cache.block_size
    blocks = (opened + ids.shape[1] - 1) // size
    if blocks < 2 or not (uniform and known and joinable) or probed or cache.recording or _hooked(cache):
        return 0
    done = blocks * size - opened
    whole = ids[:, :done] if cache.tokens is None else torch.cat((cache.tokens[:, :opened], ids[:, :done]), dim=1)
    states = {}
    for index, stream in enumerate(cache.streams):
        if stream.state:
            before = History(tuple(part.double() for part in stream.state), cache.seen[0])
            state = before.then(_compress(cache.model.base_model, index, whole, group), stream.memory).state
            states[index] = tuple(part.float() for part in state)
    cache.absorb(states, whole)
    return done


def _hooked(cache: "MemoryCache") -> bool:
    """Whether modules have hooks, which would miss calls: reading blocks leaves layers out."""
    backbone = cache.model.base_model
    return backbone.offloaded() or any(has_hooks(module) for module in backbone.modules())


def _compress(backbone: Any, index: int, ids: Int[Tensor, "batch token"], group: Any) -> History:
    """The memory of whole blocks in layer `index`; with a `group` each process computes a share."""
    memory, size = backbone.layers[index].memory, backbone.layers[index].locality.block_size
    if group is None:
        return _read_share(backbone, index, ids)
    rank, shares = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    edges = [ids.shape[1] // size * share // shares * size for share in range(shares + 1)]
    own = _read_share(backbone, index, ids[:, edges[rank] : edges[rank + 1]])
    result = History((), 0)
    gathered = [_gather(part, shares, group) for part in own.state]
    for share, state in enumerate(zip(*gathered, strict=True)):
        result = result.then(History(state, edges[share + 1] - edges[share]), memory)
    return result


def _read_share(backbone: Any, index: int, ids: Int[Tensor, "batch token"]) -> History:
    """The memory of whole blocks in layer `index`. Only the layers below are computed, all blocks at once."""
    layer = backbone.layers[index]
    memory, size = layer.memory, layer.locality.block_size
    rope = backbone.rope(size)
    result = History(tuple(part.double() for part in memory.start(len(ids), ids.device)), 0)
    some = max(1, AT_ONCE // len(ids) // size) * size
    for piece in ids.split(some, dim=1) if ids.shape[1] else ():
        hidden = backbone.residual(backbone.embed_tokens(piece))
        with without_cudnn():
            for lower in backbone.layers[:index]:
                hidden = type(lower).blocks(lower, hidden, rope)
        _, key, value = layer.self_attn.project(layer.input_layernorm(hidden))
        state = memory.write(memory.start(len(ids), ids.device), Block(key, value), 0)
        result = result.then(History(tuple(part.double() for part in state), piece.shape[1]), memory)
    return result


def _gather(part: Tensor, shares: int, group: Any) -> list[Tensor]:
    """The tensors of all processes."""
    every = [torch.empty_like(part) for _ in range(shares)]
    torch.distributed.all_gather(every, part.contiguous(), group=group)
    return every


def _check_same_tokens(cache: "MemoryCache", ids: Int[Tensor, "batch token"], group: Any) -> None:
    """Refuse to share work if the processes have read, or were given, different tokens."""
    known = repr((cache.seen, cache.opened, cache.digests, tuple(ids.shape))).encode() + ids.cpu().numpy().tobytes()
    digest = torch.frombuffer(bytearray(hashlib.blake2b(known, digest_size=16).digest()), dtype=torch.uint8)
    every = _gather(digest.to(ids.device), torch.distributed.get_world_size(group), group)
    if not all(torch.equal(one, every[0]) for one in every):
        raise ValueError("the processes of the group do not hold the same tokens: give all of them the whole text")
