"""What only a GPU can show: fused kernels, bf16, compiled graphs. `make test-gpu`."""

import pytest
import torch

import elastic_memory as em
from elastic_memory.attention import trapezoidal
from elastic_memory.evaluation.selfcheck import checks
from elastic_memory.fast import attention as flash
from elastic_memory.fast import decoder, generation
from elastic_memory.memory import MEMORIES
from elastic_memory.operators import Bank

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_every_equivalence_of_selfcheck():
    found = list(checks("cuda"))
    assert not [(name, error) for name, error, bound in found if error > bound]


@pytest.mark.parametrize("dim", [64, 90, 96, 128])
@pytest.mark.parametrize("before", [0, 128, 512, 1000])
@pytest.mark.parametrize("kernels", ["torch's", "FlashAttention-4"])
def test_fused_attention_in_bf16(dim, before, kernels, monkeypatch):
    if kernels == "torch's":
        monkeypatch.setattr(flash, "supports", lambda query, key: False)
    else:
        pytest.importorskip("flash_attn.cute")
    generator = torch.Generator("cuda").manual_seed(0)
    make = lambda n: torch.randn(2, 8, n, dim, device="cuda", generator=generator)  # noqa: E731
    query, key, value = make(512), make(512 + before), make(512 + before)
    inputs = [x.bfloat16().requires_grad_() for x in (query, key, value)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    weight = make(512)
    fast = trapezoidal(*inputs)
    scores = exact[0] @ exact[1].mT / dim**0.5
    mask = torch.ones(512, 512 + before, dtype=torch.bool, device="cuda").tril(before)
    slow = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ exact[2]
    assert (fast - slow).norm() / slow.norm() < 1e-2
    ours = torch.autograd.grad((fast * weight).sum(), inputs)
    theirs = torch.autograd.grad((slow * weight).sum(), exact)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() / b.norm() < 2e-2


@pytest.mark.parametrize("memory", MEMORIES)
def test_compiled_layers_in_bf16(memory):
    """Loss and gradients of the compiled training, against eager float32."""
    torch.manual_seed(0)
    config = em.MemoryLlamaConfig.preset("tiny", memory=memory, block_size=128, head_dim=64, initializer_range=0.05)
    model = em.MemoryLlamaForCausalLM(config).cuda()
    ids = torch.randint(0, 512, (2, 1024), device="cuda")
    model(ids, labels=ids).loss.backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.compile_blocks()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        error = (parameter.grad - exact[name]).norm() / exact[name].norm().clamp(min=1e-6)
        assert error < 0.1, (name, error)
    torch._dynamo.reset()


@pytest.mark.parametrize("order", [540, 8640])
def test_operators_are_those_of_the_cpu(order):
    bank = Bank(order, 64, "exponential")
    here, there = (bank.direct(2048, torch.device(device), torch.float32) for device in ("cpu", "cuda"))
    assert (here - there.cpu()).abs().max() < 1e-5


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_captured_decoding_is_one_call(memory, compiled, monkeypatch):
    """Single tokens by CUDA graphs, several to a block, over several blocks, rows with clocks of their own."""
    monkeypatch.setattr(decoder, "STRETCH", 5)
    torch.manual_seed(0)
    config = em.MemoryLlamaConfig.preset("tiny", memory=memory, block_size=16, initializer_range=0.1)
    model = em.MemoryLlamaForCausalLM(config).cuda().eval()
    ids = torch.randint(1, 512, (2, 80), device="cuda")
    rows = [model(ids[row : row + 1, start:]).logits[0, 20 - start :] for row, start in enumerate((0, 7))]
    if compiled:
        model.compile_blocks()
    mask = torch.ones(2, 20, dtype=torch.long, device="cuda")
    mask[1, :7] = 0
    cache = em.MemoryCache(model, static=True)
    model(ids[:, :20], attention_mask=mask, past_key_values=cache)
    logits = torch.cat([model(x, past_key_values=cache).logits for x in ids[:, 20:].split(1, dim=1)], dim=1)
    torch.testing.assert_close(logits, torch.stack(rows), atol=1e-4, rtol=0)
    # Nine tokens apart, the longer of the rows is never among the first five of its block: three stretches of four.
    assert len(cache.decoder.graphs) == (1 if all(cache.decoder.fused) else 3)
    torch._dynamo.reset()


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 30}])
def test_generate_chooses_the_tokens_of_the_plain_path(memory, options, monkeypatch):
    """Captured steps, and for sampling the recorded choice with the same random numbers; across the ends of blocks."""
    torch.manual_seed(0)
    config = em.MemoryLlamaConfig.preset("tiny", memory=memory, block_size=64)
    model = em.MemoryLlamaForCausalLM(config).cuda().eval()
    prompt = torch.randint(1, config.vocab_size, (3, 100), device="cuda")
    results = []
    for devices in ((), ("cuda",), ("cuda",)):  # the third finds the graphs of the second
        monkeypatch.setattr(generation, "DEVICES", devices)
        torch.manual_seed(1)
        settings = {"do_sample": False, "max_new_tokens": 150, "pad_token_id": 0, "eos_token_id": 3} | options
        results.append(model.generate(prompt, **settings))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_memory_of_a_long_stream_is_flat():
    model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("100m")).cuda().bfloat16().eval()
    cache, held = em.MemoryCache(model), []
    ids = torch.randint(0, 32000, (1, 2048), device="cuda")
    for block in range(64):
        model(ids, past_key_values=cache, logits_to_keep=1)
        if block in (2, 63):
            held.append(torch.cuda.memory_allocated())
    assert abs(held[1] - held[0]) < 2**20


def test_gradients_do_not_depend_on_earlier_layouts():
    """Attention calls alike in shape, their gradients in different layouts, in both orders."""
    generator = torch.Generator("cuda").manual_seed(0)
    make = lambda: torch.randn(4, 8, 256, 64, device="cuda", generator=generator)  # noqa: E731
    inputs = [make().bfloat16().requires_grad_() for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    mask = torch.ones(256, 256, dtype=torch.bool, device="cuda").tril()
    slow = (exact[0] @ exact[1].mT / 8).masked_fill(~mask, -torch.inf).softmax(-1) @ exact[2]
    for laid_out in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x):
        weight = laid_out(make().bfloat16())
        ours = torch.autograd.grad(trapezoidal(*inputs), inputs, weight)
        theirs = torch.autograd.grad(slow, exact, weight.double(), retain_graph=True)
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).norm() / b.norm() < 2e-2
