"""The fused step of a decoder, against the plain one."""

import pytest
import torch

pytest.importorskip("triton")

import elastic_memory as em
from elastic_memory.fast import decoder
from elastic_memory.fast.kernels import decoding
from tests.conftest import small_model

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")  # a split without columns
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def use_kernels(monkeypatch, wanted):
    monkeypatch.setattr(decoder, "_kernels", lambda device: decoding if wanted else None)


def error(ours, theirs):
    return ((ours - theirs).double().norm() / theirs.double().norm().clamp(min=1e-3)).item()


def warm(model, rows, length, device):
    """A static cache of rows that began at different times, at least one of them a single token ago."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 61, (rows, length), generator=generator)
    starts = torch.randint(0, length, (rows, 1), generator=generator)
    starts[0], starts[-1] = 0, length - 1 if rows > 1 else 0
    mask = (torch.arange(length) >= starts).long()
    cache = em.MemoryCache(model, static=True)
    model(ids.to(device), attention_mask=mask.to(device), past_key_values=cache)
    return cache


def step(model, cache, ids, fused, monkeypatch):
    """Hidden states of one more token, and what the decoder's buffers hold then."""
    use_kernels(monkeypatch, fused)
    cache = cache.fork()
    hidden = model.model(ids, past_key_values=cache).last_hidden_state
    assert cache.decoder.fused == [fused] * len(model.model.layers)
    return hidden, cache.decoder.buffers, cache.decoder.positions


@pytest.mark.parametrize(
    ("device", "dtype"),  # the interpreter has no bf16
    [
        pytest.param("cpu", torch.float32, marks=interpreted),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    ("rows", "length", "shape"),
    [
        (1, 100, dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)),
        (1, 80, dict(num_attention_heads=2, num_key_value_heads=2, head_dim=90)),
        (3, 90, dict(num_attention_heads=3, num_key_value_heads=1, head_dim=96, hidden_size=45)),
        (17, 50, dict(num_attention_heads=4, num_key_value_heads=2, head_dim=10)),
        (64, 45, dict(num_attention_heads=8, num_key_value_heads=4, head_dim=16)),
    ],
)
@torch.no_grad()
def test_a_step_is_the_plain_one(rows, length, shape, dtype, device, monkeypatch):
    """Shapes, rows with clocks of their own: some without memory, some at the first or last token of a block."""
    model = small_model(block_size=40, num_hidden_layers=2, **shape).to(device, dtype)
    cache, ids = warm(model, rows, length, device), torch.arange(1, rows + 1, device=device)[:, None] % 61
    fused, ours, clock = step(model, cache, ids, True, monkeypatch)
    plain, theirs, expected = step(model, cache, ids, False, monkeypatch)
    assert error(fused, plain) < TOLERANCE[dtype]
    assert torch.equal(clock, expected)
    for own, other in zip(ours, theirs, strict=True):
        assert own.keys() == other.keys()
        for name in own:
            assert error(own[name], other[name]) < TOLERANCE[dtype]
            assert torch.equal((own[name] == 0).all(-1), (other[name] == 0).all(-1))  # nothing is written elsewhere


@pytest.mark.parametrize(
    ("memory", "local"), [("elastic", "block"), ("elastic", "sliding"), ("melodi", "block"), ("infini", "block")]
)
@torch.no_grad()
def test_decoding_is_one_call(memory, local, device, ids, monkeypatch):
    """From the first token on, over the ends of blocks; a layer that the kernels do not know goes the plain way."""
    use_kernels(monkeypatch, True)
    monkeypatch.setattr(decoder, "STRETCH", 3)
    monkeypatch.setattr(decoding, "PROGRAMS", 8)
    model = small_model(memory, local_attention=local, num_hidden_layers=2).to(device)
    cache, ids = em.MemoryCache(model, static=True), ids[:, :20].to(device)
    expected = model(ids).logits
    pieces = ids.split([*[1] * 10, 7, *[1] * 3], dim=1)
    logits = torch.cat([model(x, past_key_values=cache).logits for x in pieces], dim=1)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert cache.decoder.fused == [memory != "infini" or not layer.memory.start(1) for layer in model.model.layers]


def test_splits_that_see_nothing(device):
    """Of sixteen splits of three columns most are empty."""
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
    qkv, buffers = make(1, 6 * 16), {"key": make(1, 2, 9, 16), "value": make(1, 2, 9, 16)}
    rope = torch.ones(8, 16, device=device), torch.zeros(8, 16, device=device)
    rows = (torch.tensor([fact], device=device) for fact in (2, 0, 0))
    mixed, sums = decoding.attend(qkv, rope, tuple(rows), buffers, 1, 1, 8, 0.25)
    assert len(sums) == 16
    assert (sums == -torch.inf).any()
    merged = decoding.merge(mixed, sums, torch.eye(32, device=device), torch.zeros(1, 1, 32, device=device))
    query, key, value = qkv.view(6, 16).split(2)
    key, value = (torch.cat((buffers[name][0, :, 1:3], x[:, None]), 1) for name, x in (("key", key), ("value", value)))
    weights = torch.einsum("hd,hkd->hk", query, key).mul(0.25).softmax(-1)
    torch.testing.assert_close(merged.flatten(), torch.einsum("hk,hkd->hd", weights, value).flatten())
    torch.testing.assert_close(buffers["key"][0, :, 3], key[:, 2])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.half(),
        lambda model: model.model.layers[0].mlp.bfloat16(),
        lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.GELU()),
        lambda model: setattr(model.model.layers[0].self_attn, "q_norm", torch.nn.Identity()),
        lambda model: setattr(model.model.layers[0].self_attn, "o_proj", torch.nn.Linear(32, 32)),
    ],
)
def test_what_the_kernels_do_not_know(change):
    model = small_model()
    assert decoder._is_plain(model.model.layers[0], model.model)
    change(model)
    assert not decoder._is_plain(model.model.layers[0], model.model)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8])
@torch.no_grad()
def test_captured_steps_in_bf16(rows):
    """A whole sequence through graphs of fused kernels, over the ends of blocks, as a plain cache has it."""
    torch.manual_seed(0)
    config = em.MemoryLlamaConfig.preset("100m", num_hidden_layers=4, memory_layers=[2], block_size=256, pad_heads=True)
    model = em.MemoryLlamaForCausalLM(config).cuda().bfloat16().eval()
    ids = torch.randint(0, 32000, (rows, 700), device="cuda")
    caches = em.MemoryCache(model, static=True), em.MemoryCache(model)
    logits = []
    for cache in caches:
        model(ids[:, :200], past_key_values=cache)
        logits.append(torch.cat([model(x, past_key_values=cache).logits for x in ids[:, 200:].split(1, 1)], 1))
    assert all(caches[0].decoder.fused)
    assert len(caches[0].decoder.graphs) == 1
    assert error(*logits) < 2e-2
