"""The memory that CONTRIBUTING.md walks through keeps what every memory promises."""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from tests.memory.cases import BLOCK, SMALL, logits, tokens

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
CODE = re.search(r"<!-- memory -->\n```python\n(.*?)```", TEXT, re.DOTALL)[1]


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model with the memory of the text, registered as the text says."""
    path = tmp_path / "average.py"
    path.write_text(CODE)
    spec = spec_from_file_location("average", path)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "average", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(MEMORIES, "average", module.AverageMemory)
    torch.manual_seed(0)
    config = em.MemoryLlamaConfig.preset("tiny", memory="average", **(SMALL | {"memory_order": None}))
    return em.MemoryLlamaForCausalLM(config).eval()


def test_it_is_short():
    assert len(CODE.splitlines()) < 40
    assert len(re.findall(r"^    def ", CODE, re.MULTILINE)) <= 5


def test_a_stream_is_one_call(model):
    ids = tokens()
    for sizes in ([45], [1, 20, 3, 21], [8] * 5 + [5]):
        cache = em.MemoryCache(model)
        pieces = [logits(model, piece, past_key_values=cache) for piece in ids.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), logits(model, ids), atol=2e-5, rtol=0)


def test_it_remembers_and_does_not_see_the_future(model):
    ids = tokens()
    for first in (1, BLOCK, 3 * BLOCK - 1):
        changed = ids.clone()
        changed[:, first:] = (changed[:, first:] + 7) % SMALL["vocab_size"]
        before, after = logits(model, ids), logits(model, changed)
        assert torch.equal(before[:, :first], after[:, :first])
        assert not torch.equal(before[:, first], after[:, first])
    changed = ids.clone()
    changed[:, :BLOCK] = (changed[:, :BLOCK] + 7) % SMALL["vocab_size"]
    assert not torch.equal(logits(model, changed)[:, 4 * BLOCK :], logits(model, ids)[:, 4 * BLOCK :])


def test_gradients_reach_the_first_block(model):
    embeds = model.get_input_embeddings()(tokens(1, 4 * BLOCK)).detach().requires_grad_()
    hidden = model.model(inputs_embeds=embeds).last_hidden_state[:, 3 * BLOCK :]
    (gradient,) = torch.autograd.grad(hidden.square().sum(), embeds)
    assert gradient[:, :BLOCK].abs().sum() > 0


def test_the_average_is_the_average(model):
    memory = next(iter(model.memories.values()))
    key = torch.randn(1, SMALL["num_key_value_heads"], 3 * BLOCK, 8, generator=torch.Generator().manual_seed(0))
    average, weight = 0, 0
    for token in key[:, :, : 2 * BLOCK].unbind(2):
        average, weight = 0.9 * average + 0.1 * token, 0.9 * weight + 0.1
    read, _ = memory.read_all(key, key, host=None)[-1]
    torch.testing.assert_close(read[:, :, 0], average / weight)
    assert model.memory_report()[0]["state_floats"] == 2 * key[:, :, 0].numel()
