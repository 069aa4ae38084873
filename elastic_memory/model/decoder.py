"""Decoding at full speed: one token of each row on buffers that never move, as a CUDA graph where there is a GPU.

Inside a block nothing changes but tensors: the token, its position, one more column of keys and values. So a step is
captured once and replayed; when blocks close, rows are reordered or tokens taken back, the buffers are filled anew.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import torch

from elastic_memory.model.stream import column_mask
from elastic_memory.shapes import Float, Int, Tensor

if TYPE_CHECKING:
    from elastic_memory.model.cache import MemoryCache


# A step looks at a whole number of such stretches of the block, as many as its rows have begun: looking at the empty
# rest of a block would double what a step reads. One graph for each number.
STRETCH = 256


@lru_cache
def _side_stream(device: torch.device) -> Any:
    """One for all decoders: cuBLAS keeps 32 MiB for every stream it ever saw."""
    return torch.cuda.Stream(device)


class Decoder:
    """A captured step of `backbone` on the open blocks of `cache`."""

    def __init__(self, backbone: Any, cache: "MemoryCache", ids: Int[Tensor, "batch 1"]):
        if cache.locality.kind == "full":
            raise ValueError("a static cache needs blocks; local_attention='full' has none")
        self.backbone, self.streams, self.size = backbone, cache.streams, cache.block_size
        self.window = cache.block_size if cache.locality.sliding else None
        self.ids = ids.clone()
        self.positions = torch.zeros_like(ids)
        self.tokens = ids.new_zeros(len(ids), self.size)
        self.rope = backbone.rope().at(torch.arange(self.size, device=ids.device))
        self.begun = torch.zeros(len(ids), 1, dtype=torch.bool, device=ids.device)
        self.remembered = [self._remembered(stream) for stream in self.streams]
        self.buffers = [stream.room(self.size, backbone) for stream in self.streams]
        self.readings = [stream.reading and tuple(part.clone() for part in stream.reading) for stream in self.streams]
        self.shapes, self.settled = self._shapes(cache), self.conditions(backbone)
        self.graphs: dict[int, Any] = {}  # by columns of the block that are looked at: (graph, hidden states)

    @classmethod
    def fill(cls, backbone: Any, cache: "MemoryCache", ids: Int[Tensor, "batch 1"], old: Self | None) -> Self:
        """A decoder that continues `cache`: the `old` one with new contents, if its shapes still fit."""
        fits = old is not None and old.shapes == cls._shapes(cache) and old.settled == cls.conditions(backbone)
        decoder = old if old is not None and fits else cls(backbone, cache, ids)
        if not decoder.graphs and ids.is_cuda:
            with torch.cuda.device(ids.device):
                decoder._capture()  # runs the step, so what the buffers hold comes after it
        decoder._take(cache)
        return decoder

    def __call__(self, ids: Int[Tensor, "batch 1"], opened: int) -> Float[Tensor, "batch 1 width"]:
        """Hidden states of the next token of each row, the longest of which has `opened` tokens in its block."""
        self.ids.copy_(ids)
        reach = next(reach for reach in self._reaches() if opened < reach)
        if reach not in self.graphs:
            return self._step(reach)
        graph, hidden = self.graphs[reach]
        graph.replay()
        return hidden.clone()

    def _reaches(self) -> list[int]:
        """Numbers of columns of the block that a step may look at."""
        return [min(reach, self.size) for reach in range(STRETCH, self.size + STRETCH, STRETCH)]

    def _step(self, reach: int) -> Float[Tensor, "batch 1 width"]:
        self.tokens.scatter_(1, self.positions, self.ids)
        rope = tuple(table[0][self.positions] for table in self.rope)
        hidden, shared = self.backbone.residual(self.backbone.embed_tokens(self.ids)), {}
        for index, (layer, stream) in enumerate(zip(self.backbone.layers, self.streams, strict=True)):
            memory, before = stream.memory_columns, stream.front - stream.memory_columns
            if (memory, before) not in shared:
                local = torch.arange(-before, reach, device=self.ids.device)
                remembered = self.remembered[index][:, :memory]
                visible = column_mask(self.positions, local, remembered, self.begun, self.window)
                mask = torch.zeros_like(visible, dtype=hidden.dtype).masked_fill_(~visible, -torch.inf)
                shared[memory, before] = self.positions + stream.front, mask
            columns, mask = shared[memory, before]
            visible = None if stream.memory.joins else self.remembered[index]
            hidden = layer.decode(
                hidden, rope, self.positions, columns, self.buffers[index], mask, self.readings[index], visible,
            )  # fmt: skip
        self.positions.add_(1)
        return self.backbone.norm(hidden)

    def _capture(self) -> None:
        """Warm up on a stream of its own, as CUDA graphs ask, then record; one pool for all, as they run in turns."""
        side, pool = _side_stream(self.ids.device), torch.cuda.graph_pool_handle()
        for reach in self._reaches():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.positions.zero_()
                self._step(reach)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden = self._step(reach)
            self.graphs[reach] = graph, hidden

    def _take(self, cache: "MemoryCache") -> None:
        """Copy what the cache holds into the buffers, and let the cache hold the buffers."""
        self.streams, cache.decoding = cache.streams, True
        self.positions.copy_(torch.tensor(cache.opened)[:, None])
        self.begun.copy_(torch.tensor(cache.seen)[:, None] > 0)
        if cache.tokens is not None:
            width = min(cache.tokens.shape[1], self.size)
            self.tokens[:, :width].copy_(cache.tokens[:, :width])
        if cache.tokens is not None or not any(cache.opened):  # what was fed as embeddings has no ids
            cache.tokens = self.tokens
        for index, stream in enumerate(cache.streams):
            stream.move(self.buffers[index])
            self.remembered[index].copy_(self._remembered(stream))
            if stream.reading:
                for ours, theirs in zip(self.readings[index], stream.reading, strict=True):
                    ours.copy_(theirs)

    def tensors(self) -> list[Tensor]:
        """What it holds in proportion to the block and the memory."""
        buffers = [x for own in self.buffers for x in own.values()]
        return [self.tokens, *buffers, *(x for reading in self.readings for x in reading or ())]

    def _remembered(self, stream: Any) -> Tensor:
        """Which columns of its reading each row has."""
        columns = stream.reading[0].shape[2] if stream.reading else 0
        counts = torch.tensor(stream.counts, device=self.ids.device)
        return torch.arange(columns, device=self.ids.device) < counts[:, None]

    @staticmethod
    def conditions(backbone: Any) -> list[Any]:
        """What a captured step depends on besides the cache: weights, precision, and how memories are read."""
        weight = backbone.embed_tokens.weight
        autocast = torch.is_autocast_enabled(weight.device.type) and torch.get_autocast_dtype(weight.device.type)
        return [weight.data_ptr(), weight.dtype, autocast, *(layer.memory.retrieval for layer in backbone.layers)]

    @staticmethod
    def _shapes(cache: "MemoryCache") -> list[Any]:
        """What it depends on in the cache."""
        return [
            (len(stream.counts), stream.front, [part.shape for part in stream.reading or ()])
            for stream in cache.streams
        ]
