"""Decoding for static caches: one token of each row on buffers at fixed addresses, on a GPU as a CUDA graph.

Inside a block only tensors change: the token, its position, one more column of keys and values. So a step is captured
once and replayed; when blocks close, rows are reordered or tokens are rolled back, the buffers are filled again.

Layers that are plain Llama except for memory columns run on five Triton kernels (`kernels/decoding.py`), which read
only what a row sees; others on `_decode_layer`, which reads part of the block under a mask.
"""

import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Self

import torch
from torch import nn
from transformers.activations import ACT2FN

from elastic_memory.attention import column_mask, rotate
from elastic_memory.fast.kernels import triton_runs_on
from elastic_memory.memory import Reading
from elastic_memory.memory.contract import Heads
from elastic_memory.shapes import Bool, Float, Int, Tensor
from elastic_memory.streaming.layer_cache import LayerCache

# With a mask, a step reads the first n * STRETCH columns of the block, by one graph for each n: reading the empty rest
# would double the traffic.
STRETCH = 256

SHARED_MEMORY = 160 * 2**10  # bytes that one program of the kernels may need

# Decoders by backbone, newest last: recording a graph takes as long as many tokens, and the next call of `generate`
# needs the same one. Those whose cache is gone are kept up to this number and size.
DECODERS: weakref.WeakKeyDictionary[Any, list["Decoder"]] = weakref.WeakKeyDictionary()
IDLE, IDLE_BYTES = 2, 2**30


@lru_cache
def _side_stream(device: torch.device) -> Any:
    """One CUDA stream for all decoders: cuBLAS keeps 32 MiB for every stream it has seen."""
    return torch.cuda.Stream(device)


