"""Write a folder with a pretrained model, its tokenizer and a memory: every command loads it like a finished run."""

import os
from pathlib import Path
from typing import Any

import torch

from elastic_memory.common.checksums import write_manifest
from elastic_memory.common.files import whole_folder, write_text
from elastic_memory.common.progress import transformers_bars
from elastic_memory.evaluation.loading import load_model, tokenizer_of
from elastic_memory.model import attach_memory
from elastic_memory.model.modeling import MemoryCausalLM

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write_attached(source: str, out: Path, dtype: str | None = None, **settings: Any) -> Any:
    """Attach a memory to the model `source` (a hub name, a folder or a GGUF file) and write it to the new folder `out`.

    `settings` are those of `attach_memory`. `dtype`: bfloat16 or float32; None keeps that of the checkpoint, and means
    bfloat16 for a GGUF file. Returns the model.
    """
    if os.path.lexists(out):
        raise ValueError(f"{out} exists: name a new folder, nothing is overwritten")
    tokenizer = tokenizer_of(source)
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer: copy the files of its tokenizer into that folder")
    model = load_model(source)
    if isinstance(model, MemoryCausalLM):
        raise ValueError(f"{source} already has a memory: attach to the original model")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"{source} is quantised, and such weights cannot be trained: give the original model")
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"{source}: its tokenizer has {tokenizer.vocab_size:,} tokens, the model {model.config.vocab_size:,}"
        )
    if dtype is None and source.endswith(".gguf"):
        dtype = "bfloat16"
    if dtype is not None:
        model.to(DTYPES[dtype])
    attach_memory(model, **settings)
    _write(model, tokenizer, source, out)
    return model


def _write(model: Any, tokenizer: Any, source: str, out: Path) -> None:
    with whole_folder(out) as staged:
        tokenizer.save(staged)
        with transformers_bars():
            model.save_pretrained(staged)
        write_text(staged / "README.md", _card(model, Path(source).name))
        write_manifest(staged, f"attached to {Path(source).name}", 0, without=("README.md",))


def _card(model: Any, source: str) -> str:
    layers = ", ".join(str(index) for index in model.memories) or "none"
    return f"""---
library_name: transformers
tags: [elastic-memory]
---

# {source} with a memory

Made by `elastic attach`: the weights of {source}, and a memory in layers: {layers}. A memory has to be trained:
`elastic train finetune/full --from FOLDER --data ROWS`.

```python
import elastic_memory as em
from transformers import AutoModelForCausalLM

model = em.attach_memory(AutoModelForCausalLM.from_pretrained("path/to/this/folder"))
```
"""
