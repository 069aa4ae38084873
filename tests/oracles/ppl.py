"""Perplexity the slow way: one dense float64 pass for every window, one token at a time, Python sums."""

import copy
import math

import torch


def token_losses(model, ids):
    """Loss of tokens 1, 2, ... of one row, all logits at once, in float64."""
    dense = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        logits = dense(ids[None], use_cache=False).logits[0]
    return [float(logits[p - 1].logsumexp(0) - logits[p - 1, ids[p]]) for p in range(1, len(ids))]


def windowed_losses(model, ids, window, stride):
    """Loss of each token in the first of the windows [j * stride, j * stride + window) that predicts it."""
    losses = {}
    for begin in range(0, len(ids), stride):
        piece = ids[begin : begin + window + 1]  # the last token is predicted, not read
        if len(piece) < 2:
            break
        for offset, loss in enumerate(token_losses(model, piece)):
            losses.setdefault(begin + offset + 1, loss)
    return [losses[p] for p in range(1, len(ids))]


def ppl(losses):
    return math.exp(math.fsum(losses) / len(losses))
