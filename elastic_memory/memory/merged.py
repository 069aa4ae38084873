"""Merged: a fixed number of slots; when new tokens arrive, those slots and tokens are merged whose keys are closest."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from elastic_memory.common.defaults import ORDER
from elastic_memory.memory.contract import Block, Geometry, Host, MemoryInfo, ParallelMemory, Reading, State
from elastic_memory.memory.tools import full_precision, wide
from elastic_memory.shapes import Bool, Float, Int, Tensor

# Squared distances below this share of the squared lengths count as 0. Otherwise rounding would decide which of several
# equal tokens are merged, and results would depend on how a text is split.
ROUNDING = 1e-6


class Groups(NamedTuple):
    """Sums of the keys and values of each slot's tokens, and their number; zeros where empty. The oldest come first."""

    key: Float[Tensor, "batch kv_head slot kept"]
    value: Float[Tensor, "batch kv_head slot dim"]
    tokens: Float[Tensor, "batch kv_head slot 1"]


class MergedMemory(ParallelMemory):
    """`order` slots in the block's softmax. Each is the mean of its tokens, and log of their number is added to scores.

    With equal keys that is exact: to attention, m tokens with one key are one token with their mean value and a score
    higher by log m. So a text of at most `order` different keys is remembered without loss, but for positions.
    Otherwise the merges that change keys least come first, by the increase of the squared error (Ward's criterion). All
    merges of a block take place in `rounds`: in each, an item may join the closest item before it. Keys stand
    `distance` tokens before the first token that is not in memory, whatever their age. `slow`: the share of a key's
    rotary features that slots keep, the slowest first; with fewer of them there are more slots, as many as have the
    floats of `order` raw tokens. No parameters.
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
        slow: float = 1.0,
        detach_every: int | None = None,
    ):
        super().__init__(geometry, detach_every=detach_every)
        if order < 1 or rounds < 1 or distance < 0:
            raise ValueError(
                f"order={order} (memory_order), rounds={rounds}, distance={distance}: "
                "give at least one slot and one round, and a distance from 0 on"
            )
        pairs = (geometry.features or geometry.head_dim) // 2
        if not 1 <= round(slow * pairs) <= pairs:
            raise ValueError(f"slow={slow}: give a share of the {pairs} rotary pairs of a key, up to 1")
        # of each half of a key, as rotary features are paired
        self.kept = slice(pairs - round(slow * pairs), pairs)
        self.slots = order * 2 * pairs // (pairs + round(slow * pairs))
        self.distance, self.rounds = distance, rounds

    def start(self, batch: int, device: torch.device | str | None = None) -> Groups:
        """All slots empty."""
        shape = (batch, self.geometry.kv_heads, self.slots)
        features = (2 * (self.kept.stop - self.kept.start), self.geometry.head_dim, 1)
        return Groups(*(torch.zeros(*shape, count, device=device) for count in features))

    @full_precision
    def read(self, state: State, seen: int, host: Host) -> Reading:
        """The means of the slots in use, and the logarithms of their counts."""
        key, value, count = (part[:, :, : min(seen, self.slots)] for part in state)
        others = self.kept.start, self.geometry.head_dim // 2 - self.kept.stop
        key = F.pad((key / count).unflatten(-1, (2, -1)), others).flatten(-2)
        positions = torch.full((key.shape[2],), -self.distance, device=key.device)
        return host.rope(key, positions), value / count, count.log()

    @full_precision
    def write(self, state: State, block: Block, seen: int) -> Groups:
        """Each new token is a slot of its own, until there are too many."""
        key, value = wide(block.key), wide(block.value)
        new = (key.unflatten(-1, (2, -1))[..., self.kept].flatten(-2), value, key.new_ones(*key.shape[:3], 1))
        used = (part[:, :, : min(seen, self.slots)] for part in state)
        items = Groups(*(torch.cat(pair, dim=2) for pair in zip(used, new, strict=True)))
        slot = _slot_of_each(items, self.slots, self.rounds)
        return Groups(*(_Sums.apply(part, slot, self.slots) for part in items))


@torch.no_grad()
def _slot_of_each(items: Groups, slots: int, rounds: int) -> Int[Tensor, "batch kv_head item"]:
    """The slots of the items after merging until there are at most `slots`; they keep the order of their oldest."""
    slot = torch.arange(items.key.shape[2], device=items.key.device).expand(items.key.shape[:3])
    surplus = max(slot.shape[2] - slots, 0)
    for left in range(rounds, 0, -1):
        merges = -(-surplus // left)
        if merges:
            target = _merge(items, merges)
            slot = target.gather(2, slot)
            items = Groups(*(_sums(part, target, target.shape[2] - merges) for part in items))
            surplus -= merges
    return slot


def _merge(items: Groups, merges: int) -> Int[Tensor, "batch kv_head item"]:
    """The slots of the items after `merges` of them joined others; an item may join one that itself joins another."""
    joins, target = _links(items, merges)
    for _ in range(joins.shape[2].bit_length()):
        target = target.gather(2, target)
    return ((~joins).cumsum(2) - 1).gather(2, target)


def _links(items: Groups, merges: int) -> tuple[Bool[Tensor, "batch kv_head item"], Int[Tensor, "batch kv_head item"]]:
    """Which items join an earlier one: those for which the squared error grows least; and which one, or themselves."""
    key, count = items.key / items.tokens, items.tokens
    product = key @ key.mT
    # Squares from the product itself: where it is of low precision (TF32), equal keys still have a distance of 0.
    squared = product.diagonal(dim1=-2, dim2=-1)[..., None]
    lengths = squared + squared.mT
    distance = lengths - 2 * product
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
    part: Float[Tensor, "batch kv_head item feature"], slot: Int[Tensor, "batch kv_head item"], slots: int
) -> Float[Tensor, "batch kv_head slot feature"]:
    """The sum of each slot's items, as one product: sums by index have no fixed order on a GPU.

    In float64, because training on GPUs may round operands of float32 products, and sums pass here with every block.
    """
    member = slot[:, :, None] == torch.arange(slots, device=slot.device)[:, None]
    return (member.double() @ part.double()).to(part.dtype)


class _Sums(torch.autograd.Function):
    """`_sums`; its gradient needs the slots alone, not the product's matrix of slots x items."""

    generate_vmap_rule = True

    @staticmethod
    def forward(part: Tensor, slot: Tensor, slots: int) -> Tensor:
        return _sums(part, slot, slots)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        (slot,) = ctx.saved_tensors
        return gradient.gather(2, slot[..., None].expand(*slot.shape, gradient.shape[3])), None, None
