"""transformers' own tests of its models, on ours: `make test-transformers` gets them, and writes docs/clients.md.

They are in the source distribution of transformers, and nothing of it is here. It carries `ModelTesterMixin` and
`TrainingTesterMixin`, but neither the generation nor the export tests that the first imports: empty ones stand in.
"""

import importlib
import os
import sys
import types
import unittest
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
from transformers.models.auto import modeling_auto as auto

import elastic_memory as em
from elastic_memory.memory import MEMORIES
from tests.conftest import SMALL, small_model
from tests.mixins.inherent import INHERENT, WITHOUT_ATTENTIONS

SOURCES = os.environ.get("TRANSFORMERS_SOURCES")
if not SOURCES:
    pytest.skip("TRANSFORMERS_SOURCES names no folder: use make test-transformers", allow_module_level=True)

# Their models have two layers; positions are short, as float32 has too few digits for theirs at 49,152.
CHANGED = {"num_hidden_layers": 2, "pad_token_id": 0, "initializer_range": 0.02, "max_position_embeddings": 512}
NOT_CARRIED = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}


def package(name: str, folder: Path) -> types.ModuleType:
    """A package of its own name for theirs, which is called tests, as ours is."""
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [str(folder)]
    return module


def load(folder: Path) -> tuple[type, ...]:
    """Their mixins, from the folder of their tests."""
    package("transformers_tests", folder)
    for part, mixin in NOT_CARRIED.items():
        parent, _, name = f"transformers_tests.{part}".rpartition(".")
        package(parent, folder)
        module = sys.modules[f"{parent}.{name}"] = types.ModuleType(f"{parent}.{name}")
        setattr(module, mixin, type(mixin, (), {}))
    common = importlib.import_module("transformers_tests.test_modeling_common")
    training = importlib.import_module("transformers_tests.test_training_mixin")
    return common.ModelTesterMixin, common.GenerationTesterMixin, training.TrainingTesterMixin


class Sizes:
    """What the mixins ask about a model: its sizes, its configuration, an input."""

    batch_size, seq_length, is_training = 3, 20, True
    hidden_size, num_attention_heads = SMALL["hidden_size"], SMALL["num_attention_heads"]
    num_hidden_layers = CHANGED["num_hidden_layers"]

    def __init__(self, model: str):
        self.model = model
        self.causal_lm_class = KINDS[model][1]

    def get_config(self) -> LlamaConfig:
        if self.model in MEMORIES:
            return small_model(self.model, **CHANGED).config
        return LlamaConfig(**{name: value for name, value in (SMALL | CHANGED).items() if hasattr(LlamaConfig, name)})

    def prepare_config_and_inputs_for_common(self) -> tuple[LlamaConfig, dict[str, torch.Tensor]]:
        ids = torch.randint(1, SMALL["vocab_size"], (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


OURS = em.MemoryLlamaModel, em.MemoryLlamaForCausalLM, em.MemoryLlamaForSequenceClassification
# Llama shows that the tests and what they are given are right.
KINDS = {"llama": (LlamaModel, LlamaForCausalLM, LlamaForSequenceClassification)} | dict.fromkeys(MEMORIES, OURS)
# By these names they know which classes take which labels.
auto.MODEL_MAPPING_NAMES["memory_llama"] = OURS[0].__name__
auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["memory_llama"] = OURS[2].__name__
MIXINS = load(Path(SOURCES, "tests"))


def case(model: str) -> type:
    """Their tests of one model."""

    def prepare(self) -> None:
        self.model_tester = Sizes(model)
        self.has_attentions = model not in MEMORIES or self._testMethodName not in WITHOUT_ATTENTIONS

    body = {"all_model_classes": KINDS[model], "model_tester": None, "setUp": prepare}
    body["test_generation_tester_mixin_inheritance"] = None  # of the empty one it would be true, and mean nothing
    if model in MEMORIES:
        body |= {name: unittest.skip(f"inherent: {why}")(getattr(MIXINS[0], name)) for name, why in INHERENT.items()}
    return type(f"Test{model.title()}", (*MIXINS, unittest.TestCase), body)


for model in KINDS:
    globals()[f"Test{model.title()}"] = case(model)
