"""Checkpoints from disk or the hub, and the tokenizers that belong to them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from elastic_memory.data import load_tokenizer
from elastic_memory.data.places import missing_folder
from elastic_memory.data.tokenizers import Tokenizer
from elastic_memory.model import attach_memory
from elastic_memory.model.attach import SAVED


def load_model(path: str) -> Any:
    """A causal language model from the folder of a run or of a model, or from the hub, on the GPU if there is one.

    A model that was saved with an attached memory gets it back.
    """
    config, folder = load_config(path), model_folder(path)
    with _missing(path):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, config=config)
    if getattr(config, SAVED, None):
        model = attach_memory(model)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def load_config(path: str) -> Any:
    """The configuration of such a model, which is soon there and says whether the model is."""
    folder = model_folder(path)
    with _missing(path):
        return AutoConfig.from_pretrained(folder)


@contextmanager
def _missing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileNotFoundError(f"{path}: {str(error).splitlines()[0]}") from None


def model_folder(path: str) -> str:
    """Where the model of a run lies; any other folder, and a name on the hub, is itself."""
    if wrong := missing_folder(path):
        raise FileNotFoundError(wrong)
    inner = Path(path) / "model"
    if (inner / "config.json").exists():
        return str(inner)
    if Path(path).is_dir() and not (Path(path) / "config.json").exists():
        raise FileNotFoundError(f"{path} holds no model: there is no config.json in it, nor in its folder `model`")
    return path


def tokenizer_of(path: str) -> Tokenizer | None:
    """The tokenizer that lies beside a model, if there is one."""
    folder = Path(model_folder(path))
    if folder.is_dir() and not any((folder / name).exists() for name in ("tokenizer_config.json", "bytes.json")):
        return None
    return load_tokenizer(str(folder))


def check_tokenizer(path: str, tokenizer: Tokenizer, where: str) -> None:
    """Refuse another tokenizer than the one a checkpoint was trained with, if it says which."""
    note = Path(model_folder(path)) / "training.json"
    if not note.exists():
        return
    trained = json.loads(note.read_text())["tokenizer"]
    if not tokenizer.known_as(trained):
        raise ValueError(
            f"{path} was trained with tokenizer {trained[:12]}, but {where} has {tokenizer.sha256[:12]}: use the "
            "model's tokenizer"
        )