class Decoder:
    """The captured decoding step of `backbone` on the open blocks of a cache; `streams` are its layer caches."""

    def __init__(self, backbone: Any, streams: list[LayerCache], ids: Int[Tensor, "batch 1"]):
        locality = backbone.layers[0].locality
        if locality.kind == "full":
            raise ValueError("a static cache needs blocks; local_attention='full' has none")
        self._backbone, self.streams, self.size = weakref.ref(backbone), streams, locality.block_size
        self.cache: Any = lambda: None  # weak reference to the cache whose open blocks are in the buffers
        self.ids = ids.clone()
        self.positions = torch.zeros_like(ids)
        self.tokens = ids.new_zeros(len(ids), self.size)
        self.rope = backbone.rope().at(torch.arange(self.size, device=ids.device))
        self.seen = torch.zeros_like(ids)
        self.counts = [torch.zeros_like(ids) for _ in self.streams]
        self.remembered = [self._remembered(stream) for stream in self.streams]
        self.buffers = [stream.new_buffers(self.size, backbone) for stream in self.streams]
        self.readings = [stream.reading and tuple(part.clone() for part in stream.reading) for stream in self.streams]
        self.shapes, self.settled = self._shapes(streams), self.conditions(backbone, streams)
        self.kernels = _kernels(ids.device)
        self.fused = _fused_layers(backbone)
        stretch = self.size if all(self.fused) else STRETCH
        self.reaches = [min(reach, self.size) for reach in range(stretch, self.size + stretch, stretch)]
        self.graphs: dict[int, Any] = {}  # by columns of the block that are read: (graph, hidden states)
        self.pool = torch.cuda.graph_pool_handle() if ids.is_cuda else None  # shared: graphs never run at once

    @property
    def backbone(self) -> Any:
        """The model's backbone, by a weak reference: decoders do not keep models alive."""
        return self._backbone()

    @classmethod
    def fitting(cls, cache: Any, backbone: Any, ids: Int[Tensor, "batch 1"]) -> Self:
        """A decoder for a cache: its own or an idle one, if the shapes fit; else a new one."""
        known: list[Any] = DECODERS.setdefault(backbone, [])
        shapes, settled, fused = cls._shapes(cache.streams), cls.conditions(backbone, cache.streams), None
        for decoder in known:
            if decoder.cache() in (None, cache) and (decoder.shapes, decoder.settled) == (shapes, settled):
                fused = fused or _fused_layers(backbone)
                if decoder.fused == fused:
                    break
        else:
            decoder = cls(backbone, cache.streams, ids)
        idle = [other for other in known if other is not decoder and other.cache() in (None, cache)]
        while idle and (len(idle) > IDLE or sum(x.nbytes for one in idle for x in one.tensors()) > IDLE_BYTES):
            known.remove(idle.pop(0))
        DECODERS[backbone] = [*(other for other in known if other is not decoder), decoder]
        decoder.cache = weakref.ref(cache)
        return decoder

    def __call__(self, ids: Int[Tensor, "batch 1"], opened: int) -> Float[Tensor, "batch 1 width"]:
        """Hidden states of the next token of each row, the longest of which has `opened` tokens in its block."""
        self.ids.copy_(ids)
        reach = next(reach for reach in self.reaches if opened < reach)
        if not ids.is_cuda:
            return self._step(reach)
        if reach not in self.graphs:
            with torch.cuda.device(ids.device):
                self._capture(reach)
        graph, hidden = self.graphs[reach]
        graph.replay()
        return hidden.clone()

    def _step(self, reach: int) -> Float[Tensor, "batch 1 width"]:
        self.tokens.scatter_(1, self.positions, self.ids)
        hidden = self.backbone.residual(self.backbone.embed_tokens(self.ids))
        shared: dict[Any, Any] = {}  # among layers that need them: rotary positions and masks
        for index, (layer, stream) in enumerate(zip(self.backbone.layers, self.streams, strict=True)):
            if self.fused[index]:
                hidden = self._fused(index, hidden)
                continue
            memory, before = stream.memory_columns, stream.front - stream.memory_columns
            if "rope" not in shared:
                shared["rope"] = tuple(table[0][self.positions] for table in self.rope)
            kind = memory, before, stream.window_size
            if kind not in shared:
                local = torch.arange(-before, reach, device=self.ids.device)
                remembered = self.remembered[index][:, :memory]
                visible = column_mask(self.positions, local, remembered, self.seen, stream.window_size)
                mask = torch.zeros_like(visible, dtype=hidden.dtype).masked_fill_(~visible, -torch.inf)
                shared[kind] = self.positions + stream.front, mask
            columns, mask = shared[kind]
            outside = None if stream.memory.shares_softmax else self.remembered[index]
            hidden = _decode_layer(
                layer, hidden, shared["rope"], self.positions, columns, self.buffers[index], mask, self.readings[index],
                outside,
            )  # fmt: skip
        self.positions.add_(1)
        if not all(self.fused):
            return self.backbone.norm(hidden)
        norm = self.backbone.norm
        return nn.functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)

    def _fused(self, index: int, hidden: Float[Tensor, "batch 1 width"]) -> Float[Tensor, "batch 1 width"]:
        """A layer by the Triton kernels."""
        kernels, layer = self.kernels, self.backbone.layers[index]
        stream, buffers = self.streams[index], self.buffers[index]
        attention, mlp, norm, second = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
        weights = (getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj"))
        qkv = kernels.project(hidden, norm.weight, norm.variance_epsilon, *weights)
        rows, window = (self.positions, self.counts[index], self.seen), stream.window_size or self.size
        parts = kernels.attend(
            qkv, self.rope, rows, buffers, stream.front, stream.memory_columns, window, attention.scaling
        )
        hidden = kernels.merge(*parts, attention.o_proj.weight, hidden)
        inner = kernels.expand(hidden, second.weight, second.variance_epsilon, mlp.gate_proj.weight, mlp.up_proj.weight)
        hidden = kernels.contract(inner, mlp.down_proj.weight, hidden)
        if "output" in buffers:
            buffers["output"].scatter_(1, self.positions[:, :, None].expand_as(hidden), hidden)
        return hidden

    def _capture(self, reach: int) -> None:
        """Warm up on a side stream, as CUDA graphs require, then record.

        The warm-up writes the same column that the step will write, and sets the position back.
        """
        side = _side_stream(self.ids.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(reach)
            self.positions.sub_(1)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=side):  # torch's default stream may belong to another GPU
            hidden = self._step(reach)
        self.graphs[reach] = graph, hidden

    def take(
        self, streams: list[LayerCache], seen: list[int], opened: list[int], tokens: Int[Tensor, "batch token"] | None
    ) -> Int[Tensor, "batch token"] | None:
        """Copy a cache's open blocks into the buffers, which its layers then use. Returns the buffer of its ids."""
        self.streams = streams
        self.positions.copy_(torch.tensor(opened)[:, None])
        self.seen.copy_(torch.tensor(seen)[:, None])
        for index, stream in enumerate(streams):
            stream.move_to(self.buffers[index])
            self.counts[index].copy_(torch.tensor(stream.counts)[:, None])
            self.remembered[index].copy_(self._remembered(stream))
            for ours, theirs in zip(self.readings[index] or (), stream.reading or (), strict=True):
                ours.copy_(theirs)
        if tokens is not None:
            width = min(tokens.shape[1], self.size)
            self.tokens[:, :width].copy_(tokens[:, :width])
        return self.tokens if tokens is not None or not any(opened) else None  # embeddings have no ids

    def tensors(self) -> list[Tensor]:
        """Its tensors that grow with the block or the memory."""
        buffers = [x for own in self.buffers for x in own.values()]
        return [self.tokens, *buffers, *(x for reading in self.readings for x in reading or ())]

    def _remembered(self, stream: Any) -> Tensor:
        """Which columns of its reading each row has."""
        columns = stream.reading[0].shape[2] if stream.reading else 0
        counts = torch.tensor(stream.counts, device=self.ids.device)
        return torch.arange(columns, device=self.ids.device) < counts[:, None]

    @staticmethod
    def conditions(backbone: Any, streams: list[LayerCache]) -> list[Any]:
        """What a captured step depends on besides the cache: weights, precision, and how memories are read."""
        weight = backbone.embed_tokens.weight
        autocast = torch.is_autocast_enabled(weight.device.type) and torch.get_autocast_dtype(weight.device.type)
        return [weight.data_ptr(), weight.dtype, autocast, *[stream.memory.retrieval for stream in streams]]

    @staticmethod
    def _shapes(streams: list[LayerCache]) -> list[Any]:
        """What a captured step depends on in the cache."""
        return [(len(stream.counts), stream.front, [part.shape for part in stream.reading or ()]) for stream in streams]


def _decode_layer(
    layer: Any,
    hidden: Float[Tensor, "batch 1 width"],
    rope: tuple[Tensor, Tensor],
    positions: Int[Tensor, "batch 1"],
    columns: Int[Tensor, "batch 1"],
    buffers: dict[str, Tensor],
    mask: Float[Tensor, "batch 1 1 column"],
    reading: Reading | None,
    visible: Bool[Tensor, "batch column"] | None,
) -> Float[Tensor, "batch 1 width"]:
    """One token of each row, on buffers with room for a whole block: tensors in, tensors out, no Python state.

    `columns` are the rows' positions behind the front; `mask` is added to attention's scores.
    """
    before, after = _compiled(layer, before_attention), _compiled(layer, after_attention)
    query, key, value, rotated, rotated_key = before(hidden, rope)
    for name, new, place in (("key", rotated_key, columns), ("value", value, columns), ("raw", key, positions)):
        if name in buffers:
            buffers[name].scatter_(2, place[:, None, :, None].expand_as(new), new.to(buffers[name].dtype))
    keys, values = (buffers[name][:, :, : mask.shape[-1]] for name in ("key", "value"))
    output = after(hidden, layer.self_attn.mix(query, rotated, keys, values, reading, mask, visible))
    if "output" in buffers:
        kept = output.to(buffers["output"].dtype)
        buffers["output"].scatter_(1, positions[:, :, None].expand_as(kept), kept)
    return output


def _compiled(layer: Any, function: Callable) -> Callable:
    """`function` of this layer, compiled if `compile_blocks` was called."""
    return vars(layer).get(function.__name__, partial(function, layer))


def before_attention(
    layer: Any, hidden: Float[Tensor, "batch 1 width"], rope: tuple[Tensor, Tensor]
) -> tuple[Heads, Heads, Heads, Heads, Heads]:
    """Query, key and value of a token to decode, and query and key rotated; `compile_blocks` compiles it."""
    query, key, value = layer.self_attn.project(layer.input_layernorm(hidden))
    rotated, rotated_key = (rotate(x, *rope).to(x.dtype) for x in (query, key))
    return query, key, value, rotated, rotated_key


def after_attention(layer: Any, hidden: Float[Tensor, "batch 1 width"], mixed: Heads) -> Float[Tensor, "batch 1 width"]:
    """The layer's output for a decoded token, given its attention; `compile_blocks` compiles it."""
    result: Tensor = layer.finish(hidden, mixed)
    return result


def _kernels(device: torch.device) -> Any:
    """The Triton kernels, or None where they do not run: their largest tiles do not fit consumer cards."""
    if not triton_runs_on(device):
        return None
    if getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) < SHARED_MEMORY:
        return None
    from elastic_memory.fast.kernels import decoding

    return decoding


