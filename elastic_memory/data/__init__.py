"""Text into rows of tokens: `prepare` writes them, `samples` reads them."""

from elastic_memory.data.corpora import CORPORA
from elastic_memory.data.prepare import prepare
from elastic_memory.data.samples import Samples, samples
from elastic_memory.data.tokenizers import load_tokenizer, tokenizer_hash

__all__ = ["CORPORA", "Samples", "load_tokenizer", "prepare", "samples", "tokenizer_hash"]
