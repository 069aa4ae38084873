"""`generate` by captured steps, here on the CPU, where a step is not recorded but all else is the same."""

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import elastic_memory as em
from elastic_memory.fast import decoder, generation
from elastic_memory.memory import MEMORIES
from tests.conftest import small_model

LONG = dict(max_new_tokens=25, pad_token_id=0, eos_token_id=None)


class Heard(BaseStreamer):
    """Keeps what it hears; may fail at some token."""

    def __init__(self, fails_at=None):
        self.heard, self.ended, self.fails_at = [], False, fails_at

    def put(self, value):
        if self.fails_at == len(self.heard):
            raise KeyboardInterrupt
        self.heard.append(value.tolist())

    def end(self):
        self.ended = True


@pytest.fixture
def both(monkeypatch):
    """Generates with and without captured steps, and gives both results."""
    fast, served = generation.sample, []
    monkeypatch.setattr(generation, "sample", lambda *args: served.append(1) or fast(*args))

    def run(model, ids, served_fast=True, **options):
        results = []
        for devices in ((), ("cpu",)):
            monkeypatch.setattr(generation, "DEVICES", devices)
            torch.manual_seed(5)
            served.clear()
            results.append(model.generate(ids, **{k: v() if callable(v) else v for k, v in options.items()}))
            assert bool(served) == (served_fast and bool(devices))
        return results

    return run


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}])
def test_the_same_tokens(memory, options, ids, both):
    model = small_model(memory)
    plain, fast = both(model, ids, **LONG, **options)
    assert torch.equal(plain, fast) and fast.shape == (2, 45 + 25)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    plain, fast = both(model, ids, attention_mask=mask, num_return_sequences=2 if options["do_sample"] else 1,
                       **LONG, **options)  # fmt: skip
    assert torch.equal(plain, fast)


def test_rows_end_at_their_own_time(model, ids, both):
    longest = model.generate(ids, do_sample=False, **LONG)[:, 45:]
    end = longest[0, 7].item()
    options = LONG | {"eos_token_id": end}
    plain, fast = both(model, ids, do_sample=False, **options)
    assert torch.equal(plain, fast)


