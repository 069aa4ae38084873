"""The model that fine-tuning starts from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_memory.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class StartingModel:
    """A model with memory on disk; `load` reads it again for every attempt of a run."""

    path: str
    sha256: str  # of its weights and configuration
    config: Any
    tokenizer: Tokenizer | None
    load: Callable[[], Any]
