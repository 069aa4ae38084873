"""Padded and packed batches, rearranged so that every row starts with its first real token.

In a causal model no token sees what comes after it. So no mask is needed: real tokens move to the front of their rows,
packed documents get a row each, and results are moved back.
"""

from dataclasses import dataclass

import torch

from elastic_memory.shapes import Bool, Int, Tensor


@dataclass(frozen=True)
class Packing:
    """Where the tokens of a padded or packed batch go: `gather[row, place]` is an index into the flattened batch."""

    gather: Int[Tensor, "row place"]
    real: Bool[Tensor, "row place"]
    shape: tuple[int, int]

    def align(self, x: Tensor) -> Tensor:
        """[batch, column, ...] -> [row, place, ...]; places without a token repeat another one."""
        return x.flatten(0, 1)[self.gather]

    def restore(self, x: Tensor) -> Tensor:
        """[row, place, ...] -> [batch, column, ...], with zeros for padding."""
        flat = x.new_zeros(self.shape[0] * self.shape[1] + 1, *x.shape[2:])
        # Places without a token are written to a spare slot at the end.
        target = torch.where(self.real, self.gather, flat.shape[0] - 1)
        return flat.index_copy(0, target.flatten(), x.flatten(0, 1))[:-1].unflatten(0, self.shape)

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        return self.real.sum(1).tolist()


def from_mask(mask: Int[Tensor, "batch column"] | Bool[Tensor, "batch column"]) -> Packing:
    """The real tokens of each row, in order; padding may be left, right or in between."""
    real = mask.bool()
    order = real.logical_not().sort(dim=1, stable=True).indices
    batch, columns = mask.shape
    offsets = torch.arange(batch, device=mask.device)[:, None] * columns
    return Packing(order + offsets, real.gather(1, order), (batch, columns))


def from_positions(
    positions: Int[Tensor, "batch column"], mask: Int[Tensor, "batch column"] | Bool[Tensor, "batch column"] | None
) -> Packing | None:
    """A row for each document; position 0 starts one. None if no row of the batch holds more than one document."""
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask.bool()
    starts = (positions == 0) & real
    if int(starts.sum(1).max()) <= 1:
        return None
    first = torch.zeros_like(starts)
    first.scatter_(1, real.int().argmax(1, keepdim=True), True)
    document = (starts | (first & real)).flatten().cumsum(0) - 1
    kept = real.flatten().nonzero().squeeze(1)
    sizes = torch.bincount(document[kept])
    longest = int(sizes.max())
    places = torch.arange(longest, device=positions.device)
    begin = sizes.cumsum(0) - sizes
    inside = places < sizes[:, None]
    gather = kept[(begin[:, None] + places).clamp(max=len(kept) - 1)]
    return Packing(gather, inside, (positions.shape[0], positions.shape[1]))
