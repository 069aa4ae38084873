import hashlib
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic_memory.data import tokenizers as module
from elastic_memory.data.tokenizers import Skip, encode, load_tokenizer, pieces, tokenizer_hash
from tests.data.conftest import KINDS

WORDS = ["the", "cat", "theory", "a", "aaaa", "--------", "<s>", "</s>", "x+=1", ".", "'s"]
WORDS += ["▁", "naïve", "漢字", "🙂", "e\u0301", "ﬁ"]
SPACES = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "    ", "\u00a0", ""]
texts = st.lists(st.sampled_from(WORDS + SPACES) | st.text(max_size=3), min_size=60, max_size=150).map("".join)
kinds = pytest.mark.parametrize("kind", [*KINDS, "bytes"])


def in_pieces(chunks, tokenizer):
    return [encode(piece, tokenizer) for piece in pieces(chunks, tokenizer)]


@kinds
@given(text=texts)
@example(text="▁ the cat " * 40)
@example(text=" the cat the cat" * 20)
def test_pieces_put_together_equal_the_whole(kind, text, tokenizers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 20)
        parts = in_pieces([text], tokenizers[kind])
    assert np.concatenate([*parts, []]).tolist() == tokenizers[kind].encode(text).tolist()


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind != "crossing"), "bytes"])
def test_long_texts_are_really_cut(kind, tokenizers):
    text = "the cat sat on the mat, and the dog sat by the door.\n" * 1000
    parts = in_pieces([text], tokenizers[kind])
    assert len(parts) >= len(text) // (2 * module.PIECE)
    assert np.concatenate([*parts, []]).tolist() == tokenizers[kind].encode(text).tolist()


def test_white_space_inside_a_token_is_no_place_to_cut(tokenizers):
    assert not tokenizers["crossing"].breaks.search("the cat")
    assert tokenizers["sentencepiece"].breaks.search("the cat")


@given(text=texts, places=st.lists(st.integers(0, 300)))
def test_pieces_do_not_depend_on_how_a_text_is_read(text, places, tokenizers):
    edges = sorted({0, len(text), *(min(place, len(text)) for place in places)})
    chunks = [text[start:stop] for start, stop in pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 20)
        assert list(pieces(chunks, tokenizers["sentencepiece"])) == list(pieces([text], tokenizers["sentencepiece"]))


def test_a_text_without_white_space_is_skipped_however_it_is_read(tokenizers):
    for text in ("a" * (module.UNBROKEN + 1), "a " * 9000 + "b" * (module.UNBROKEN + 1) + " c" * 9000):
        for size in (1 << 30, 100_000):
            chunks = [text[at : at + size] for at in range(0, len(text), size)]
            with pytest.raises(Skip, match="no place to cut"):
                list(pieces(chunks, tokenizers["bytes"]))
    (whole,) = in_pieces(["a" * module.UNBROKEN], tokenizers["bytes"])
    assert len(whole) == module.UNBROKEN


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level", "wordpiece"])
def test_special_tokens_written_in_a_text_are_ordinary_text(kind, tokenizers):
    special = {tokenizers[kind].tokenizer.bos_token_id, tokenizers[kind].tokenizer.eos_token_id}
    assert not special & set(tokenizers[kind].encode("the <s> cat </s> sat").tolist())


@kinds
@given(text=texts)
def test_no_text_has_more_tokens_than_promised(kind, text, tokenizers):
    most = tokenizers[kind].most_tokens(len(text.encode()))
    assert most is None or len(tokenizers[kind].encode(text)) <= most


def test_only_normalisers_that_may_lengthen_a_text_withhold_the_promise(tokenizers):
    without = {kind for kind, tokenizer in tokenizers.items() if tokenizer.most_tokens(10) is None}
    assert without == {"unigram", "wordpiece"}


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level", "unigram", "bytes"])
def test_decoding_gives_the_text_back(kind, tokenizers):
    text = "the cat sat on the mat"
    assert tokenizers[kind].decode(tokenizers[kind].encode(text)).strip() == text


def test_the_hash_follows_what_a_tokenizer_does_not_where_it_is(tokenizers, tmp_path):
    for kind, tokenizer in tokenizers.items():
        tokenizer.save(tmp_path / kind)
        assert load_tokenizer(tmp_path / kind).sha256 == tokenizer.sha256
    assert len({tokenizer.sha256 for tokenizer in tokenizers.values()}) == len(tokenizers)
    changed = load_tokenizer(tmp_path / "byte-level").tokenizer
    changed.add_tokens(["elastic"])
    changed.save_pretrained(tmp_path / "changed")
    assert load_tokenizer(tmp_path / "changed").sha256 != tokenizers["byte-level"].sha256


def changed(folder, to, change):
    """A copy of a tokenizer's folder, its tokenizer.json changed."""
    shutil.copytree(folder, to)
    settings = json.loads((to / "tokenizer.json").read_text())
    change(settings)
    (to / "tokenizer.json").write_text(json.dumps(settings))
    return load_tokenizer(to)