def _fused_layers(backbone: Any) -> list[bool]:
    """Which layers run on the Triton kernels."""
    kernels = _kernels(backbone.embed_tokens.weight.device)
    return [kernels is not None and _is_plain(layer, backbone) for layer in backbone.layers]


def _is_plain(layer: Any, backbone: Any) -> bool:
    """Whether the kernels compute this layer: Llama's parts in one precision, and memory only as further columns.

    Not in float16: products are taken before the norm is applied, and might overflow.
    """
    attention, mlp, memory = layer.self_attn, layer.mlp, layer.memory
    norms = (layer.input_layernorm, layer.post_attention_layernorm, backbone.norm)
    names = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    products = [getattr(part, name, None) for part, own in zip((attention, mlp), names, strict=True) for name in own]
    if not all(type(product) is nn.Linear and product.bias is None for product in products):
        return False
    if not all(type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon") for norm in norms):
        return False
    weights = [module.weight for module in (*products, *norms, backbone.embed_tokens)]
    device, dtype = weights[-1].device, weights[-1].dtype
    return (
        dtype in (torch.bfloat16, torch.float32)
        and all(type(weight) is nn.Parameter and weight.is_contiguous() for weight in weights)
        and all(weight.dtype == dtype and weight.device == device for weight in weights)
        and not any(part._forward_hooks or part._forward_pre_hooks for part in (*products, *norms, attention, mlp))
        and not torch.is_autocast_enabled(device.type)
        and isinstance(mlp.act_fn, (nn.SiLU, type(ACT2FN["silu"])))
        and not hasattr(attention, "q_norm")
        and (memory.shares_softmax or not memory.start(1, "meta"))
        and memory.prepare is None
        and attention.plain_scores
        and memory.blend is None
    )
