"""What each head of a memory layer looks at, block by block: attention on memory tokens, and words nearest to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_memory.attention import blended, window_mask
from elastic_memory.evaluation.losses import evaluating
from elastic_memory.operators import Bank
from elastic_memory.shapes import Float, Int, Tensor
from elastic_memory.streaming.cache import MemoryCache

NEAREST = 5  # words shown for a memory token

RowHeads = Float[Tensor, "head token dim"]


@dataclass(frozen=True)
class BlockView:
    """The memory tokens of one block: their places, each head's mean attention on them, and their nearest tokens."""

    seen: int
    places: list[float] | list[list[float]]
    attention: Float[Tensor, "head column"]
    nearest: Int[Tensor, "column near"]
    similar: Float[Tensor, "column near"]

    def data(self) -> dict[str, Any]:
        """For the page."""
        return {
            "seen": self.seen,
            "places": self.places,
            "attention": [[float(f"{share:.4g}") for share in head] for head in self.attention.tolist()],
            "nearest": self.nearest.tolist(),
            "similar": [[round(one, 3) for one in row] for row in self.similar.tolist()],
        }


@dataclass
class LayerView:
    """The blocks of one layer that have memory tokens, and the share of attention that each token gives to memory."""

    layer: int
    blocks: list[BlockView] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """For the page."""
        shares = [float(f"{share:.4g}") for share in self.shares]
        return {"layer": self.layer, "shares": shares, "blocks": [block.data() for block in self.blocks]}


@torch.no_grad()
def views(model: Any, ids: Int[Tensor, " token"], block: int) -> list[LayerView]:
    """Read `ids` block by block; one view for each layer whose memory tokens share the softmax with the block."""
    layers = {i: model.base_model.layers[i] for i, memory in model.memories.items() if memory.shares_softmax}
    found = {index: LayerView(index) for index in layers}
    history: dict[int, list[RowHeads]] = {index: [] for index in layers}
    cache, rope = MemoryCache(model), model.base_model.rope()
    with evaluating(model), _entering(layers) as entering:
        for start in range(0, len(ids), block):
            tokens = ids[None, start : start + block].to(model.device)
            model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            for index, layer in layers.items():
                query, key, _ = (x[0].float() for x in layer.self_attn.project(layer.input_layernorm(entering[index])))
                reading = cache.streams[index].reading
                columns = reading[0][0].float() if reading else key[:, :0]
                added = reading[2][0, :, :, 0].float() if reading and layer.memory.adds_score else key.new_zeros(1, 1)
                heads = attention(layer, rope, query, key, history[index], columns, added)
                weights = heads[..., : columns.shape[1]]
                found[index].shares += weights.sum(-1).mean(0).tolist()
                if columns.shape[1]:
                    seen = start - layer.locality.lag
                    past = torch.cat(history[index], dim=1)[:, :seen]
                    found[index].blocks.append(_look(layer.memory, seen, columns, past, weights.mean(1)))
                history[index].append(key)
    return list(found.values())


@contextmanager
def _entering(layers: dict[int, Any]) -> Iterator[dict[int, Float[Tensor, "1 token width"]]]:
    """The hidden states that entered each layer in the latest call."""
    found: dict[int, Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, index=index: found.update({index: inputs[0]}))
        for index, layer in layers.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def attention(
    layer: Any,
    rope: Any,
    query: RowHeads,
    key: RowHeads,
    before: list[RowHeads],
    columns: Float[Tensor, "kv_head column dim"],
    added: Float[Tensor, "_ _"],
) -> Float[Tensor, "head token all"]:
    """Softmax weights of a block's tokens on the memory tokens, then on the block; with a window, also on `before`.

    `columns` are the keys of the memory tokens; `added` is what the memory adds to their scores.
    """
    tokens = query.shape[1]
    positions = torch.arange(tokens, device=query.device)
    rotated_keys = [rope(key[None], positions)[0]]
    if layer.window is not None and before:
        earlier = torch.cat(before, dim=1)[:, -layer.window :]
        rotated_keys.insert(0, rope(earlier[None], torch.arange(-earlier.shape[1], 0, device=query.device))[0])
    known = torch.cat(rotated_keys, dim=1)
    rotated, groups = rope(query[None], positions)[0], len(query) // len(known)
    memory_query = query if layer.memory.raw_queries else rotated
    of_memory, of_block = (x.repeat_interleave(groups, dim=0).mT * layer.self_attn.scaling for x in (columns, known))
    added = added.repeat_interleave(len(query) // len(added), dim=0)[:, None]
    scores = torch.cat((memory_query @ of_memory + added, rotated @ of_block), dim=2)
    visible = window_mask(tokens, known.shape[1] - tokens, layer.window or tokens, query.device, columns.shape[1])
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1)
    if layer.memory.blend is None:
        return weights
    alone = torch.nn.functional.pad(scores[..., columns.shape[1] :].softmax(-1), (columns.shape[1], 0))
    return blended(alone, weights, layer.memory.blend)


def _look(
    memory: Any, seen: int, columns: Float[Tensor, "kv_head column dim"], past: RowHeads, attention: Tensor
) -> BlockView:
    """The view of one block; a memory token without a sample point is placed at its nearest token."""
    mean = past.mean(1, keepdim=True)
    remembered, read = ((x - mean).transpose(0, 1).flatten(1) for x in (columns, past))
    alike = torch.nn.functional.normalize(remembered, dim=1) @ torch.nn.functional.normalize(read, dim=1).T
    similar, nearest = alike.topk(min(NEAREST, seen), dim=1)
    places: Any = nearest[:, 0].tolist()
    if isinstance(memory.retrieval, Bank):
        named = memory.retrieval.sample_points(seen) * seen
        if named.ndim == 1 or len(named) == len(places):
            places = [*named.tolist(), *places[len(named) :]]
    return BlockView(seen, places, attention.cpu(), nearest.cpu(), similar.cpu())
