"""The loss of every token, in constant memory.

A row of T tokens holds T - 1 predictions: the one at position q, made from tokens 0..q, is of token q + 1. Losses
are computed in float32 whatever the model's dtype, and only the logits of one call are in memory.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import Cache

from elastic_memory.common.defaults import BLOCK_SIZE
from elastic_memory.model.modeling import MemoryCausalLM
from elastic_memory.shapes import Float, Int, Tensor
from elastic_memory.streaming.cache import MemoryCache

# Any causal language model of transformers, ours or another.
Model = Any

# Float32 copies of logits are made for this many numbers at a time (128 MiB).
SLICE = 2**25


def streamed_losses(model: Model, ids: Int[Tensor, "row token"], call: int) -> Float[Tensor, "row prediction"]:
    """Losses of rows read `call` tokens at a time, with the cache carried from call to call."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    losses = torch.empty(targets.shape, dtype=torch.float32)
    for piece, logits in streamed_logits(model, inputs, call):
        losses[:, piece] = token_losses(logits, targets[:, piece])
    return losses


class Streamed:
    """`streamed_losses` with a cache, so that several metrics share one pass over the rows."""

    def __init__(self, model: Model, block_size: int | None = None):
        self.model, self.block_size = model, block_size or block_size_of(model)
        self.kept: dict[bytes, Tensor] = {}

    def __call__(self, ids: Int[Tensor, "row token"]) -> Float[Tensor, "row prediction"]:
        """Losses of rows of one length."""
        names = [hashlib.sha256(row.numpy().tobytes()).digest() for row in ids]
        new = [index for index, name in enumerate(names) if name not in self.kept]
        if new:
            losses = streamed_losses(self.model, ids[new], self.block_size)
            self.kept |= {names[index]: row for index, row in zip(new, losses, strict=True)}
        return torch.stack([self.kept[name] for name in names])


def streamed_logits(
    model: Model, ids: Int[Tensor, "row token"], call: int, keep: int = 0
) -> Iterator[tuple[slice, Tensor]]:
    """Logits of `call` tokens at a time (or of the last `keep` of them), and which tokens were read."""
    cache = empty_cache(model)
    kept = {"logits_to_keep": keep} if keep else {}
    with evaluating(model):
        for start in range(0, ids.shape[1], call):
            piece = slice(start, min(start + call, ids.shape[1]))
            output = model(_on(model, ids[:, piece]), past_key_values=cache, use_cache=True, **kept)
            cache = getattr(output, "past_key_values", None)
            if cache is None and piece.stop < ids.shape[1]:
                # The model has no cache: the whole context goes into one call.
                yield slice(0, ids.shape[1]), model(_on(model, ids), use_cache=False, **kept).logits
                return
            yield piece, output.logits


def last_losses(model: Model, ids: Int[Tensor, "row token"], count: int) -> Float[Tensor, "row prediction"]:
    """Loss of the last `count` tokens of each row, from one plain call."""
    with evaluating(model):
        logits = model(_on(model, ids[:, :-1]), use_cache=False, logits_to_keep=count).logits
    return token_losses(logits, ids[:, -count:])


def whole_losses(model: Model, ids: Int[Tensor, "row token"]) -> Float[Tensor, "row prediction"]:
    """Losses of rows, each read by one plain call: a model with memory reads all its blocks at once."""
    return torch.cat([last_losses(model, row[None], len(row) - 1) for row in ids])


def window_losses(
    model: Model, ids: Int[Tensor, "row token"], window: int, stride: int
) -> Float[Tensor, "row prediction"]:
    """Losses of rows read in windows without earlier context, which end every `stride` tokens.

    Each prediction is taken once, from the first window that holds its position: it sees at least
    `window - stride + 1` tokens, or all there are. With `stride == window` the windows are disjoint.
    """
    inputs, targets = ids[:, :-1], ids[:, 1:]
    losses = torch.empty(targets.shape, dtype=torch.float32)
    done = 0
    with evaluating(model):
        while done < inputs.shape[1]:
            start = done + stride - window if done else 0
            end = min(start + window, inputs.shape[1])
            output = model(_on(model, inputs[:, start:end]), past_key_values=empty_cache(model), use_cache=True)
            losses[:, done:end] = token_losses(output.logits[:, done - start :], targets[:, done:end])
            done = end
    return losses


def empty_cache(model: Model) -> Cache | None:
    """A MemoryCache for our models; None for others, whose first call makes a cache."""
    return MemoryCache(model) if has_blocks(model) else None


def block_size_of(model: Model) -> int:
    """The model's block size, or the paper's for a model without blocks."""
    return model.base_model.layers[0].locality.block_size if has_blocks(model) else BLOCK_SIZE


def has_blocks(model: Model) -> bool:
    """Whether this is one of our models, or has a memory attached."""
    return isinstance(model, MemoryCausalLM)


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Evaluation mode without gradients; restores the model's mode afterwards."""
    training = model.training
    model.eval()
    try:
        # Not inference_mode: cached operators must stay usable in training.
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def token_losses(logits: Float[Tensor, "row token vocabulary"], targets: Int[Tensor, "row token"]) -> Tensor:
    """Losses in float32, on the CPU, from logits of any precision."""
    rows, tokens, vocabulary = logits.shape
    flat, targets = logits.reshape(-1, vocabulary), targets.reshape(-1).to(logits.device)
    step = max(1, SLICE // vocabulary)
    parts = [
        cross_entropy(flat[i : i + step].float(), targets[i : i + step], reduction="none")
        for i in range(0, len(flat), step)
    ]
    return torch.cat(parts).view(rows, tokens).cpu()


def _on(model: Model, ids: Tensor) -> Tensor:
    return ids.to(next(model.parameters()).device)
