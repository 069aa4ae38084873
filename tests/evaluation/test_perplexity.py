"""Perplexity: every protocol against a dense float64 oracle, and the identities between protocols."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import elastic_memory as em
from elastic_memory.evaluation import perplexity
from elastic_memory.evaluation.inputs import Spread
from elastic_memory.evaluation.journal import Journal, bootstrap
from elastic_memory.evaluation.losses import streamed_losses, whole_losses
from elastic_memory.memory import MEMORIES
from tests.evaluation.conftest import llama, model_with, rows_of
from tests.oracles import ppl as oracle

LLAMA = llama()


@pytest.mark.parametrize("model", [LLAMA, *(pytest.param(name, id=name) for name in MEMORIES)], ids=lambda m: "llama")
def test_p0_equals_a_dense_float64_oracle(model):
    model = model_with(model) if isinstance(model, str) else model
    rows = rows_of(45, 45, 40, 2)
    losses = [oracle.token_losses(model, row) for row in rows]
    result = perplexity(model, rows, batch_size=2)
    assert result.ppl == pytest.approx(oracle.ppl([x for row in losses for x in row]), rel=1e-6)
    assert result.nll == pytest.approx(math.log(result.ppl), rel=1e-12)
    assert result.tokens == 44 + 44 + 39 + 1


def test_ppl_by_block_and_position_belong_to_the_predicting_position():
    model, rows = model_with(), rows_of(29, 45)
    losses = [oracle.token_losses(model, row) for row in rows]
    result = perplexity(model, rows)
    assert len(result.by_block) == 6 and len(result.by_position) == 8
    for block, value in enumerate(result.by_block):
        assert value == pytest.approx(
            oracle.ppl([x for row in losses for x in row[block * 8 : block * 8 + 8]]), rel=1e-5
        )
    for position, value in enumerate(result.by_position):
        assert value == pytest.approx(oracle.ppl([x for row in losses for x in row[position::8]]), rel=1e-5)


@settings(max_examples=15)
@given(length=st.integers(2, 40), window=st.integers(2, 16), data=st.data())
def test_windows_equal_the_obvious_loop(length, window, data):
    stride = data.draw(st.integers(1, window))
    (row,) = rows_of(length, seed=length)
    result = perplexity(LLAMA, [row], "P1", block_size=window, stride=stride)
    assert result.ppl == pytest.approx(oracle.ppl(oracle.windowed_losses(LLAMA, row, window, stride)), rel=1e-6)
    assert result.tokens == length - 1


@pytest.mark.parametrize("memory", [name for name in MEMORIES if name != "none"])
def test_block_0_has_no_memory_and_later_blocks_have(memory):
    model, rows = model_with(memory), rows_of(45, 45)
    carried, reset = perplexity(model, rows), perplexity(model, rows, "P4")
    assert carried.by_block[0] == reset.by_block[0]
    assert all(abs(a - b) > 1e-4 for a, b in zip(carried.by_block[1:], reset.by_block[1:], strict=True))


def test_without_memory_forgetting_changes_nothing():
    model, rows = model_with("none"), rows_of(45, 45, 33)
    carried, reset = (perplexity(model, rows, protocol, batch_size=2) for protocol in ("P0", "P4"))
    assert carried.nll == reset.nll
    assert carried.by_block == reset.by_block and carried.by_position == reset.by_position


def test_windows_that_do_not_overlap_are_p4():
    rows = rows_of(45, 20)
    assert perplexity(LLAMA, rows, "P1", block_size=8, stride=8).nll == perplexity(LLAMA, rows, "P4", block_size=8).nll


@pytest.mark.parametrize("protocol", ["P0", "P1", "P4"])
def test_batches_and_kinds_of_rows_do_not_matter(protocol):
    model, rows = model_with(), rows_of(45, 45, 45, 30, 30, 45)
    one = perplexity(model, rows, protocol)
    kinds = [
        rows[0],
        {"input_ids": rows[1]},
        rows[2].numpy(),
        rows[3].tolist(),
        {"input_ids": rows[4].numpy()},
        rows[5],
    ]
    assert perplexity(model, kinds, protocol, batch_size=4).nll == pytest.approx(one.nll, rel=1e-6)


def test_the_protocol_is_on_every_number():
    model = model_with()
    one = str(perplexity(model, rows_of(45, 45)))
    assert one.startswith("PPL[P0, L=8, T=45, reset=sample, n=44 x 2] = ")
    mixed = perplexity(model, rows_of(45, 30), "P1", stride=3)
    assert mixed.protocol == "P1, L=8, stride=3, T=30..45, reset=window, n=73"
    assert perplexity(model, rows_of(45), "P4").protocol == "P4, L=8, T=45, reset=block, n=44 x 1"


def test_no_call_is_longer_than_a_block_and_the_mode_is_restored():
    model, lengths = model_with().train(), []
    model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    perplexity(model, rows_of(100))
    assert max(lengths) == 8 and sum(lengths) == 99
    assert model.training


def test_streaming_keeps_no_graph():
    model, states = model_with(), []
    model.register_forward_hook(lambda module, args, output: states.append(output.past_key_values.streams[2].state[0]))
    perplexity(model, rows_of(45))
    assert len(states) == 6 and not any(state.requires_grad for state in states)


def test_a_model_without_a_cache_is_called_once_with_everything():
    class NoCache(torch.nn.Module):
        config = LLAMA.config

        def __init__(self):
            super().__init__()
            self.inner = LLAMA

        def forward(self, ids, use_cache=None, **kwargs):
            output = self.inner(ids, use_cache=False)
            output.past_key_values = None
            return output

    rows = rows_of(45, 30)
    assert perplexity(NoCache(), rows, block_size=8).nll == pytest.approx(perplexity(LLAMA, rows).nll, rel=1e-6)


def test_retrieval_can_be_changed_before_an_evaluation():
    model, rows = model_with(), rows_of(45)
    before = perplexity(model, rows)
    model.set_retrieval(sampling="uniform", points=7, order=20)
    after = perplexity(model, rows)
    assert after.by_block[0] == before.by_block[0] and after.nll != before.nll
    assert after.ppl == pytest.approx(oracle.ppl(oracle.token_losses(model, rows[0])), rel=1e-6)


def test_an_attached_model_is_streamed_in_its_own_blocks():
    model = em.attach_memory(llama(), layers=[1], order=9, points=4, block_size=16)
    rows = rows_of(60)
    result = perplexity(model, rows)
    assert len(result.by_block) == 4
    assert result.ppl == pytest.approx(oracle.ppl(oracle.token_losses(model, rows[0])), rel=1e-6)


class StopError(Exception):
    pass


@given(stop=st.integers(1, 5), torn=st.integers(0, 30))
@settings(max_examples=10)
def test_an_interrupted_evaluation_goes_on_after_the_last_whole_line(tmp_path_factory, stop, torn):
    folder, model, rows = tmp_path_factory.mktemp("journal"), model_with(), rows_of(20, 20, 30, 20, 20, 20)
    whole = perplexity(model, rows)

    def interrupt(count):
        interrupt.seen += count
        if interrupt.seen >= stop:
            raise StopError

    interrupt.seen = 0
    journal = Journal(folder, data="d")
    with pytest.raises(StopError):
        perplexity(model, rows, journal=journal, advance=interrupt)
    lines = journal.path.read_bytes()
    journal.path.write_bytes(lines[: len(lines) - torn] if torn else lines + b'{"row": 9')

    again = Journal(folder, data="d")
    assert 0 < len(again.done) + (torn > 0) <= stop
    calls = []
    assert perplexity(model, rows, journal=again, advance=calls.append) == whole
    assert sum(calls) == len(rows)
    assert len(Journal(folder, data="d").done) == len(rows)
    assert not Journal(folder, data="other").done


def test_bootstrap_draws_documents_not_rows():
    losses, counts = np.array([10.0, 30.0, 22.0, 18.0]), np.full(4, 10)
    assert bootstrap(losses, counts, ["a"] * 4) is None
    low, high = bootstrap(losses, counts, ["a", "a", "b", "b"])  # both documents have the mean 2
    assert low == pytest.approx(math.exp(2)) == pytest.approx(high)
    low, high = bootstrap(losses, counts, list("abcd"))
    assert low < math.exp(2) < high


def test_bootstrap_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        losses, counts = random.normal(2.0, 0.3, 60) * 100, np.full(60, 100)
        low, high = bootstrap(losses, counts, list(range(60)), draws=400)
        covered += low <= math.exp(2.0) <= high
    assert 175 <= covered <= 199


def test_a_spread_of_rows_keeps_their_documents():
    class Rows(list):
        def document(self, index):
            return index // 10

    spread = Spread(Rows(range(100)), 5)
    assert [spread[i] for i in range(len(spread))] == [0, 20, 40, 60, 80]
    assert [spread.document(i) for i in range(5)] == ["0", "2", "4", "6", "8"]
    assert len(Spread(Rows(range(3)), 5)) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: perplexity(model, rows_of(9), "P7"), "'P7': known: P0, P1, P4"),
        (lambda model: perplexity(model, []), "no rows"),
        (lambda model: perplexity(model, rows_of(9, 1)), "row 1 has 1 tokens"),
        (lambda model: perplexity(model, [torch.tensor([1, 61])]), "row 0: token ids from 1 to 61.*0 to 60"),
        (lambda model: perplexity(model, rows_of(9), "P1", stride=9), "stride 9: a window of 8"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(model_with())


def test_a_broken_model_is_named_not_averaged():
    model = model_with()
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(ValueError, match="row 0: the loss of token 1 is nan"):
        perplexity(model, rows_of(20))


@pytest.mark.slow
def test_a_million_tokens_in_constant_memory():
    import psutil

    torch.manual_seed(0)
    model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny", block_size=512)).eval()
    (row,) = rows_of(1_000_000, vocabulary=512)
    perplexity(model, [row[:20_000]])
    used, before = [], psutil.Process().memory_info().rss
    counted = iter(range(10**9))

    def watch(*_):
        if next(counted) % 100 == 0:
            used.append(psutil.Process().memory_info().rss)

    model.register_forward_pre_hook(watch)
    result = perplexity(model, [row])
    assert result.tokens == 999_999 and math.isfinite(result.ppl)
    # What grows is one float per token; all logits would be 2 GB, all keys and values 1 GB.
    assert max(used) - before < 64 * 2**20


@pytest.mark.parametrize("model", [LLAMA, "none", "elastic", "melodi"], ids=["llama", "none", "elastic", "melodi"])
def test_rows_read_at_once_have_the_losses_of_a_stream(model):
    model = model_with(model) if isinstance(model, str) else model
    ids = torch.stack(rows_of(45, 45))
    torch.testing.assert_close(whole_losses(model, ids), streamed_losses(model, ids, 5), atol=1e-4, rtol=1e-4)
