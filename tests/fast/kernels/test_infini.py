"""Infini-Transformer's memory by kernels, against plain code."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import elastic_memory as em
from elastic_memory.fast import infini as module
from elastic_memory.fast.kernels import infini
from elastic_memory.memory.tools import real_features
from tests.conftest import small_model

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")
# They are for bf16, of which the interpreter has no products; it shows the same in float32.
CASES = [
    pytest.param("cpu", torch.float32, marks=interpreted),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
PROMISES = ("test_schema", "test_faketensor")  # of operations without gradients
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """The interpreter is slow, and so few tokens need several."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(infini, "TILE", 16)
        monkeypatch.setattr(infini, "CHUNK", 32)


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def sigma(x, features):
    return (F.elu(x) + 1) * real_features(features, x.shape[-1], x.device)


def narrow_sigma(x, features):
    return module._Sigma.apply(x, real_features(features, x.shape[-1], x.device))


def compare(fast, slow, inputs, dtype, skip=()):
    """Outputs and gradients of two functions, the slow one in float64."""
    device = inputs[0].device
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ours, theirs = fast(*inputs), slow(*exact)
    weights = [draw(*x.shape).to(device) for x in theirs]
    found = torch.autograd.grad(ours, inputs, [w.to(x.dtype) for w, x in zip(weights, ours, strict=True)])
    expected = torch.autograd.grad(theirs, exact, [w.double() for w in weights])
    for index, (a, b) in enumerate(zip((*found, *ours), (*expected, *theirs), strict=True)):
        if index not in skip:
            assert (a - b).norm() <= TOLERANCE[dtype] * b.norm(), index


@pytest.mark.parametrize(("device", "dtype"), CASES)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("blocks", "first", "heads", "kv_heads", "tokens", "dim", "features"),
    [(3, 1, 4, 2, 70, 24, 20), (2, 0, 2, 2, 64, 16, 16), (2, 1, 3, 1, 5, 96, 90), (2, 1, 1, 1, 1100, 2, 2)],
)
def test_mix(blocks, first, heads, kv_heads, tokens, dim, features, norm, device, dtype):
    query = draw(2, blocks, tokens, heads, dim).to(device, dtype).transpose(2, 3).requires_grad_()
    local = draw(2, blocks, heads, tokens, dim).to(device, dtype).requires_grad_()
    matrix = draw(2, blocks - first, kv_heads, dim, dim).to(device).requires_grad_()
    normaliser = (draw(2, blocks - first, kv_heads, dim).abs() + 0.5).to(device).requires_grad_()
    gate = draw(heads).to(device).requires_grad_()

    def slow(query, local, matrix, normaliser, gate):
        feature = sigma(query[:, first:], features)
        matrix, normaliser = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (matrix, normaliser))
        read = feature @ matrix / (feature @ normaliser[..., None] + 1e-6)
        if norm:
            read = read * (read.square().sum(-1, keepdim=True) / features + 1e-5).rsqrt()
        rest = torch.lerp(local[:, first:], read, gate.sigmoid()[:, None, None])
        return (torch.cat((local[:, :first], rest), dim=1),)

    # A norm makes what is read independent of the normaliser but for its epsilon: in bf16 that gradient is rounding.
    skip = (3,) if norm and dtype == torch.bfloat16 else ()

    def fast(query, *inputs):
        return (infini.mix(narrow_sigma(query, features), *inputs, features, norm),)

    compare(fast, slow, (query, local, matrix, normaliser, gate), dtype, skip)


