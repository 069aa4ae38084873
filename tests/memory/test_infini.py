import pytest
import torch

from elastic_memory.memory import Block, Geometry
from elastic_memory.memory.infini import InfiniMemory
from tests.memory.cases import BLOCK, fresh, logits, tokens, with_weights_of
from tests.oracles import infini as oracle
from tests.oracles import parts

GEOMETRY = Geometry(width=32, heads=4, kv_heads=4, head_dim=8, layers=1, block_size=BLOCK)


def heads(blocks, seed=0):
    """Queries, keys and values [batch, head, token, dim] of some blocks, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, 4, blocks * BLOCK, 8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("update", ["delta", "linear"])
def test_an_independent_implementation_agrees(update):
    """infini-transformer-pytorch, with this mapping:

    kv_mem, k_norm there are M, z here; `head_gates` weigh the local part there and the remembered one here, so they
    are the negative of ours; nothing is normalised after reading (memory_norm="none"); denominators are at least 1e-10
    there and larger by 1e-6 here, which double precision shows at the eighth digit.
    """
    peer = pytest.importorskip("infini_transformer_pytorch.infini_transformer", reason="comes with the dev extra")
    ours = InfiniMemory(GEOMETRY, update=update, memory_norm="none")
    theirs = peer.FastweightMemory(heads=4, use_mem_delta_rule=update == "delta")
    gate = torch.tensor([-2.0, -0.5, 0.3, 4.0], dtype=torch.float64)
    ours.gate.data, theirs.head_gates.data = gate, -gate
    query, key, value = heads(5)
    local = value.flip(2)
    readings = ours.read_all(key, value, host=None)
    state, memories = tuple(part.double() for part in ours.start(2)), None
    for block, (q, k, v, out) in enumerate(
        zip(*(x.split(BLOCK, dim=2) for x in (query, key, value, local)), strict=True)
    ):
        if block > 0:
            expected = theirs.retrieve_and_add_to_output(out, q, memories)
            for reading in (state, readings[block - 1]):
                torch.testing.assert_close(reading[0], memories.kv_mem, atol=1e-6, rtol=1e-6)
                torch.testing.assert_close(reading[1], memories.k_norm, atol=1e-6, rtol=1e-6)
                torch.testing.assert_close(ours.mix(out, q, q, reading, None), expected, atol=1e-6, rtol=1e-6)
        memories = peer.Memories(*theirs.create_new_memories(k, v, memories))
        state = ours.write(state, Block(k, v), block * BLOCK)


def test_linear_without_norm_is_linear_attention_over_earlier_blocks():
    """Computed directly, token by token, without any state."""
    memory = InfiniMemory(GEOMETRY, update="linear", memory_norm="none").double()
    torch.nn.init.constant_(memory.gate, torch.inf)  # memory alone
    query, key, value = heads(4)
    readings = memory.read_all(key, value, host=None)
    for block in range(1, 4):
        now = slice(block * BLOCK, (block + 1) * BLOCK)
        q = query[:, :, now]
        mine = memory.mix(torch.zeros_like(q), q, q, readings[block - 1], None)
        weight = oracle.sigma(q) @ oracle.sigma(key[:, :, : block * BLOCK]).mT
        direct = weight / weight.sum(-1, keepdim=True) @ value[:, :, : block * BLOCK]
        torch.testing.assert_close(mine, direct, atol=1e-7, rtol=0)


@pytest.mark.parametrize("options", [{}, {"update": "linear"}, {"memory_norm": "qk"}])
def test_order_inside_an_earlier_block_is_forgotten(options):
    model, ids = fresh("infini", num_hidden_layers=1, memory_options=options), tokens(1, 4 * BLOCK)
    shuffled = ids.clone()
    shuffled[:, :BLOCK] = ids[:, :BLOCK].flip(1)
    before, after = logits(model, ids), logits(model, shuffled)
    assert (before[:, 1:BLOCK] - after[:, 1:BLOCK]).abs().max() > 0.1
    torch.testing.assert_close(before[:, BLOCK:], after[:, BLOCK:], atol=2e-6, rtol=0)
    # Blocks themselves are not exchangeable under the delta rule, so the test can fail.
    if model.memories[0].update == "delta":
        swapped = torch.cat((ids[:, BLOCK : 2 * BLOCK], ids[:, :BLOCK], ids[:, 2 * BLOCK :]), dim=1)
        assert (logits(model, swapped)[:, 2 * BLOCK :] - before[:, 2 * BLOCK :]).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{}, {"first_block": "zero"}, {"memory_norm": "none"}])
def test_closed_gates_are_no_memory(options):
    model = fresh("infini", memory_options=options)
    bare = with_weights_of(fresh("none", seed=3), model)
    ids = tokens()
    assert not torch.equal(logits(model, ids), logits(bare, ids))
    for memory in model.memories.values():
        torch.nn.init.constant_(memory.gate, -torch.inf)
    assert torch.equal(logits(model, ids), logits(bare, ids))


def test_the_delta_rule_of_whole_blocks_halves_and_the_norm_mends_it():
    """Always the same values, stationary keys: the linear rule reads them back, the delta rule half of them."""
    _, key, value = heads(64, seed=1)
    value = value[:, :, :1].expand_as(value)
    read = {}
    for update in ("linear", "delta"):
        memory = InfiniMemory(GEOMETRY, update=update, memory_norm="none").double()
        matrix, normaliser = memory.read_all(key, value, host=None)[-1]
        feature = oracle.sigma(key[:, :, :50])
        remembered = feature @ matrix / (feature @ normaliser[..., None])
        read[update] = ((remembered * value[:, :, :50]).sum() / value[:, :, :50].square().sum()).item()
    assert read["linear"] == pytest.approx(1, abs=1e-6)
    assert read["delta"] == pytest.approx(0.5, abs=0.02)


def test_products_in_bf16_stay_close_and_the_state_wide():
    """The training road under autocast against float64: sums and the loop over blocks are float32."""
    _, key, value = heads(16)
    memory = InfiniMemory(GEOMETRY)
    exact = memory.read_all(key, value, host=None)
    rounded = memory.read_all(key.bfloat16(), value.bfloat16(), host=None)
    for (matrix, normaliser), (about, roughly) in zip(exact, rounded, strict=True):
        assert about.dtype == roughly.dtype == torch.float32
        assert (about - matrix).norm() < 0.01 * matrix.norm()
        assert (roughly - normaliser).norm() < 0.003 * normaliser.norm()


def test_half_precision_does_not_overflow():
    memory = InfiniMemory(GEOMETRY)
    query, key, value = (50 * heads(64)).half()
    readings = memory.read_all(key, value, host=None)
    last = slice(-BLOCK, None)
    mixed = memory.mix(value[:, :, last], query[:, :, last], query[:, :, last], readings[-1], None)
    assert readings[-1][0].abs().max() > torch.finfo(torch.half).max
    assert mixed.dtype == torch.half and mixed.isfinite().all()


def test_the_oracles_sigma_is_elu_plus_one():
    x = torch.linspace(-20, 20, 101, dtype=torch.float64)
    torch.testing.assert_close(oracle.sigma(x), torch.nn.functional.elu(x) + 1)
    assert parts.rms(x).square().mean() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update": "hebb"}, "update='hebb': give one of delta, linear"),
        ({"memory_norm": True}, "memory_norm=True: give one of output, qk, none"),
        ({"first_block": "zeros"}, "first_block='zeros': give one of bypass, zero"),
        ({"order": 7}, "no option 'order'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fresh("infini", memory_options=options)
