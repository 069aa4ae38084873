"""Cross-entropy of rows of logits, which are overwritten by their gradient: each is read once and written once.

One program per row. It reads the row twice, the second time from the cache.
"""

# Constants of the compiled program are in capitals, as Triton has it.
# ruff: noqa: N803

from functools import lru_cache

import torch
import triton
import triton.language as tl

from elastic_memory.fast.kernels import agrees, largest
from elastic_memory.shapes import Float, Int, Tensor

IGNORED = tl.constexpr(-100)
LOG2E = tl.constexpr(1.4426950408889634)
PIECE, WARPS = 8192, 8  # logits that a program handles at once


def losses(
    logits: Float[Tensor, "row vocabulary"], labels: Int[Tensor, " row"], differentiate: bool
) -> Float[Tensor, " row"]:
    """Each row's loss in float32; 0 where the label is -100, NaN where there is no such logit.

    If `differentiate`, logits are overwritten.
    """
    rows, vocabulary = logits.shape
    found = logits.new_empty(rows, dtype=torch.float32)
    if rows:
        piece = min(PIECE, triton.next_power_of_2(vocabulary))
        with torch.cuda.device_of(logits):
            _losses[(rows,)](logits, labels, found, vocabulary, differentiate, PIECE=piece, num_warps=WARPS)
    return found


@triton.jit
def _losses(logits, labels, found, vocabulary, DIFFERENTIATE: tl.constexpr, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    label = tl.load(labels + row)
    counted, exists = label != IGNORED, (label >= 0) & (label < vocabulary)
    # Loaded before the first pass, whose reductions synchronise all threads: the second pass overwrites it.
    own = tl.load(logits + label, mask=exists, other=float("nan")).to(tl.float32) * LOG2E
    top, total = float("-inf"), 0.0
    for start in range(0, vocabulary, PIECE):
        place = start + tl.arange(0, PIECE)
        x = tl.load(logits + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32) * LOG2E
        higher = tl.maximum(top, tl.max(x))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(x - higher))
        top = higher
    normaliser = top + tl.log2(total)
    tl.store(found + row, tl.where(counted, (normaliser - own) / LOG2E, 0.0))
    if DIFFERENTIATE:
        for start in range(0, vocabulary, PIECE):
            place = start + tl.arange(0, PIECE)
            x = tl.load(logits + place, mask=place < vocabulary, other=0.0).to(tl.float32) * LOG2E
            grad = tl.exp2(x - normaliser) - tl.where(place == label, 1.0, 0.0)
            grad = tl.where(counted, grad, 0.0).to(logits.dtype.element_ty)
            tl.store(logits + place, grad, mask=place < vocabulary)


@lru_cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `losses` agrees with torch's cross-entropy on this device."""
    within = max(1e-5, torch.finfo(dtype).eps)
    return agrees("kernels for cross-entropy", lambda: _error(device, dtype), within)


def _error(device: torch.device, dtype: torch.dtype) -> float:
    """Relative error of losses and gradients, with more logits than a program handles at once."""
    generator, vocabulary = torch.Generator(device).manual_seed(0), 2 * PIECE + 1
    logits = (4 * torch.randn(16, vocabulary, device=device, generator=generator)).to(dtype)
    labels = torch.randint(0, vocabulary, (16,), device=device, generator=generator)
    labels[:3] = -100
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    (gradients,) = torch.autograd.grad(expected.sum(), exact)
    pairs = ((losses(logits, labels, True), expected.detach()), (logits, gradients))
    return largest((a - b).norm() / b.norm() for a, b in pairs)
