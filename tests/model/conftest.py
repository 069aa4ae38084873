import pytest
import torch

from tests.conftest import small_model

WORDS = [chr(ord("a") + index) for index in range(26)] + [str(digit) for digit in range(10)]


@pytest.fixture
def tokenizer():
    """A word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(["<pad>", "<end>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", padding_side="left"
    )


@pytest.fixture
def folder(tokenizer, tmp_path):
    """Where a model is saved, as trainers want it that load it themselves."""

    def save(memory="elastic"):
        small_model(memory, initializer_range=0.1).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def text(seed, words=25):
    """Drawn words."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[index] for index in torch.randint(len(WORDS), (words,), generator=generator))
