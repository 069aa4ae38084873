"""LongPPL against the released package, on real text and random models."""

import json
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_memory.data import load_tokenizer
from elastic_memory.evaluation import Settings, longppl
from elastic_memory.evaluation.longppl import KeyTokens
from elastic_memory.evaluation.spans import decode, encode, inside, locate, merge
from tests.evaluation.conftest import TEXT, llama

module = import_module("elastic_memory.evaluation.longppl")

released = pytest.importorskip("longppl.longppl", reason="comes with the dev extra")
cal_overlap, compute_longppl = released.cal_overlap, released.compute_longppl
find_key_token, merge_intervals = released.find_key_token, released.merge_intervals

MODEL, REFERENCE = llama(400, seed=1), llama(700, seed=2)


@pytest.mark.parametrize(
    ("trunc_len", "sliding_window", "alpha", "beta"),
    [(64, 16, 0.5, -12.0), (100, 38, 2.0, -20.0), (17, 5, 1.0, -6.0), (150, 60, 0.3, -20.0)],
)
@pytest.mark.parametrize("start", [0, 31_000, len(TEXT) - 1500])
def test_equals_the_package(small_tokenizer, large_tokenizer, start, trunc_len, sliding_window, alpha, beta):
    text = TEXT[start : start + 1500]
    while (len(large_tokenizer(text)["input_ids"]) - trunc_len) % sliding_window == 1:
        text = text[:-1]  # the package cannot compute a last window of a single token
    settings = {"trunc_len": trunc_len, "sliding_window": sliding_window, "alpha": alpha, "beta": beta}
    theirs = compute_longppl(text, MODEL, REFERENCE, small_tokenizer, large_tokenizer, **settings)
    ours = longppl(MODEL, small_tokenizer, [text], REFERENCE, large_tokenizer, **settings)

    assert ours.key_tokens == theirs["n_key_token"] > 0
    assert ours.longppl == pytest.approx(theirs["longppl"], rel=1e-5)
    assert ours.ppl == pytest.approx(theirs["ppl"], rel=1e-5)
    assert ours.tokens + 1 == theirs["n_token"]
    intervals = find_key_token(text, REFERENCE, large_tokenizer, trunc_len, sliding_window, alpha=alpha, beta=beta)
    offsets = small_tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert ours.keys == [[i + 1 for i in cal_overlap(offsets, intervals.tolist())]]


def test_several_texts_are_pooled_by_their_key_tokens(small_tokenizer, large_tokenizer):
    texts = [TEXT[:1200], TEXT[5000:7000]]
    settings = {"trunc_len": 50, "sliding_window": 20, "alpha": 1.0, "beta": -10.0}
    single = [longppl(MODEL, small_tokenizer, [text], REFERENCE, large_tokenizer, **settings) for text in texts]
    pooled = longppl(MODEL, small_tokenizer, texts, REFERENCE, large_tokenizer, **settings)
    weights = [one.key_tokens for one in single]
    assert np.log(pooled.longppl) == pytest.approx(np.average([np.log(one.longppl) for one in single], weights=weights))
    assert pooled.interval[0] <= pooled.longppl <= pooled.interval[1]


def test_tokenizers_of_our_data_are_taken_too(large_tokenizer, tmp_path):
    """`load_tokenizer` of a folder, and `bytes`, whose characters take up to four tokens."""
    text = TEXT[:1200] + " \u03b1\u2264\U0001d53c " * 20
    settings = {"trunc_len": 50, "sliding_window": 20, "alpha": 1.0, "beta": -10.0}
    large_tokenizer.save_pretrained(tmp_path)
    reference_tokenizer = load_tokenizer(str(tmp_path))
    found = longppl(MODEL, load_tokenizer("bytes"), [text], REFERENCE, reference_tokenizer, **settings)
    assert found.tokens + 1 == len(text.encode()) and found.key_tokens > 0
    listed, covered = encode(large_tokenizer, text, special=True)
    marked = [covered[i] for i in module.key_positions(REFERENCE, torch.tensor(listed), Settings(**settings))]
    ends = np.cumsum([len(one.encode()) for one in text])
    within = [character for start, end in merge(marked) for character in range(start, end)]
    expected = [i for c in within for i in range(ends[c] - len(text[c].encode()), ends[c])]
    assert found.keys == [[i for i in expected if i > 0]]


