import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from elastic_memory.data.tokenizers import load_tokenizer

SPECIAL = ["<unk>", "<s>", "</s>"]
TRAINING_TEXT = [
    "the cat sat on the mat, and the dog sat by the door.\n\n  def memory(x):\n\treturn x + 1  # twice\n" * 4,
    "aaaaaaaaaaaaaaaa bbbbbbbb -------- ........ 1234567890 naïve café  —  the theory of the thing\n" * 4,
    "    if a <= b:\n        print('a</s>b')\n!!!??? ...   ;;; \r\n\r\n",
]


def sentencepiece_like():
    """As Llama 2: no pre-tokeniser, so that a document is one word; white space is a letter; bytes as a last resort."""
    alphabet = sorted(set("".join(TRAINING_TEXT).replace(" ", "▁").replace("\n", "")))
    split = Tokenizer(models.BPE())
    split.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    split.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    split.train_from_iterator(TRAINING_TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    model = json.loads(split.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"] if "\n" not in "".join(merge)] + [("▁", "▁"), ("▁▁", "▁▁")]
    names = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + alphabet + ["".join(merge) for merge in merges]
    vocab = {name: index for index, name in enumerate(dict.fromkeys(names))}
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = split.normalizer
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def byte_level():
    """As GPT-2 and Llama 3."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIAL
    )
    made.train_from_iterator(TRAINING_TEXT, trainer)
    return made


def crossing():
    """Byte-level without words: its tokens run across white space, as those of SuperBPE."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=24
    )
    made.train_from_iterator([*TRAINING_TEXT, " the cat" * 50, " cat the" * 50, "a b a b a c " * 50], trainer)
    return made


def unigram():
    """As T5, with a normaliser that changes the length of a text."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        TRAINING_TEXT, trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>")
    )
    return made


def word_piece():
    """As BERT."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(TRAINING_TEXT, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL))
    return made


KINDS = {"sentencepiece": sentencepiece_like, "byte-level": byte_level, "crossing": crossing}
KINDS |= {"unigram": unigram, "wordpiece": word_piece}


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory):
    """A folder with a small tokenizer of each kind."""
    folders = {}
    for kind, make in KINDS.items():
        folders[kind] = tmp_path_factory.mktemp("tokenizers") / kind
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=make(), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        )
        tokenizer.save_pretrained(folders[kind])
    return folders


@pytest.fixture(scope="session")
def tokenizers(tokenizer_folders):
    """The small tokenizers, loaded, and `bytes`."""
    return {kind: load_tokenizer(folder) for kind, folder in tokenizer_folders.items()} | {
        "bytes": load_tokenizer("bytes")
    }


@pytest.fixture(scope="session")
def shared():
    """Real corpora and tokenizers, where the machine has them."""
    if "ELASTIC_SHARED" not in os.environ:
        pytest.skip("ELASTIC_SHARED names no folder with data/ and tokenizers/")
    return Path(os.environ["ELASTIC_SHARED"])


def tree(folder):
    """Every file under a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
