"""Prepared rows for training: their hash, and whether they fit the recipe."""

import hashlib

from elastic_memory.data import Samples
from elastic_memory.training.build import build_config
from elastic_memory.training.recipe import Recipe


def data_hash(rows: Samples) -> str:
    """A hash of the rows and of the tokenizer that made them."""
    return hashlib.sha256((rows.fingerprint + tokenizer_sha256(rows)).encode()).hexdigest()


def tokenizer_sha256(rows: Samples) -> str:
    """The hash of the rows' tokenizer."""
    return rows.manifest["tokenizer"]["sha256"]


def fit(recipe: Recipe, rows: Samples) -> Recipe:
    """The recipe with the vocabulary size of the data filled in; refuses rows that do not fit the recipe."""
    if rows.length != recipe.training.length:
        raise ValueError(
            f"the rows have {rows.length:,} tokens, training.length is {recipe.training.length:,}: "
            f"prepare with --length {recipe.training.length}, or --set training.length={rows.length}"
        )
    if "vocab_size" not in recipe.model.config:
        recipe = recipe.replace(**{"model.config.vocab_size": rows.vocab_size})
    vocabulary, name = build_config(recipe).vocab_size, rows.manifest["tokenizer"]["name"]
    if vocabulary != rows.vocab_size:
        raise ValueError(
            f"the data's tokenizer ({name}) has {rows.vocab_size:,} tokens, the model {vocabulary:,}: prepare with "
            "the model's tokenizer"
        )
    tokenizer = rows.tokenizer()  # it is saved with the model, so it must be the one that made the rows
    if recipe.tokenizer and not tokenizer.known_as(recipe.tokenizer):
        raise ValueError(
            f"the data's tokenizer ({name}) is {tokenizer.sha256[:12]}, the recipe is for {recipe.tokenizer}: "
            "prepare with that one, or --set tokenizer=null to accept any of this size"
        )
    return recipe