@pytest.mark.parametrize(("device", "dtype"), CASES)
@pytest.mark.parametrize(
    ("folded", "blocks", "heads", "tokens", "dim", "features"),
    [(3, 3, 2, 70, 24, 20), (1, 2, 1, 5, 96, 90), (1, 1, 3, 1100, 16, 16), (2, 3, 2, 40, 16, 16)],
)
def test_fold(folded, blocks, heads, tokens, dim, features, device, dtype):
    key = draw(2, blocks, tokens, heads, dim).to(device, dtype).transpose(2, 3).requires_grad_()
    value = draw(2, heads, blocks, tokens, dim).to(device, dtype).transpose(1, 2).requires_grad_()
    normaliser = (draw(2, folded, heads, dim).abs() + 0.5).to(device).requires_grad_()

    def slow(key, value, normaliser):
        feature, value = sigma(key[:, :folded], features), value[:, :folded]
        return feature.mT @ value, feature.mT @ (feature / (feature @ normaliser[..., None] + 1e-6))

    def fast(key, *inputs):
        return infini.fold(narrow_sigma(key, features), *inputs)

    compare(fast, slow, (key, value, normaliser), dtype)


@pytest.mark.parametrize(("device", "dtype"), CASES)
@pytest.mark.parametrize(("count", "dim"), [(1, 16), (4, 24), (2, 96)])
def test_chain(count, dim, device, dtype):
    known, added = ((0.2 * draw(2, count, 2, dim, dim)).to(device).requires_grad_() for _ in range(2))

    def slow(known, added):
        matrices = [torch.zeros_like(added[:, 0])]
        for own, more in zip(known.unbind(1), added.unbind(1), strict=True):
            matrices.append(matrices[-1] - own @ matrices[-1] + more)
        return (torch.stack(matrices[1:], dim=1),)

    compare(lambda *inputs: (infini.chain(*inputs),), slow, (known, added), dtype)


@pytest.mark.parametrize(("device", "dtype"), CASES)
@pytest.mark.parametrize(("dim", "features"), [(24, 20), (96, 90), (2, 2)])
def test_features(dim, features, device, dtype):
    x = draw(2, 3, 5, 2, dim).to(device, dtype).transpose(2, 3).requires_grad_()
    compare(lambda x: (narrow_sigma(x, features),), lambda x: (sigma(x, features),), (x,), dtype)
    compare(lambda x: (module._Sigma.apply(x, None),), lambda x: (sigma(x, dim),), (x,), dtype)
    assert narrow_sigma(x, features).stride() == x.stride()  # kernels of heads side by side read them so


@interpreted
@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({}, "plain"),
        ({}, "compiled"),
        ({}, "recomputed"),
        ({"update": "linear"}, "plain"),
        ({"memory_norm": "none", "first_block": "zero"}, "plain"),
        ({"memory_norm": "qk", "detach_every": 2}, "plain"),
    ],
)
def test_a_model_trains_alike(options, way, ids, monkeypatch):
    """Loss and gradients, with queries that share keys, padded heads and a short last block."""
    results = []
    for kernels in (False, True):
        monkeypatch.setattr(module, "supports", lambda geometry, *tensors, answer=kernels: answer)
        model = small_model("infini", head_dim=6, pad_heads=True, memory_layers=[0, 2], memory_options=options)
        model.train()
        if way == "compiled":
            model.compile_blocks(backend="aot_eager")
        if way == "recomputed":
            model.gradient_checkpointing_enable()
        loss = model(ids, labels=ids).loss
        loss.backward()
        results.append((loss, *(parameter.grad for parameter in model.parameters())))
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=2e-5, rtol=1e-4)
    torch._dynamo.reset()


@interpreted
def test_operations_keep_their_promises():
    """Shapes, types and strides of what a compiler is told, for views as layers make them."""
    tokens = draw(1, 3, 40, 2, 6).transpose(2, 3).requires_grad_()
    gate = draw(2).requires_grad_()
    matrix, normaliser = draw(1, 3, 2, 6, 6).requires_grad_(), draw(1, 3, 2, 6).abs().requires_grad_()
    inputs = (tokens.detach().abs().requires_grad_(), tokens, matrix, normaliser, gate, 1, 4, True)
    torch.library.opcheck(infini._mix, inputs)
    torch.library.opcheck(infini._mix_backward, (tokens, *inputs), test_utils=PROMISES)
    known, added = draw(1, 3, 2, 6, 6).requires_grad_(), draw(1, 3, 2, 6, 6).mT.requires_grad_()
    torch.library.opcheck(infini._chain, (known, added))
    torch.library.opcheck(infini._chain_backward, (added, known, known), test_utils=PROMISES)
    keys = draw(1, 2, 20, 2, 6).transpose(2, 3).requires_grad_()
    feature = draw(*keys.shape).abs().requires_grad_()
    for folded in (1, 2):
        inputs = (feature, keys, draw(1, folded, 2, 6).abs().requires_grad_())
        slope = draw(1, folded, 2, 6, 6)
        torch.library.opcheck(infini._fold, inputs)
        torch.library.opcheck(infini._fold_backward, (slope, slope.mT, *inputs), test_utils=PROMISES)


