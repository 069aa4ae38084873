"""Load models from disk or the hub, and their tokenizers."""

import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
from transformers.utils import logging

from elastic_memory.common.progress import transformers_bars, watched_sha256
from elastic_memory.common.strict import read_json
from elastic_memory.data import load_tokenizer
from elastic_memory.data.places import missing_folder
from elastic_memory.data.start import StartingModel
from elastic_memory.data.tokenizers import Tokenizer
from elastic_memory.evaluation.model_files import check_files, check_loaded, check_tensors
from elastic_memory.model import MemoryLlamaConfig, attach_memory
from elastic_memory.model.attach import SAVED

BUILT_IN = (None, "eager", "sdpa")  # attention of transformers itself; other names may load code from the hub


def load_model(path: str) -> Any:
    """A causal language model from the folder of a run or of a model, a GGUF file, or the hub; on the GPU if any.

    A model that was saved with an attached memory gets it back.
    """
    return _load(path).to("cuda" if torch.cuda.is_available() else "cpu").eval()


def starting_model(path: str) -> StartingModel:
    """A model with memory, written by `elastic attach` or `elastic train`, to be fine-tuned."""
    if path.endswith(".gguf") or not Path(model_folder(path)).is_dir():
        raise ValueError(f"--from {path}: give a folder, written by elastic attach or elastic train")
    folder, config = Path(model_folder(path)), load_config(path)
    if config.model_type != MemoryLlamaConfig.model_type and not getattr(config, SAVED, None):
        raise ValueError(f"--from {path}: a model without memory; give it one with elastic attach {path} --out FOLDER")
    check_files(folder)
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    sums = " ".join(f"{file.name} {watched_sha256(file)}" for file in files)
    return StartingModel(
        path=path,
        sha256=hashlib.sha256(sums.encode()).hexdigest(),
        config=config,
        tokenizer=tokenizer_of(path),
        load=partial(_load, path),
    )


def _load(path: str) -> Any:
    where, gguf = split_gguf(path)
    if not gguf:
        check_files(Path(where))
    config = load_config(path)
    if not gguf:
        check_tensors(Path(where), quantized=hasattr(config, "quantization_config"))
    # Weights as numbers: packed ones could be neither trained nor saved.
    unpacked = {"quantization_config": GgufConfig(dequantize=True)} if gguf else {}
    with _explained(path), _quiet(bool(getattr(config, SAVED, None))), transformers_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where, config=config, output_loading_info=True, trust_remote_code=False, **gguf, **unpacked
        )
    model, info = loaded
    check_loaded(path, info, foreign=config.model_type != "memory_llama" and not getattr(config, SAVED, None))
    if gguf:
        model.name_or_path = Path(path).name  # transformers names the folder only
    return attach_memory(model) if getattr(config, SAVED, None) else model


def load_config(path: str) -> Any:
    """The configuration of a model, without its weights; refuses attention code from elsewhere."""
    folder, gguf = split_gguf(path)
    with _explained(path):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **gguf)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for kind in ("_attn_implementation", "_experts_implementation"):
            wanted = getattr(part, kind, None)
            if wanted not in BUILT_IN:
                raise ValueError(f"{path} asks for {wanted!r}, code from elsewhere: remove {kind[1:]} from config.json")
    return config


def split_gguf(path: str) -> tuple[str, dict[str, str]]:
    """The folder or hub name of a model, and the arguments by which transformers loads a GGUF file."""
    if not path.endswith(".gguf"):
        return model_folder(path), {}
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{path}: reading GGUF files needs the package gguf: pip install 'elastic-memory[gguf]'")
    return str(Path(path).parent), {"gguf_file": Path(path).name}


@contextmanager
def _quiet(attached: bool) -> Iterator[None]:
    """Silence the report of unexpected tensors for a model with an attached memory: `attach_memory` loads them."""
    before = logging.get_verbosity()
    if attached:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turn transformers' errors into one line that begins with the path."""
    try:
        yield
    except OSError as error:
        raise FileNotFoundError(f"{path}: {str(error).splitlines()[0]}") from None
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(f"{path} needs its own code to be loaded, which is never run: use another model") from None
    except (TypeError, AttributeError, LookupError, RecursionError) as error:
        raise ValueError(f"{path} does not have the files of a model ({type(error).__name__}: {error})") from None


def model_folder(path: str) -> str:
    """The model folder of a run; other folders and hub names are returned as they are."""
    if wrong := missing_folder(path):
        raise FileNotFoundError(wrong)
    inner = Path(path) / "model"
    if (inner / "config.json").exists():
        return str(inner)
    if Path(path).is_dir() and not (Path(path) / "config.json").exists():
        raise FileNotFoundError(f"{path} holds no model: neither it nor its folder `model` has a config.json")
    return path


def tokenizer_of(path: str) -> Tokenizer | None:
    """The tokenizer in a model's folder, if there is one."""
    if path.endswith(".gguf"):
        return load_tokenizer(path)
    folder = Path(model_folder(path))
    if folder.is_dir() and not any((folder / name).exists() for name in ("tokenizer_config.json", "bytes.json")):
        return None
    return load_tokenizer(str(folder))


def check_tokenizer(path: str, tokenizer: Tokenizer, where: str) -> None:
    """Refuse a tokenizer other than the one a model was trained with, if that is on record."""
    note = Path(model_folder(path)) / "training.json"
    if not note.exists():
        return
    content = read_json(note)
    trained = content.get("tokenizer") if isinstance(content, dict) else None
    if not isinstance(trained, str):
        raise ValueError(f"{note} does not say which tokenizer the model was trained with: restore it from a copy")
    if not tokenizer.known_as(trained):
        raise ValueError(
            f"{path} was trained with tokenizer {trained[:12]}, but {where} has {tokenizer.sha256[:12]}: use the "
            "model's tokenizer"
        )