class Sum(StoppingCriteria):
    """Ends a row whose newest token is even and not its first: something that no graph knows."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] % 2 == 0) & (input_ids.shape[1] > 48)


def test_criteria_processors_and_streamers_are_served(model, ids, both):
    options = LONG | {
        "stopping_criteria": lambda: StoppingCriteriaList([Sum()]),
        "repetition_penalty": 1.3,
        "do_sample": False,
    }
    plain, fast = both(model, ids, **options)
    assert torch.equal(plain, fast)
    heard = []
    for _ in both(model, ids[:1], streamer=lambda: heard.append(Heard()) or heard[-1], do_sample=False, **LONG):
        pass
    assert heard[0].heard == heard[1].heard and heard[0].ended and heard[1].ended and len(heard[1].heard) == 26


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 11, 12])
def test_a_cache_has_read_the_same(tokens, model, ids, both):
    """All but the last token, also where a block ends; its own kind of decoding stays."""
    caches = []
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    both(model, ids, past_key_values=lambda: caches.append(em.MemoryCache(model)) or caches[-1], **options)
    plain, fast = caches
    assert plain.clock == fast.clock == [45 + tokens - 1] * 2 and plain.columns == fast.columns and not fast.static
    following = ids[:, :9]
    with torch.no_grad():
        torch.testing.assert_close(
            model(following, past_key_values=fast).logits, model(following, past_key_values=plain).logits,
            atol=1e-4, rtol=0,
        )  # fmt: skip


@pytest.mark.parametrize("fails_at", [1, 3, 4, 5])
def test_an_interrupted_cache_has_read_what_was_heard(fails_at, model, ids, monkeypatch):
    monkeypatch.setattr(generation, "DEVICES", ("cpu",))
    cache, streamer = em.MemoryCache(model), Heard(fails_at)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids[:1], past_key_values=cache, streamer=streamer, do_sample=False, **LONG)
    heard = [token for tokens in streamer.heard[1:] for token in tokens]
    assert cache.clock == [45 + len(heard)]
    with torch.no_grad():
        after = model(ids[:1, :1], past_key_values=cache).logits
        whole = torch.cat((ids[:1], torch.tensor([heard], dtype=torch.long), ids[:1, :1]), dim=1)
        torch.testing.assert_close(after[:, -1], model(whole).logits[:, -1], atol=1e-4, rtol=0)


def test_a_dict_is_returned_if_asked_for(model, ids, both):
    plain, fast = both(model, ids, return_dict_in_generate=True, do_sample=False, **LONG)
    assert torch.equal(plain.sequences, fast.sequences) and fast.past_key_values.clock == plain.past_key_values.clock


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores was asked for"),
        ({"use_cache": False}, "there is no cache"),
    ],
)
def test_what_it_cannot_serve_is_done_all_the_same_and_logged(options, reason, model, ids, both, caplog):
    generation._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "elastic_memory"):
        plain, fast = both(model, ids, served_fast=False, do_sample=False, **LONG, **options)
    plain, fast = (getattr(result, "sequences", result) for result in (plain, fast))
    assert torch.equal(plain, fast) and reason in caplog.text


def test_hooks_foreign_modules_and_probes_are_not_passed_by(model, ids, both, caplog):
    generation._say_once.cache_clear()
    layer = model.base_model.layers[0]
    calls = []
    handle = layer.mlp.register_forward_hook(lambda *_: calls.append(1))
    both(model, ids, served_fast=False, do_sample=False, **LONG)
    assert len(calls) >= 2 * 25 and "layers.0.mlp has hooks" in caplog.text
    handle.remove()

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    layer.mlp.up_proj.__class__ = Doubled
    both(model, ids, served_fast=False, do_sample=False, **LONG)
    assert "layers.0.mlp.up_proj is a Doubled of tests.fast.test_generation" in caplog.text


def test_the_next_call_finds_the_decoders_of_the_last(model, ids, monkeypatch):
    monkeypatch.setattr(generation, "DEVICES", ("cpu",))
    made, init = [], decoder.Decoder.__init__
    monkeypatch.setattr(decoder.Decoder, "__init__", lambda self, *args: made.append(1) or init(self, *args))
    first = model.generate(ids, do_sample=False, **LONG)
    before = len(made)
    assert before > 0
    assert torch.equal(model.generate(ids, do_sample=False, **LONG), first) and len(made) == before
    kept = em.MemoryCache(model)
    model.generate(ids, past_key_values=kept, do_sample=False, **LONG)
    used = kept.decoder
    model.generate(ids, do_sample=False, **LONG)  # while `kept` lives, nobody else writes into its buffers
    assert used.cache() is kept
    for rows in range(1, 9):
        model.generate(ids[:1].expand(rows, -1), do_sample=False, **LONG)
    idle = [one for one in decoder.DECODERS[model.base_model] if one.cache() is None]
    assert len(idle) <= decoder.IDLE + 1 and used in decoder.DECODERS[model.base_model]


def test_tokens_are_awaited_on_the_device_that_chose_them(monkeypatch):
    """Without a stream, an event is recorded on the current device, where nothing is copied: stale tokens are read."""
    waited = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: device)
    message = generation._Message(torch.zeros(2, 3, dtype=torch.long))
    message.arrived = SimpleNamespace(record=lambda stream=None: waited.append(stream), synchronize=lambda: None)
    message.send(torch.tensor([5, 6]), torch.tensor([0, 1]))
    assert waited == [torch.device("cpu")]
    tokens, more = message.receive()
    assert tokens.tolist() == [5, 6] and more


def test_models_are_not_kept_alive(ids, monkeypatch):
    import gc
    import weakref

    monkeypatch.setattr(generation, "DEVICES", ("cpu",))
    model = small_model("elastic")
    model.generate(ids, do_sample=False, **LONG)
    gone = weakref.ref(model.base_model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("memory", MEMORIES)
def test_long_prompts_are_read_in_parallel_and_the_tokens_are_the_same(memory, monkeypatch):
    model = small_model(memory)
    prompt = torch.randint(1, 61, (2, 101), generator=torch.Generator().manual_seed(1))
    fast = model.generate(prompt, do_sample=False, **LONG)
    monkeypatch.setattr(em.MemoryCache, "read_ahead", lambda self, ids: 0)
    assert torch.equal(model.generate(prompt, do_sample=False, **LONG), fast)