def test_rows_of_ids_are_never_tokenised_again(small_tokenizer, large_tokenizer):
    # One byte per token: text that the tokenizer itself would never cut like this.
    listed = [i for c in TEXT[-800:] for i in small_tokenizer(c, add_special_tokens=False)["input_ids"]]
    ids = torch.tensor(listed)
    assert small_tokenizer(small_tokenizer.decode(ids), add_special_tokens=False)["input_ids"] != listed
    settings = {"trunc_len": 40, "sliding_window": 30, "alpha": 1.0, "beta": -12.0}
    result = longppl(MODEL, small_tokenizer, [{"input_ids": ids}], REFERENCE, large_tokenizer, **settings)
    assert result.tokens == len(ids) - 1

    intervals = find_key_token(TEXT[-800:], REFERENCE, large_tokenizer, **{k: settings[k] for k in settings})
    _, spans = locate(small_tokenizer, listed)
    assert result.keys == [[i + 1 for i in cal_overlap(spans, intervals.tolist())]]


def test_a_reference_without_tokenizer_reads_the_same_tokens(small_tokenizer):
    ids = torch.tensor(encode(small_tokenizer, TEXT[:2000], special=False)[0])
    settings = {"trunc_len": 60, "sliding_window": 25, "alpha": 1.0, "beta": -12.0}
    reference = llama(400, seed=3)
    shared = longppl(MODEL, None, [ids], reference, **settings)
    spelled = longppl(MODEL, small_tokenizer, [TEXT[:2000]], reference, small_tokenizer, **settings)
    assert shared.keys == spelled.keys
    assert shared.longppl == spelled.longppl


def test_key_tokens_are_computed_once(small_tokenizer, large_tokenizer, tmp_path, monkeypatch):
    settings = {"trunc_len": 64, "sliding_window": 16, "alpha": 0.5, "beta": -12.0, "cache": tmp_path}
    arguments = (MODEL, small_tokenizer, [TEXT[:1500]], REFERENCE, large_tokenizer)
    first = longppl(*arguments, **settings)
    (file,) = tmp_path.iterdir()
    assert {"text", "weights", "reference", "alpha", "keys"} <= set(json.loads(file.read_text()))

    monkeypatch.setattr(KeyTokens, "_search", None)  # a second search would fail
    assert longppl(*arguments, **settings) == first
    with pytest.raises(TypeError):
        longppl(*arguments, **{**settings, "alpha": 0.6})
    with pytest.raises(TypeError):
        longppl(*arguments[:3], llama(700, seed=9), large_tokenizer, **settings)


def test_key_tokens_found_ahead_are_named_by_the_precision_they_were_found_in(small_tokenizer, tmp_path, monkeypatch):
    class OnThisDevice(torch.autocast):  # as on a GPU
        def __init__(self, kind, dtype, enabled):
            super().__init__(kind, dtype)

    monkeypatch.setattr(module.torch, "autocast", OnThisDevice)
    monkeypatch.setattr(module, "reference_for", lambda *_: (llama(512, seed=1), None))
    rows = torch.randint(0, 512, (1, 64))
    module.key_tokens("reference", small_tokenizer, rows, Settings(trunc_len=32, sliding_window=16), tmp_path)
    (found,) = tmp_path.iterdir()
    assert json.loads(found.read_text())["precision"] == "torch.bfloat16"


