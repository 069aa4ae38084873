"""Each mechanism against the literal version of its equations, outputs and gradients."""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from tests.memory.cases import CASES, fresh, tokens
from tests.oracles import parts

WITH_ORACLE = [case for case, (name, _) in CASES.items() if find_spec(f"tests.oracles.{name}")]


@pytest.mark.parametrize("case", WITH_ORACLE)
@pytest.mark.parametrize("length", [5, 16, 29], ids=["one block", "whole blocks", "a short last block"])
def test_a_model_is_its_equations(case, length):
    model = fresh(case, num_hidden_layers=2).double()
    literal = import_module(f"tests.oracles.{CASES[case][0]}").layer
    ids = tokens(1, length)
    weights = dict(model.named_parameters())
    if "gate" in " ".join(weights):
        with torch.no_grad():
            for name, weight in weights.items():
                if name.endswith("gate"):
                    weight.copy_(torch.linspace(-1, 1, len(weight)))

    ours = model.model(ids).last_hidden_state[0]
    embeds = model.model.embed_tokens(ids[0])
    theirs = parts.rms(parts.hidden(model, embeds, literal)) * model.model.norm.weight
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)

    direction = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = [
        torch.autograd.grad((x * direction).sum(), list(weights.values()), materialize_grads=True, allow_unused=True)
        for x in (ours, theirs)
    ]
    for name, mine, other in zip(weights, *gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4 * max(1.0, other.abs().max().item()), rtol=0, msg=name)


def test_every_mechanism_of_this_package_has_an_oracle():
    """Those without one here are tested against Algorithm 1 and plain Llama in tests/model."""
    assert {CASES[case][0] for case in WITH_ORACLE} >= {name for name, _ in CASES.values()} - {"none", "elastic"}
