"""Rows and recipes from before a tokenizer's hash covered its merges."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from elastic_memory.data import load_tokenizer, prepare, samples
from elastic_memory.data.tokenizers import _former_hash
from elastic_memory.evaluation.loading import check_tokenizer
from elastic_memory.training.corpus import fit


@pytest.fixture
def rows(corpus, tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path / "tokenizer")
    texts = sorted(map(str, corpus.parent.glob("*.txt")))
    prepare(texts, tmp_path / "rows", tokenizer=tmp_path / "tokenizer", length=128, shares=(0.8, 0.1, 0.1))
    return tmp_path / "rows"


def test_rows_recipes_and_models_of_before_go_together_with_new_ones(rows, quick, tmp_path):
    tokenizer = load_tokenizer(rows / "tokenizer")
    former = _former_hash(tokenizer.tokenizer)
    before = tmp_path / "before"
    shutil.copytree(rows, before)
    manifest = json.loads((before / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = former
    (before / "manifest.json").write_text(json.dumps(manifest))
    for folder in (rows, before):
        for known in (None, former[:16], tokenizer.sha256[:16]):
            fit(quick.replace(tokenizer=known), samples(folder))
        with pytest.raises(ValueError, match="the recipe is for 0123"):
            fit(quick.replace(tokenizer="0123"), samples(folder))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    for known in (former, tokenizer.sha256):
        (tmp_path / "model" / "training.json").write_text(json.dumps({"tokenizer": known}))
        check_tokenizer(str(tmp_path / "model"), tokenizer, "the copy beside it")