def test_no_key_tokens_is_said_and_not_divided_by(small_tokenizer, large_tokenizer):
    with pytest.warns(UserWarning, match="no key tokens"):
        result = longppl(MODEL, small_tokenizer, [TEXT[:900]], REFERENCE, large_tokenizer, 50, 20, alpha=1e9)
    assert result.longppl is None and result.key_tokens == 0 and result.ppl > 1
    assert "no key tokens" in str(result)


def test_texts_that_are_too_short_are_refused(small_tokenizer, large_tokenizer):
    with pytest.raises(ValueError, match="longer than trunc_len = 4096"):
        longppl(MODEL, small_tokenizer, [TEXT[:900]], REFERENCE, large_tokenizer)
    with pytest.raises(ValueError, match="reference_tokenizer"):
        longppl(REFERENCE, None, [torch.full((90,), 699)], MODEL, trunc_len=10)
    with pytest.raises(ValueError, match="tokenizer: pass it as tokenizer"):
        longppl(MODEL, None, [TEXT[:900]], REFERENCE)
    with pytest.raises(ValueError, match="sliding_window=0"):
        longppl(MODEL, None, [torch.zeros(9)], MODEL, sliding_window=0)


def test_scaled_settings_keep_the_released_proportions():
    assert Settings.scaled(32_768) == Settings() == Settings.scaled(1_000_000)
    assert (Settings.scaled(8192).trunc_len, Settings.scaled(8192).sliding_window) == (1024, 256)


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), max_size=25).map(
    lambda pairs: sorted((start, start + width) for start, width in pairs)
)


@given(tokens=spans, marked=spans)
def test_span_arithmetic_equals_the_packages(tokens, marked):
    disjoint = [span for i, span in enumerate(marked) if i == 0 or span[0] >= marked[i - 1][1]]
    disjoint = [span for i, span in enumerate(disjoint) if all(span[0] >= other[1] for other in disjoint[:i])]
    intervals = merge_intervals(torch.tensor(disjoint, dtype=torch.long).reshape(-1, 2)).tolist()
    assert [list(span) for span in merge(disjoint)] == intervals
    ordered = sorted(tokens, key=lambda span: (span[0], span[1]))
    assert inside(ordered, merge(disjoint)) == [i + 1 for i in cal_overlap(ordered, intervals)]


@given(text=st.text(max_size=60), cut=st.booleans())
def test_decoding_finds_the_characters_of_each_token(small_tokenizer, text, cut):
    pieces = text if cut else [text]
    encoded = [encode(small_tokenizer, piece, special=False) for piece in pieces]
    ids = [i for part, _ in encoded for i in part]
    decoded, found = decode(small_tokenizer, ids)
    assert decoded == text
    if not cut:
        assert all(a <= start and end <= b for (a, b), (start, end) in zip(found, encoded[0][1], strict=True))
        assert not text.isascii() or found == encoded[0][1]


def test_a_tokenizer_without_offsets_is_served_by_decoding(small_tokenizer, large_tokenizer):
    class Slow:
        is_fast = False
        all_special_ids = small_tokenizer.all_special_ids
        decode = staticmethod(small_tokenizer.decode)

        def __call__(self, text, **options):
            return small_tokenizer(text, **options)

    text = TEXT[2000:3500]
    settings = {"trunc_len": 64, "sliding_window": 16, "alpha": 0.5, "beta": -12.0}
    fast = longppl(MODEL, small_tokenizer, [text], REFERENCE, large_tokenizer, **settings)
    assert longppl(MODEL, Slow(), [text], REFERENCE, large_tokenizer, **settings) == fast

    Slow.decode = staticmethod(lambda *args, **options: small_tokenizer.decode(*args, **options).lower())
    with pytest.raises(ValueError, match="fast version"):
        longppl(MODEL, Slow(), [text], REFERENCE, large_tokenizer, **settings)


def test_one_text_is_no_list_of_texts():
    """Each of its letters would be a text."""
    with pytest.raises(ValueError, match=r"texts is one string: give a list of texts, such as \[text\]"):
        longppl(None, None, "a long text", reference=None)
