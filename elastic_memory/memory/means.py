"""Key-Value Means: slots that average the tokens whose keys are most alike."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from elastic_memory.common.defaults import ORDER
from elastic_memory.memory.contract import Block, Geometry, Host, MemoryInfo, ParallelMemory, Reading, State
from elastic_memory.memory.tools import full_precision, one_of, padded
from elastic_memory.shapes import Float, Int, Tensor

# Cosines within this of the largest count as equal, and the oldest slot is taken. Otherwise rounding would decide, and
# results for repeated tokens would depend on how a text is split.
TIE = 1e-5


class Slots(NamedTuple):
    """Sums of keys and of values, and the norms of each slot's first key and value; zeros where empty."""

    key: Float[Tensor, "batch kv_head order dim"]
    value: Float[Tensor, "batch kv_head order dim"]
    length: Float[Tensor, "batch kv_head order 2"]


class MeansMemory(ParallelMemory):
    """`order` slots in the block's softmax. A token opens a slot or is added to the one with the most similar key.

    While slots are empty, the tokens of a block that are least similar to any slot open new ones (of the first block,
    tokens at even distances). All others are added to the slot of largest cosine similarity, times a gate
    1 + elu(w k) per head and token. A slot is read as its direction, at the length that its first token had. No
    positions. `sinks`: slots, the oldest, to which nothing is added. `query`: rotated or raw, as for elastic memory.
    """

    info = MemoryInfo(
        source="Key-Value Means (arXiv 2605.09877), with a state of fixed size",
        phrase="slots that average tokens with similar keys",
        paper_floats=lambda key, value, length: key + value,  # equal to elastic memory's; it keeps lengths, too
    )
    shares_softmax = True
    no_join = "which slot a token is added to depends on all that came before"

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: int = ORDER,
        sinks: int = 1,
        query: str = "rotated",
        detach_every: int | None = None,
    ):
        super().__init__(geometry, detach_every=detach_every)
        if not 0 <= sinks < order:
            raise ValueError(
                f"order {order} (memory_order) and sinks={sinks}: give more slots than sinks, and sinks >= 0"
            )
        self.order, self.sinks = order, sinks
        self.raw_queries = one_of("query", query, ("rotated", "raw")) == "raw"
        self.weigh = nn.Parameter(torch.empty(geometry.kv_heads, geometry.features or geometry.head_dim))
        self.temperature = nn.Parameter(torch.empty(geometry.kv_heads))
        self.reset()

    def reset(self) -> None:
        """All gates 1, and slots are scored like tokens."""
        nn.init.zeros_(self.weigh)
        nn.init.ones_(self.temperature)

    def start(self, batch: int, device: torch.device | str | None = None) -> Slots:
        """All slots empty."""
        shape = (batch, self.geometry.kv_heads, self.order)
        key, value = (torch.zeros(*shape, self.geometry.head_dim, device=device) for _ in range(2))
        return Slots(key, value, torch.zeros(*shape, 2, device=device))

    @full_precision
    def read(self, state: State, seen: int, host: Host) -> Reading:
        """The slots in use; keys times the temperature of their head."""
        key, value, length = (part[:, :, : min(seen, self.order)] for part in state)
        key, value = (F.normalize(x, dim=-1) * length[..., i : i + 1] for i, x in enumerate((key, value)))
        return key * self.temperature.float()[:, None, None], value

    @full_precision
    def write(self, state: State, block: Block, seen: int) -> Slots:
        """Some tokens open slots, as long as there are empty ones; the others are added to those most similar."""
        key, value = block.key.float(), block.value.float()
        used, tokens = min(seen, self.order), key.shape[2]
        opened = min(self.order - used, tokens)
        slots = Slots(*(part[:, :, :used] for part in state))
        gate = self._gate(key)
        if opened:
            index = _least_similar(slots.key, key, opened)[..., None]
            new = [x.gather(2, index.expand(-1, -1, -1, x.shape[3])) for x in (key, value)]
            length = torch.cat([x.norm(dim=-1, keepdim=True) for x in new], dim=-1)
            slots = Slots(*(torch.cat(pair, dim=2) for pair in zip(slots, (*new, length), strict=True)))
            gate = gate.scatter(2, index, 0)
        if opened < tokens:
            similarity = _similarity(key, slots.key[:, :, self.sinks :])
            nearest = (similarity > similarity.amax(-1, keepdim=True) - TIE).int().argmax(-1) + self.sinks
            added = nearest[:, :, None] == torch.arange(used + opened, device=key.device)[:, None]
            # One product instead of sums by index, which a GPU adds in no fixed order.
            add = added.float() * gate.mT
            slots = Slots(slots.key + add @ key, slots.value + add @ value, slots.length)
        return Slots(*(F.pad(part, (0, 0, 0, self.order - used - opened)) for part in slots))

    def _gate(self, key: Float[Tensor, "batch kv_head token dim"]) -> Float[Tensor, "batch kv_head token 1"]:
        """How much each token counts; 1 before training."""
        return 1 + F.elu(key @ padded(self.weigh.float(), key.shape[3])[:, :, None])


def _least_similar(
    slots: Float[Tensor, "batch kv_head slot dim"], key: Float[Tensor, "batch kv_head token dim"], count: int
) -> Int[Tensor, "batch kv_head count"]:
    """Tokens, in their order, that are least similar to any slot; at even distances if there are no slots yet."""
    batch, heads, tokens = key.shape[:3]
    if not slots.shape[2]:
        return (torch.arange(count, device=key.device) * tokens // count).expand(batch, heads, count)
    found = _similarity(key, slots).amax(-1).clamp(max=1 - TIE)
    return found.sort(stable=True).indices[:, :, :count].sort().values


@torch.no_grad()
def _similarity(
    key: Float[Tensor, "batch kv_head token dim"], slots: Float[Tensor, "batch kv_head slot dim"]
) -> Float[Tensor, "batch kv_head token slot"]:
    """Cosine similarity of each token to each slot."""
    return F.normalize(key, dim=-1) @ F.normalize(slots, dim=-1).mT