CHANGES = {
    "merges": lambda settings: settings["model"].update(merges=settings["model"]["merges"][::-1]),
    "last merge": lambda settings: settings["model"]["merges"].pop(),
    "normaliser": lambda settings: settings.update(normalizer={"type": "Lowercase"}),
    "pre-tokeniser": lambda settings: settings["pre_tokenizer"].update(use_regex=False),
    "decoder": lambda settings: settings.update(decoder={"type": "Fuse"}),
    "an added token": lambda settings: settings["added_tokens"][0].update(lstrip=True),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_hash_covers_all_of_a_tokenizer(what, tokenizers, tokenizer_folders, tmp_path):
    other = changed(tokenizer_folders["byte-level"], tmp_path / "changed", CHANGES[what])
    assert other.sha256 != tokenizers["byte-level"].sha256
    assert not other.known_as(tokenizers["byte-level"].sha256)


def test_padding_and_truncation_do_not_change_the_hash(tokenizers, tokenizer_folders):
    loaded = load_tokenizer(tokenizer_folders["byte-level"]).tokenizer
    loaded("the cat sat on the mat", max_length=3, truncation=True)
    loaded.backend_tokenizer.enable_padding(length=30)
    assert tokenizer_hash(loaded) == tokenizers["byte-level"].sha256


def test_a_tokenizer_is_known_by_its_hash_of_before_too(tokenizers):
    """Rows and models made before merges counted are still of use."""
    tokenizer = tokenizers["byte-level"].tokenizer
    probe = "Elastic  memory: naïve café, 12,345 tokens\n\tfor i in range(10): ∑ 漢字 🙂"
    behaviour = [sorted(tokenizer.get_vocab().items()), tokenizer.encode(probe, add_special_tokens=False)]
    before = hashlib.sha256(json.dumps(behaviour).encode()).hexdigest()
    for known in (before, before[:16], tokenizers["byte-level"].sha256):
        assert tokenizers["byte-level"].known_as(known)
        assert not tokenizers["crossing"].known_as(known)
    assert tokenizers["bytes"].known_as(tokenizers["bytes"].sha256)
    assert not tokenizers["bytes"].known_as("0")
    assert not any(tokenizer.known_as("") for tokenizer in tokenizers.values())


def test_files_of_a_tokenizer_without_a_fast_version(tokenizers, tmp_path):
    """All of its files count, whatever it says of itself."""

    class Slow:
        is_fast = False

        def get_vocab(self):
            return {"a": 0}

        def encode(self, text, **_):
            return [0]

        def save_vocabulary(self, folder):
            (Path(folder) / "rules.model").write_text(self.rules)
            return (str(Path(folder) / "rules.model"),)

    hashes = set()
    for rules in ("one", "two", "two"):
        slow = Slow()
        slow.rules = rules
        hashes.add(tokenizer_hash(slow))
    assert len(hashes) == 2


def test_preparation_settings_do_not_reach_the_saved_tokenizer(tokenizers, tmp_path):
    tokenizers["sentencepiece"].save(tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved").tokenizer
    assert saved.encode("<s>", add_special_tokens=False) == [saved.bos_token_id]


def test_truncation_in_a_tokenizer_file_does_not_shorten_documents(tokenizer_folders, tmp_path):
    loaded = load_tokenizer(tokenizer_folders["byte-level"])
    loaded.tokenizer.backend_tokenizer.enable_truncation(4)
    loaded.tokenizer.save_pretrained(tmp_path / "short")
    assert len(load_tokenizer(tmp_path / "short").encode("the cat sat on the mat and stayed there")) > 4


def test_an_unknown_tokenizer_is_named(tmp_path):
    for name in (str(tmp_path / "missing"), str(tmp_path)):
        with pytest.raises(ValueError, match=f"no tokenizer '{name}': give `bytes`, a folder"):
            load_tokenizer(name)


def test_ids_of_the_llama_2_tokenizer_in_pieces(shared):
    tokenizer = load_tokenizer(shared / "tokenizers" / "llama2")
    text = ("Let $x\\in M$ <s> be — naïve!\n\n\tdef f(a):  return  a\u00a0+ 漢字🙂 ...\r\n" + "word " * 50) * 200
    parts = in_pieces([text], tokenizer)
    assert len(parts) > 5
    assert np.array_equal(np.concatenate(parts), tokenizer.encode(text))


def test_recipes_for_the_llama_2_tokenizer_name_its_hash(shared):
    recipes = Path(__file__).parents[2] / "recipes"
    tokenizer = load_tokenizer(shared / "tokenizers" / "llama2")
    for tier in ("small", "paper"):
        (named,) = re.findall(r"^tokenizer: ([0-9a-f]+)", (recipes / tier / "base.yaml").read_text(), re.MULTILINE)
        assert tokenizer.sha256.startswith(named)
