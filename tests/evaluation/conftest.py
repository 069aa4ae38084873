import argparse
import inspect
import textwrap

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import elastic_memory as em
from elastic_memory.memory import MEMORIES

# Real text that is on every machine, with characters of two, three and four bytes.
TEXT = inspect.getsource(argparse) + inspect.getsource(textwrap) + "naïve déjà vu, 漢字かな交じり文 😀 ½ ∑ " * 20


def sharpen(model, factor=8.0):
    """Random weights give nearly equal losses everywhere; larger ones give losses that depend on the context."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(factor)
    return model.eval()


def llama(vocabulary=64, seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=1 << 14, **sizes)
    return sharpen(LlamaForCausalLM(config))


def model_with(memory="elastic", seed=0, **overrides):
    """A model with blocks of 8 tokens and weights large enough that memory matters to the logits."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    options = {"memory_order": 6, "memory_points": 5}
    known = {name: n for name, n in options.items() if MEMORIES[memory].has_option(name.removeprefix("memory_"))}
    values = {"vocab_size": 61, "block_size": 8, "initializer_range": 0.3} | sizes | known | overrides
    torch.manual_seed(seed)
    return em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny", memory=memory, **values)).eval()


def rows_of(*lengths, vocabulary=61, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=random) for length in lengths]


def byte_level_bpe(vocabulary, bos=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.fixture(scope="session")
def small_tokenizer():
    return byte_level_bpe(400)


@pytest.fixture(scope="session")
def large_tokenizer():
    return byte_level_bpe(700, bos=True)
