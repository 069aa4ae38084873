"""Small models of every mechanism in the registry, as it is by default and in its variants."""

from functools import cache

import torch

import elastic_memory as em
from elastic_memory.memory import MEMORIES

# Weights large enough that memory matters to the logits; grouped heads; a few blocks are a short sample.
SMALL = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=61, block_size=8, initializer_range=0.15,
)  # fmt: skip
BLOCK = SMALL["block_size"]

# Options beyond the defaults that change what is computed. A mechanism that is not named here is tested as it is.
VARIANTS = {
    "elastic": [
        dict(algorithm="direct"),
        dict(algorithm="recurrent"),
        dict(silent=True),
        dict(mass=True, algorithm="direct"),
        dict(query="raw"),
        dict(query="raw", mass=True, silent=True),
        dict(length=True),
    ],
    "memorizing": [
        dict(combine="joint", positions="full"),
        dict(combine="joint", positions="query"),
        dict(positions="query"),
        dict(positions="full"),
    ],
    "infini": [dict(update="linear"), dict(memory_norm="qk"), dict(memory_norm="output"), dict(first_block="zero")],
    "melodi": [dict(first_block="zeros"), dict(silent=True)],
    "sampled": [dict(query="raw", mass=True)],
    "recent": [dict(share=0.2)],
    "means": [dict(sinks=0, query="raw")],
    "merged": [dict(distance=11, rounds=1), dict(rounds=3, slow=0.4, silent=True)],
    "recent_merged": [dict(share=0.2, distance=11, slow=0.3)],
    "clock": [
        dict(shortest=3, longest=14, query="raw"),
        dict(shortest=3, longest=14, rate="learned"),
        dict(shortest=3, longest=14, rate="content"),
    ],
    "dyadic": [dict(segments=4, unit=3, query="raw"), dict(segments=5, unit=2, mass=True)],
    "outliers": [dict(share=0.2, query="raw")],
}
# Gates that start nearly closed would hide from a test what memory does.
OPEN = {"infini": dict(first_gate=0.0)}
DEFAULTS = {name: (name, {}) for name in MEMORIES}
CASES = DEFAULTS | {
    " ".join([name, *(key if value is True else str(value) for key, value in options.items())]): (name, options)
    for name, variants in VARIANTS.items()
    for options in variants
}
REMEMBERING = [case for case, (name, _) in CASES.items() if MEMORIES[name].reach != 0]


def fresh(case, seed=0, **overrides):
    """A model of its own."""
    memory, options = CASES.get(case, (case, {}))
    options = OPEN.get(memory, {}) | options | overrides.pop("memory_options", {})
    torch.manual_seed(seed)
    config = em.MemoryLlamaConfig.preset("tiny", memory=memory, memory_options=options, **(SMALL | overrides))
    return with_blends(em.MemoryLlamaForCausalLM(config).eval())


@torch.no_grad()
def with_blends(model):
    """`model`; a memory that started silent is now used, by each head differently; learned clocks run unevenly."""
    for memory in model.memories.values():
        if hasattr(memory, "rate_gain"):
            memory.rate_gain.copy_(torch.linspace(-0.5, 0.7, len(memory.rate_gain)))
        if hasattr(memory, "rate_gain") and hasattr(memory, "weigh"):
            memory.weigh.copy_(torch.linspace(-0.8, 0.8, memory.weigh.numel()).view_as(memory.weigh))
        if memory.blend is not None:
            memory.blend.copy_(torch.linspace(-0.5, 1.5, len(memory.blend)))
    return model


@cache
def small(case):
    """A model that tests share and must not change."""
    return fresh(case)


def tokens(batch=2, length=45, seed=1):
    return torch.randint(0, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids, **kwargs):
    return model(ids, **kwargs).logits


def with_weights_of(model, other):
    """`model`, with every weight of `other` that it has too."""
    model.load_state_dict(other.state_dict(), strict=False)
    return model


def memory_of(model):
    """The first memory of a model."""
    return next(iter(model.memories.values()))
