import pytest
import torch

from tests.conftest import small_model
from tests.oracles import llama


@pytest.mark.parametrize("sampling", ["uniform", "exponential"])
@pytest.mark.parametrize("order", [3, 16, 24, 40], ids=["below", "one of two histories", "at", "above"])
def test_the_model_is_algorithm_1(sampling, order, ids):
    """Order below, at and above the history's length (8, 16 and 24 tokens)."""
    model = small_model(sampling=sampling, memory_order=order, initializer_range=0.15)
    llama.assert_close(model, ids[:, :29], 1e-5)


def test_without_memory_it_is_llama_in_blocks(ids):
    llama.assert_close(small_model("none", initializer_range=0.15), ids[:, :29], 1e-5)


def test_memory_matters(model, ids):
    """The comparisons of this suite would be empty if the logits hardly depended on memory."""
    with torch.no_grad():
        whole, last = model(ids).logits[:, 40:], model(ids[:, 40:]).logits
    assert (whole - last).abs().max() > 0.5
