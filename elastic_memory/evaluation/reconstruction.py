"""Reconstruction error: raw keys and values against their reconstruction from a memory state of some order.

Works on every model whose attention has `k_proj` and `v_proj`, with or without memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from elastic_memory import hippo
from elastic_memory.evaluation.inputs import token_ids
from elastic_memory.evaluation.losses import Model, block_size_of, streamed_logits
from elastic_memory.shapes import Float, Tensor

SPECTRUM_BINS = 32
Signal = Float[Tensor, "token head dim"]


@dataclass(frozen=True)
class Reconstruction:
    """Errors of one layer's keys or values at one order, averaged over rows, tokens and dimensions.

    `relative` is divided by the variance: 1 is as bad as storing the mean. `by_age[i]` is the error of tokens i blocks
    before the end, `by_head` that of each head.
    """

    layer: int
    part: str
    order: int
    mse: float
    relative: float
    by_head: list[float]
    by_age: list[float]


@dataclass(frozen=True)
class Spectrum:
    """Shares of energy in 32 equal bands of frequency, lowest first, of a layer's keys or values along the tokens."""

    layer: int
    part: str
    energy: list[float]


def reconstruction(
    model: Model,
    rows: Sequence[Any],
    orders: Sequence[int],
    layers: Sequence[int] | None = None,
    age: int | None = None,
) -> list[Reconstruction]:
    """Compress each row's keys and values to each order, reconstruct every token, and measure the error.

    `layers` defaults to those with memory (all, if there are none); `age` is the number of tokens per age group, by
    default a block.
    """
    age = age or block_size_of(model)
    kept: dict[tuple[int, str, int], list[tuple[Tensor, float]]] = {}
    for row in rows:
        for (layer, part), signal in keys_and_values(model, row, layers).items():
            variance = float(signal.var(dim=0, correction=0).mean())
            for order in orders:
                errors = squared_errors(signal, order)
                kept.setdefault((layer, part, order), []).append((errors, variance))
    return [_averaged(*name, found, age) for name, found in kept.items()]


def spectrum(model: Model, rows: Sequence[Any], layers: Sequence[int] | None = None) -> list[Spectrum]:
    """How fast keys and values change along the sequence: low frequencies compress well."""
    kept: dict[tuple[int, str], list[Tensor]] = {}
    for row in rows:
        for name, signal in keys_and_values(model, row, layers).items():
            kept.setdefault(name, []).append(energies(signal))
    return [Spectrum(*name, torch.stack(found).mean(0).tolist()) for name, found in kept.items()]


def squared_errors(signal: Signal, order: int) -> Float[Tensor, "token head"]:
    """Mean squared error over dimensions between each token and its reconstruction."""
    return torch.cat([(back - piece).square().mean(-1) for piece, back in reconstructed(signal, order)])


def reconstructed(signal: Signal, order: int) -> Iterator[tuple[Signal, Signal]]:
    """Tokens and their reconstructions at the middle of each; in pieces, as the basis for all would be large."""
    state, tokens = hippo.compress(signal, order), len(signal)
    middles = (torch.arange(tokens, dtype=torch.float64, device=signal.device) + 0.5) / tokens
    for piece, u in zip(signal.split(1024), middles.split(1024), strict=True):
        yield piece, hippo.reconstruct(state, u)


def energies(signal: Signal) -> Float[Tensor, " band"]:
    """Shares of energy by band of the discrete cosine transform along the tokens, over all heads and dimensions."""
    tokens = len(signal)
    # DCT-II is the Fourier transform of the signal followed by its mirror image, up to a phase.
    mirrored = torch.cat([signal, signal.flip(0)]).flatten(1)
    power = torch.fft.rfft(mirrored, dim=0)[:tokens].abs().square().sum(dim=1)
    power[0] /= 2  # the constant function has twice the norm of a cosine
    bands = min(SPECTRUM_BINS, tokens)
    band = torch.arange(tokens, device=signal.device) * bands // tokens
    total = torch.zeros(bands, dtype=power.dtype, device=signal.device).index_add_(0, band, power)
    return (total / total.sum()).cpu()


def keys_and_values(model: Model, row: Any, layers: Sequence[int] | None = None) -> dict[tuple[int, str], Signal]:
    """Raw keys and values (before rotary positions) of one row, by layer and part, in float64."""
    ids = token_ids(row)
    attentions = {i: layer.self_attn for i, layer in enumerate(model.base_model.layers)}
    wanted = list(getattr(model, "memories", {})) or list(attentions) if layers is None else layers
    for index in wanted:
        if index not in attentions:
            raise ValueError(f"layer {index} of a model with {len(attentions)}: choose from 0 to {len(attentions) - 1}")
    with _tapped({i: attentions[i] for i in wanted}) as pieces:
        for _ in streamed_logits(model, ids[None], block_size_of(model), keep=1):
            pass
    signals = {
        (i, part): torch.cat(found, dim=1)[0].double().unflatten(1, (-1, attentions[i].head_dim))
        for (i, part), found in pieces.items()
    }
    # Padded heads have columns of zeros, which do not count.
    return {name: signal[..., (signal != 0).any(dim=0).any(dim=0)] for name, signal in signals.items()}


@contextmanager
def _tapped(attentions: dict[int, Any]) -> Iterator[dict[tuple[int, str], list[Tensor]]]:
    """Collect the outputs of the key and value projections, by layer and part."""
    pieces: dict[tuple[int, str], list[Tensor]] = {}
    handles = []
    for index, attention in attentions.items():
        if not (hasattr(attention, "k_proj") and hasattr(attention, "v_proj")):
            raise ValueError(f"{type(attention).__name__} has no k_proj and v_proj: choose another model")
        # If keys are normalised, memory holds the normalised ones.
        for part, module in (("key", getattr(attention, "k_norm", attention.k_proj)), ("value", attention.v_proj)):
            found = pieces.setdefault((index, part), [])
            handles.append(
                module.register_forward_hook(lambda _, __, out, found=found: found.append(out.detach().flatten(2)))
            )
    try:
        yield pieces
    finally:
        for handle in handles:
            handle.remove()


def _averaged(layer: int, part: str, order: int, found: list[tuple[Tensor, float]], age: int) -> Reconstruction:
    lengths = {len(error) for error, _ in found}
    if len(lengths) > 1:
        raise ValueError(f"rows of {sorted(lengths)} tokens: give rows of one length")
    errors = torch.stack([error for error, _ in found]).mean(0)
    variance = sum(variance for _, variance in found) / len(found)
    mse = float(errors.mean())
    return Reconstruction(
        layer=layer,
        part=part,
        order=order,
        mse=mse,
        relative=mse / variance if variance else 0.0,
        by_head=errors.mean(0).tolist(),
        by_age=[float(group.mean()) for group in errors.flip(0).split(age)],
    )
