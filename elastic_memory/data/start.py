"""A model that fine-tuning starts from, as training needs to know it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_memory.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class StartingModel:
    """A model with memory on disk; `load` gives it anew, as every attempt of a run begins with it."""

    path: str
    sha256: str  # of its weights and configuration
    config: Any
    tokenizer: Tokenizer | None
    load: Callable[[], Any]
