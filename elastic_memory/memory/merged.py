"""Merged: a fixed number of slots; when new tokens arrive, those slots and tokens are merged whose keys are closest."""

from typing import Any, NamedTuple

import torch

from elastic_memory.common.defaults import ORDER
from elastic_memory.memory.contract import Block, Geometry, Host, MemoryInfo, ParallelMemory, Reading, State
from elastic_memory.memory.tools import full_precision, wide
from elastic_memory.shapes import Bool, Float, Int, Tensor

# Squared distances below this share of the squared lengths count as 0. Otherwise rounding would decide which of several
# equal tokens are merged, and results would depend on how a text is split.
ROUNDING = 1e-6


class Slots(NamedTuple):
    """Sums of the keys and values of each slot's tokens, and their number; zeros where empty. The oldest come first."""

    key: Float[Tensor, "batch kv_head order dim"]
    value: Float[Tensor, "batch kv_head order dim"]
    count: Float[Tensor, "batch kv_head order 1"]


class MergedMemory(ParallelMemory):
    """`order` slots in the block's softmax; each is the mean of its tokens, and log of their number is added to scores.

    With equal keys that is exact: to attention, m tokens with one key are one token with their mean value and a score
    higher by log m. So a text of at most `order` different keys is remembered without loss. Otherwise the merges that
    change keys least come first, by the increase of the squared error (Ward's criterion). All merges of a block take
    place in `rounds`: in each, an item may join the closest item before it. Keys stand `distance` tokens before the
    block, whatever their age. No parameters.
    """

    info = MemoryInfo(
        source="ours: token merging with proportional attention (arXiv 2210.09461), with keys alone, along a stream",
        phrase="slots that merge tokens with similar keys, and count them",
        paper_floats=lambda key, value, count: key + value,  # equal to elastic memory's; it keeps counts, too
    )
    shares_softmax = True
    adds_score = True
    no_join = "which tokens were merged depends on all that came before"

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: int = ORDER,
        distance: int = 0,
        rounds: int = 4,
        detach_every: int | None = None,
    ):
        super().__init__(geometry, detach_every=detach_every)
        if order < 1 or rounds < 1 or distance < 0:
            raise ValueError(
                f"order={order} (memory_order), rounds={rounds}, distance={distance}: "
                "give at least one slot and one round, and a distance from 0 on"
            )
        self.order, self.distance, self.rounds = order, distance, rounds

    def start(self, batch: int, device: torch.device | str | None = None) -> Slots:
        """All slots empty."""
        shape = (batch, self.geometry.kv_heads, self.order)
        key, value = (torch.zeros(*shape, self.geometry.head_dim, device=device) for _ in range(2))
        return Slots(key, value, torch.zeros(*shape, 1, device=device))

    @full_precision
    def read(self, state: State, seen: int, host: Host) -> Reading:
        """The means of the slots in use, and the logarithms of their counts."""
        key, value, count = (part[:, :, : min(seen, self.order)] for part in state)
        positions = torch.full((key.shape[2],), -self.distance, device=key.device)
        return host.rope(key / count, positions), value / count, count.log()

    @full_precision
    def write(self, state: State, block: Block, seen: int) -> Slots:
        """Each new token is a slot of its own, until there are too many."""
        key, value = wide(block.key), wide(block.value)
        new = (key, value, key.new_ones(*key.shape[:3], 1))
        used = (part[:, :, : min(seen, self.order)] for part in state)
        items = Slots(*(torch.cat(pair, dim=2) for pair in zip(used, new, strict=True)))
        slot = _slot_of_each(items, self.order, self.rounds)
        return Slots(*(_Sums.apply(part, slot, self.order) for part in items))


@torch.no_grad()
def _slot_of_each(items: Slots, order: int, rounds: int) -> Int[Tensor, "batch kv_head item"]:
    """The slots of the items after merging until there are at most `order`; slots keep the order of their oldest."""
    slot = torch.arange(items.key.shape[2], device=items.key.device).expand(items.key.shape[:3])
    surplus = max(slot.shape[2] - order, 0)
    for left in range(rounds, 0, -1):
        merges = -(-surplus // left)
        if merges:
            target = _merge(items, merges)
            slot = target.gather(2, slot)
            items = Slots(*(_sums(part, target, target.shape[2] - merges) for part in items))
            surplus -= merges
    return slot


def _merge(items: Slots, merges: int) -> Int[Tensor, "batch kv_head item"]:
    """The slots of the items after `merges` of them joined others; an item may join one that itself joins another."""
    joins, target = _links(items, merges)
    for _ in range(joins.shape[2].bit_length()):
        target = target.gather(2, target)
    return ((~joins).cumsum(2) - 1).gather(2, target)


def _links(items: Slots, merges: int) -> tuple[Bool[Tensor, "batch kv_head item"], Int[Tensor, "batch kv_head item"]]:
    """Which items join an earlier one: those for which the squared error grows least; and which one, or themselves."""
    key, count = items.key / items.count, items.count
    squared = key.square().sum(-1, keepdim=True)
    lengths = squared + squared.mT
    distance = lengths - 2 * key @ key.mT
    distance = torch.where(distance < ROUNDING * lengths, 0, distance)
    error = distance / (1 / count + 1 / count.mT)
    later = torch.ones(error.shape[2:], dtype=torch.bool, device=key.device).triu()
    error = error.masked_fill(later, torch.inf)
    least = error.amin(-1)
    closest = (error == least[..., None]).int().argmax(-1)
    cheapest = least.sort(stable=True).indices[..., :merges]
    joins = torch.zeros_like(least, dtype=torch.bool).scatter(2, cheapest, True)
    return joins, torch.where(joins, closest, torch.arange(joins.shape[2], device=key.device))


def _sums(
    part: Float[Tensor, "batch kv_head item feature"], slot: Int[Tensor, "batch kv_head item"], order: int
) -> Float[Tensor, "batch kv_head order feature"]:
    """The sum of each slot's items, as one product: sums by index have no fixed order on a GPU."""
    return (slot[:, :, None] == torch.arange(order, device=slot.device)[:, None]).to(part.dtype) @ part


class _Sums(torch.autograd.Function):
    """`_sums`; its gradient needs the slots alone, not the product's matrix of order x items."""

    generate_vmap_rule = True

    @staticmethod
    def forward(part: Tensor, slot: Tensor, order: int) -> Tensor:
        return _sums(part, slot, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        (slot,) = ctx.saved_tensors
        return gradient.gather(2, slot[..., None].expand(*slot.shape, gradient.shape[3])), None, None
