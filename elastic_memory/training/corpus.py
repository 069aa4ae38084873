"""Prepared rows for training: their hash, and whether they fit the recipe."""

import hashlib

from elastic_memory.data import Samples
from elastic_memory.data.samples import check_vocabulary
from elastic_memory.data.start import StartingModel
from elastic_memory.training.build import build_config
from elastic_memory.training.recipe import Recipe


def data_hash(rows: Samples) -> str:
    """A hash of the rows and of the tokenizer that made them."""
    return hashlib.sha256((rows.fingerprint + tokenizer_sha256(rows)).encode()).hexdigest()


def tokenizer_sha256(rows: Samples) -> str:
    """The hash of the rows' tokenizer."""
    return rows.manifest["tokenizer"]["sha256"]


def fit(recipe: Recipe, rows: Samples, start: StartingModel | None = None) -> Recipe:
    """The recipe with what follows from the data or `start` filled in; refuses rows that do not fit."""
    if rows.length != recipe.training.length:
        raise ValueError(
            f"the rows have {rows.length:,} tokens, training.length is {recipe.training.length:,}: "
            f"prepare with --length {recipe.training.length}, or --set training.length={rows.length}"
        )
    name = rows.manifest["tokenizer"]["name"]
    recipe = _fit_start(recipe, rows, start) if start else _fit_model(recipe, rows, name)
    tokenizer = rows.tokenizer()  # it is saved with the model, so it must be the one that made the rows
    if recipe.tokenizer and not tokenizer.known_as(recipe.tokenizer):
        raise ValueError(
            f"the data's tokenizer ({name}) is {tokenizer.sha256[:12]}, the recipe is for {recipe.tokenizer}: "
            "prepare with that one, or --set tokenizer=null to accept any of this size"
        )
    return recipe


def _fit_model(recipe: Recipe, rows: Samples, name: str) -> Recipe:
    """A fresh model gets the vocabulary of the data, unless the recipe says which it has."""
    if recipe.training.lora is not None:
        raise ValueError("training.lora adapts a model that exists: give --from FOLDER, or --set training.lora=null")
    if "vocab_size" not in recipe.built.config:
        recipe = recipe.replace(**{"model.config.vocab_size": rows.vocab_size})
    vocabulary = build_config(recipe).vocab_size
    if vocabulary != rows.vocab_size:
        raise ValueError(
            f"the data's tokenizer ({name}) has {rows.vocab_size:,} tokens, the model {vocabulary:,}: prepare with "
            "the model's tokenizer"
        )
    return recipe


def _fit_start(recipe: Recipe, rows: Samples, start: StartingModel) -> Recipe:
    """A model that exists has its own settings and its own tokenizer."""
    if recipe.model is not None:
        raise ValueError(
            f"{recipe.name} has a section model, and --from {start.path} is the model: use a recipe without one, such "
            "as finetune/full, or --set model=null"
        )
    check_vocabulary(rows, start.path, start.tokenizer, start.config.vocab_size)
    return recipe.replace(start={"path": start.path, "sha256": start.sha256})
