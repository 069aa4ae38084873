"""Replace local context by noise: how much does a model rely on its memory?"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elastic_memory.common.names import suggest
from elastic_memory.evaluation.losses import Model, has_blocks
from elastic_memory.memory.contract import Heads
from elastic_memory.shapes import Bool, Float, Tensor

LAYERS = ("memory", "all")


@contextmanager
def corrupted(model: Model, share: float, layers: str = "memory", seed: int = 0) -> Iterator[None]:
    """In this context, noise replaces the keys and values of a share of the tokens of every block.

    Either in the layers with memory ("Corrupted" in the paper) or in all layers ("Hardly Corrupted"). Memory is written
    from the clean keys and values. Which tokens are hit, and the noise before scaling, depend only on seed, layer and
    position in the block. The noise has the mean and variance of the keys and values of one call: to compare
    models, read whole blocks per call, as `perplexity` does.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"corruption of a share of {share}: give a number between 0 and 1")
    if layers not in LAYERS:
        raise ValueError(f"corruption in layers {layers!r}: {suggest(layers, LAYERS)}")
    if not has_blocks(model):
        raise ValueError(f"corruption in a {type(model).__name__}: use one of our models, or attach_memory first")
    attentions = {i: layer.self_attn for i, layer in enumerate(model.base_model.layers)}
    if layers == "memory":
        attentions = {i: attentions[i] for i in model.memories}
    if not attentions:
        raise ValueError("corruption in the memory layers of a model without memory: choose layers='all'")
    if model.base_model.layers[0].locality.kind == "full":
        raise ValueError("corruption of blocks in a model of full attention, which has none: choose another model")
    try:
        for index, attention in attentions.items():
            attention.corrupt = Noise(share, attention.memory.geometry.block_size, (seed, index))
        yield
    finally:
        for attention in attentions.values():
            attention.corrupt = None


class Noise:
    """Replaces keys and values of random tokens by noise with the mean and variance of their head.

    Mean and variance are scalars per head, not vectors: the mean vector of a block would reveal much of its content.
    """

    def __init__(self, share: float, block_size: int, seed: tuple[int, int]):
        self.random = torch.Generator().manual_seed(seed[0] * 2**16 + seed[1])
        order = torch.randperm(block_size, generator=self.random)
        self.hit = order < round(share * block_size)
        self.noise: tuple[Tensor, Tensor] | None = None

    def __call__(self, key: Heads, value: Heads) -> tuple[Heads, Heads]:
        """The keys and values that attention sees of a block, or of its first tokens."""
        if self.noise is None:
            shapes = ((part.shape[1], len(self.hit), part.shape[3]) for part in (key, value))
            first, second = (torch.randn(shape, generator=self.random).to(key.device) for shape in shapes)
            self.noise, self.hit = (first, second), self.hit.to(key.device)
        hit = self.hit[: key.shape[2], None]
        return _replace(key, self.noise[0], hit), _replace(value, self.noise[1], hit)


def _replace(clean: Heads, noise: Float[Tensor, "head block dim"], hit: Bool[Tensor, "token 1"]) -> Heads:
    wide = clean.float()
    # Padded heads have columns of zeros, which do not count.
    real = (wide != 0).any(dim=(0, 2), keepdim=True)
    count = real.sum(dim=3, keepdim=True) * clean.shape[2]
    mean = wide.sum(dim=(2, 3), keepdim=True) / count
    variance = ((wide - mean) * real).square().sum(dim=(2, 3), keepdim=True) / count
    noisy = (noise[:, : clean.shape[2]] * variance.sqrt() + mean) * real
    return torch.where(hit, noisy.to(clean.dtype), clean)