@interpreted
@pytest.mark.parametrize("first_block", ["bypass", "zero"])
def test_plain_code_takes_what_kernels_read(first_block, ids, monkeypatch):
    model = small_model("infini", memory_options={"first_block": first_block})
    plain = model(ids).logits
    monkeypatch.setattr(module, "supports", lambda geometry, *tensors: tensors[0].ndim == 4)  # to read, not to mix
    torch.testing.assert_close(model(ids).logits, plain, atol=2e-5, rtol=1e-4)


@interpreted
@torch.no_grad()
def test_a_prompt_is_read_alike(ids, monkeypatch):
    """Many blocks of a stream at once."""
    monkeypatch.setattr(module, "supports", lambda geometry, *tensors: True)
    model = small_model("infini")
    cache = em.MemoryCache(model)
    pieces = [model(piece, past_key_values=cache).logits for piece in ids.split([3, 37, 5], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_blocks_that_read_nothing_do_not_notice():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    local = draw(1, 2, 1, 8, 16).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    matrix = torch.full((1, 1, 1, 16, 16), torch.inf, device=device)
    normaliser, gate = torch.ones(1, 1, 1, 16, device=device), torch.zeros(1, device=device)
    mixed = infini.mix(narrow_sigma(local, 16), local, matrix, normaliser, gate, 16, True)
    assert torch.equal(mixed[:, 0], local[:, 0]) and mixed[:, 1].isnan().all()


def test_features_of_large_numbers():
    x = torch.tensor([200.0, -200.0, 1e30, -1e30], requires_grad=True)
    feature = narrow_sigma(x, 4)
    assert feature.tolist() == [201.0, 0.0, x[2].item(), 0.0]
    assert torch.autograd.grad(feature.sum(), x)[0].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_they_are_not_needed(ids):
    """Where Triton is not installed, half precision goes the plain way."""
    script = (
        "import sys; sys.modules['triton'] = None; import torch; from tests.conftest import small_model\n"
        "with torch.autocast('cpu', torch.bfloat16): small_model('infini')(torch.ones(1, 40, dtype=torch.long))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("device", "dtype"), CASES)
def test_they_are_checked_before_use(device, dtype, monkeypatch):
    assert module._error(torch.device(device), 16, dtype) < TOLERANCE[dtype]
    monkeypatch.setattr(module, "_error_of", lambda norm, *_: 0.0 if norm == "output" else torch.nan)
    with pytest.warns(UserWarning, match="heads of 96 have a relative error of nan here: PyTorch code is used"):
        assert not module._agrees.__wrapped__(device, 96)
    monkeypatch.setattr(module, "_error", lambda *_: 0.5)
    with pytest.warns(UserWarning, match="heads of 96 have a relative error of 5.0e-01 here: PyTorch code is used"):
        assert not module._agrees.__wrapped__(device, 96)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_bf16_on_a_gpu_goes_this_way(dim):
    geometry = small_model("infini", head_dim=dim).memories[1].geometry
    x = torch.zeros(1, 1, 8, dim, device="cuda")
    assert not module.supports(geometry, x, x) and not module.supports(geometry, x.half(), x.half())
    assert module.supports(geometry, x.bfloat16(), x.bfloat16())
