"""Losses of an untouched model that sees the first tokens and the newest ones only: attention sinks (arXiv 2309.17453).

Positions are those inside the cache, which holds the sinks and the window: the window's tokens keep their distances,
and the sinks are never further away than the cache is long.
"""

from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from elastic_memory.attention import rotate
from elastic_memory.evaluation.losses import Model, evaluating, token_losses
from elastic_memory.memory.tools import wide
from elastic_memory.shapes import Float, Int, Tensor

SINKS = 4  # the first tokens, which every token sees


def sink_losses(model: Model, ids: Int[Tensor, "row token"], window: int) -> Float[Tensor, "row prediction"]:
    """Losses of rows, each in one call: every token sees the sinks and the newest `window` tokens, itself included."""
    if getattr(model.base_model.rotary_emb, "attention_scaling", 1.0) != 1.0:
        raise ValueError("attention sinks: rotary positions of this model scale attention, which is not supported")
    device, before = next(model.parameters()).device, model.config._attn_implementation
    attend = partial(_attend, model.base_model.rotary_emb, window)
    ALL_ATTENTION_FUNCTIONS.register("sinks", attend)
    model.config._attn_implementation = "sinks"
    try:
        with evaluating(model):
            return torch.stack([_losses(model, row.to(device)) for row in ids])
    finally:
        model.config._attn_implementation = before


def _losses(model: Model, row: Int[Tensor, " token"]) -> Float[Tensor, " prediction"]:
    """Losses of one row. All position ids are 0, so attention gets unrotated queries and keys, and rotates them."""
    positions = torch.zeros_like(row[None, :-1])
    logits = model(row[None, :-1], position_ids=positions, use_cache=False).logits
    return token_losses(logits, row[None, 1:])[0]


def _attend(
    rope: Any,
    window: int,
    module: Any,
    query: Float[Tensor, "row head token dim"],
    key: Float[Tensor, "row kv_head token dim"],
    value: Float[Tensor, "row kv_head token dim"],
    mask: None,
    scaling: float,
    **_: Any,
) -> tuple[Float[Tensor, "row token head dim"], None]:
    times = torch.arange(query.shape[2], device=query.device)
    near, far = (_rotated(rope, query, at) for at in (times, times.clamp(max=window + SINKS - 1)))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (_rotated(rope, key, times), value))
    parts = []
    for some in times.split(window):
        first, last = int(some[0]), int(some[-1]) + 1
        seen = slice(max(first - window + 1, 0), last)
        age = some[:, None] - times[None, seen]
        hidden = torch.cat((some[:, None] - times[None, :SINKS] < window, (age < 0) | (age >= window)), dim=1)
        scores = torch.cat(
            (far[:, :, first:last] @ key[:, :, :SINKS].mT, near[:, :, first:last] @ key[:, :, seen].mT), dim=3
        )
        weights = (scores.float() * scaling).masked_fill(hidden, float("-inf")).softmax(3).to(value.dtype)
        parts.append(weights @ torch.cat((value[:, :, :SINKS], value[:, :, seen]), dim=2))
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _rotated(rope: Any, x: Tensor, positions: Int[Tensor, " token"]) -> Tensor:
    # cosines and sines in float32 at least: the model's own come from its residual stream, which autocast leaves alone
    return rotate(x, *rope(wide(x), positions[None])).to(x.dtype)
