"""A memory of three methods runs block by block, and all blocks at once if it says that it can: the same result."""

import pytest
import torch

import elastic_memory as em
from elastic_memory.memory import MEMORIES, Memory, ParallelMemory
from tests.memory.cases import BLOCK, SMALL, logits, tokens


class Newest:
    """The last token of the block before."""

    shares_softmax = True

    def start(self, batch, device=None):
        shape = (batch, self.geometry.kv_heads, 1, self.geometry.head_dim)
        return torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    def read(self, state, seen, host):
        return state

    def write(self, state, block, seen):
        return block.key[:, :, -1:].float(), block.value[:, :, -1:].float()


class Sequential(Newest, Memory):
    pass


class Parallel(Newest, ParallelMemory):
    pass


def build(kind, monkeypatch, **overrides):
    monkeypatch.setitem(MEMORIES, "newest", kind)
    torch.manual_seed(0)
    return em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny", memory="newest", **small(**overrides)))


def small(**overrides):
    return SMALL | {"memory_order": None, "memory_layers": [0, 2]} | overrides


@pytest.mark.parametrize("compiled", [False, True])
def test_block_by_block_is_all_at_once(compiled, monkeypatch):
    ids, found = tokens(), []
    for kind in (Sequential, Parallel):
        model = build(kind, monkeypatch)
        if compiled:
            model.compile_blocks(backend="eager")
        loss = model(ids, labels=ids).loss
        loss.backward()
        found.append((loss, *(parameter.grad for parameter in model.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()


def test_a_sequential_memory_streams(monkeypatch):
    model, ids = build(Sequential, monkeypatch).eval(), tokens()
    for sizes in ([3, 30, 12], [BLOCK] * 5 + [5]):
        cache = em.MemoryCache(model)
        pieces = [logits(model, piece, past_key_values=cache) for piece in ids.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), logits(model, ids), atol=2e-5, rtol=0)


class Narrowing(Newest, ParallelMemory):
    """Three columns, two, one, and again."""

    def read(self, state, seen, host):
        return tuple(part.expand(-1, -1, 3 - seen // BLOCK % 3, -1) for part in state)


@pytest.mark.parametrize("local", ["block", "sliding"])
def test_a_reading_may_get_narrower_while_rows_are_at_different_tokens(local, monkeypatch):
    model, ids, lengths = build(Narrowing, monkeypatch, local_attention=local).eval(), tokens(3), [45, 29, 7]
    cache, mask = em.MemoryCache(model), torch.stack([torch.arange(45) < length for length in lengths]).long()
    more = tokens(3, 20, seed=2)
    found = [logits(model, ids, attention_mask=mask, past_key_values=cache), logits(model, more, past_key_values=cache)]
    for row, length in enumerate(lengths):
        whole = logits(model, torch.cat((ids[row : row + 1, :length], more[row : row + 1]), dim=1))[0]
        torch.testing.assert_close(torch.cat((found[0][row, :length], found[1][row])), whole, atol=2e-5, rtol=0)


def test_sliding_attention_needs_all_blocks_at_once(monkeypatch):
    monkeypatch.setitem(MEMORIES, "newest", Sequential)
    with pytest.raises(ValueError, match="one after another"):
        em.MemoryLlamaConfig.preset("tiny", memory="newest", **small(local_attention="sliding"))
