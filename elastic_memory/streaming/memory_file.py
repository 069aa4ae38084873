"""Memory files: a `MemoryCache` on disk, as safetensors, for the model that made it.

Tensors are read only after the header has been checked against the model: names, shapes, types, fingerprints.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError

from elastic_memory.common.files import whole_file
from elastic_memory.common.strict import unique_keys
from elastic_memory.shapes import Tensor
from elastic_memory.streaming.fingerprint import IN_EFFECT, given, local_settings, settings, weights_hash
from elastic_memory.streaming.texts import ReadText

if TYPE_CHECKING:
    from elastic_memory.streaming.cache import MemoryCache

VERSION = 2
LARGEST_HEADER = 2**20
DIGEST = re.compile("([0-9a-f]{32})?")  # of token ids; empty if there are none yet
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64, "I64": torch.int64}


def content_hash(header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """SHA-256 of all that the file holds, so that a flipped bit is detected."""
    rest = {name: value for name, value in header.items() if name != "content"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def shape_of(model: Any) -> dict[str, Any]:
    """The shapes and mechanisms that a file and a model must have in common."""
    layers = [
        [type(layer.memory).__name__, [list(part.shape[1:]) for part in layer.memory.start(1, "meta")]]
        for layer in model.base_model.layers
    ]
    return local_settings(model) | {"layers": layers}


def save(cache: "MemoryCache", path: Path, exact: bool) -> None:
    """Write `cache` to `path`, completely or not at all."""
    if not any(cache.clock):
        raise ValueError("this cache has read nothing yet: there is nothing to save")
    cache.refresh()  # so that the state has the order that the file names
    longest = max(cache.opened)
    exact = exact or cache.sliding
    tensors = {
        f"layers.{index}.{name}": tensor
        for index, stream in enumerate(cache.streams)
        for name, tensor in stream.file_tensors(cache.model.dtype, longest if exact else None).items()
    }
    if cache.tokens is not None or not longest:
        ids = torch.zeros(cache.batch, 0, dtype=torch.long) if cache.tokens is None else cache.tokens
        tensors["tokens"] = ids[:, :longest]
    elif not exact:
        raise ValueError("the open block was fed as embeddings, so its token ids are unknown: save with exact=True")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {
        "version": VERSION,
        "model": getattr(cache.model.config, "_name_or_path", ""),
        "weights": weights_hash(cache.model),
        "settings": settings(cache.model),
        "config": shape_of(cache.model),
        **cache.described(),
    }
    header["content"] = content_hash(header, tensors)
    metadata = json.dumps(header)
    if len(json.dumps(metadata)) > LARGEST_HEADER - 2**16:  # leaves room for the descriptions of tensors
        raise ValueError(f"{path}: {sum(map(len, cache.parts)):,} parts are more than the header of a file can list")
    with whole_file(path, shared=True) as file:
        file.write(safetensors.torch.save(tensors, metadata={"elastic_memory": metadata}))


def describe(path: Path) -> dict[str, Any]:
    """The header of a memory file, if the file is undamaged; whether it fits a model is not checked."""
    with _open(path) as file:
        header, _ = _read_header(path, file)
        _check_version(path, header)
        config = header.get("config")
        if not isinstance(config, dict) or type(config.get("block_size")) is not int or config["block_size"] < 1:
            raise ValueError(f"{path}: not a memory file (it has no block size)")
        _check_clock(path, header, 2**62 if config.get("local_attention") == "full" else config["block_size"])
        file.seek(0)
        _tensors(path, header, file.read())
    return header


def _open(path: Path) -> BinaryIO:
    if path.exists() and not path.is_file():  # opening a pipe would block
        raise ValueError(f"{path}: not a file")
    return path.open("rb")


def load(cache: "MemoryCache", path: Path, force: bool) -> None:
    """Fill the empty `cache` from `path`, or raise a ValueError that says why not."""
    with _open(path) as file:
        header, described = _read_header(path, file)
        _check_owner(path, header, cache.model, force)
        _check_clock(path, header, cache.block_size)
        seen, opened = header["seen"], header["opened"]
        cache.begin(len(seen), torch.device("meta"))  # shapes only: nothing is allocated before the file is checked
        stored = described.get("layers.0.open.key", ("", ()))[0] if force else ""
        dtype = DTYPES.get(stored, cache.model.dtype)
        expected = _expected(cache, seen, max(opened), described, dtype)
        if described != expected:
            wrong = sorted(set(described.items()) ^ set(expected.items()))[:3]
            raise ValueError(f"{path}: its tensors do not fit this model, for example {wrong}")
        file.seek(0)
        content = file.read()
    _fill(cache, header, _checked_tensors(path, header, content, cache.model.config.vocab_size))


def _tensors(path: Path, header: dict[str, Any], content: bytes) -> dict[str, Tensor]:
    """The tensors of a file, if their checksum is right."""
    try:
        tensors = safetensors.torch.load(content)
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged ({error})") from None
    if content_hash(header, tensors) != header.get("content"):
        raise ValueError(f"{path}: damaged: its content does not match its checksum")
    return tensors


def _checked_tensors(path: Path, header: dict[str, Any], content: bytes, vocab_size: int) -> dict[str, Tensor]:
    """The tensors of a file, if their checksum is right, numbers are finite and ids in the vocabulary."""
    tensors = _tensors(path, header, content)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{path}: {name} holds NaN or infinity")
    ids = tensors.get("tokens")
    if ids is not None and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"{path}: token ids outside the vocabulary of {vocab_size}")
    return tensors


def _fill(cache: "MemoryCache", header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Fill the cache from the file; an open block of token ids is read again."""
    device = next(cache.model.parameters()).device
    ids = tensors.get("tokens")
    layers: list[dict[str, Tensor]] = [{} for _ in cache.memories]
    for name, tensor in tensors.items():
        if name != "tokens":
            _, index, rest = name.split(".", 2)
            dtype = torch.float32 if rest.startswith("state.") else cache.model.dtype
            layers[int(index)][rest] = tensor.to(device, dtype)
    cache.restore(header, None if ids is None else ids.to(device), layers)
    if "open.key" not in layers[0]:
        cache.read_open_again()


def _read_header(path: Path, file: BinaryIO) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]:
    """The metadata, and name -> (dtype, shape) of each tensor, without reading any."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(LARGEST_HEADER, size - 8):
        raise ValueError(f"{path}: not a memory file (its header claims {length:,} bytes of {size:,})")
    try:
        header = json.loads(file.read(length), object_pairs_hook=unique_keys)
        metadata = json.loads(header.pop("__metadata__")["elastic_memory"], object_pairs_hook=unique_keys)
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is not an object")
        described = {name: _description(about) for name, about in header.items()}
        end = max((about["data_offsets"][1] for about in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"{path}: not a memory file ({type(error).__name__}: {error})"[:500]) from None
    if end != size - 8 - length:
        raise ValueError(f"{path}: damaged: it has {size:,} bytes, its header describes {8 + length + end:,}")
    return metadata, described


def _description(about: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """dtype and shape of a tensor, checked."""
    dtype, shape, (start, end) = about["dtype"], about["shape"], about["data_offsets"]
    sizes = [*shape, start, end]
    sound = type(dtype) is str and type(shape) is list and len(about) == 3
    if not sound or not all(type(number) is int and 0 <= number < 2**62 for number in sizes):
        raise ValueError(f"{about} describes no tensor")
    return dtype, tuple(shape)


def _check_version(path: Path, header: dict[str, Any]) -> None:
    if header.get("version") != VERSION:
        raise ValueError(
            f"{path}: format version {header.get('version')!r}; this release reads {VERSION}: read the text again"
        )


def _check_owner(path: Path, header: dict[str, Any], model: Any, force: bool) -> None:
    _check_version(path, header)
    differences = _differences(header.get("config"), shape_of(model))
    if differences:
        raise ValueError(f"{path}: made by a model of another shape: {differences}")
    if force:
        return
    there, here = header.get("settings"), settings(model)
    if isinstance(there, dict):
        if not any(name.startswith(IN_EFFECT) for name in there):  # a file of an earlier version
            here = given(model)
        # other releases of transformers may have more settings
        here = {name: value for name, value in here.items() if name in there}
    differences = _differences(there, here)
    if not differences and header.get("weights") == weights_hash(model):
        return
    why = f"other settings: {differences}" if differences else "other weights"
    raise ValueError(
        f"{path}: made with {why}, so its state does not fit this model. force=True (--force) loads it anyway"
    )


def _differences(there: Any, here: dict[str, Any]) -> str:
    if not isinstance(there, dict):
        return "the file does not list them"
    different = [f"{key}: {there.get(key)} there, {here[key]} here" for key in here if there.get(key) != here[key]]
    return "; ".join(different)[:500]


def _check_clock(path: Path, header: dict[str, Any], block_size: int) -> None:
    seen, opened, columns = (header.get(name) for name in ("seen", "opened", "columns"))
    good = (
        isinstance(seen, list)
        and isinstance(opened, list)
        and 0 < len(seen) == len(opened) <= 2**16
        and all(type(n) is int and 0 <= n < 2**62 for n in [*seen, columns])
        and all(type(n) is int and 0 <= n <= min(block_size, 2**31) for n in opened)
        and isinstance(digests := header.get("digests", [None] * len(seen)), list)
        and len(digests) == len(seen)
        and isinstance(texts := header.get("texts"), list)
        and all(one is None or (isinstance(one, str) and DIGEST.fullmatch(one)) for one in [*digests, *texts])
        and None not in texts
    )
    if not good or not _parts_fit(header, block_size):
        counts = f"{seen} in memory, {opened} in open blocks, {columns} columns"
        raise ValueError(f"{path}: its token counts are impossible: {counts}"[:300])


def _parts_fit(header: dict[str, Any], block_size: int) -> bool:
    """Whether the parts are well formed, and what follows them in memory is whole blocks."""
    seen, name = header["seen"], header.get("name")
    try:
        parts = [[ReadText(*part) for part in row] for row in header.get("parts") or [()] * len(seen)]
    except TypeError:
        return False
    sound = all(
        (part.name is None or type(part.name) is str)
        and (type(part.tokens) is int and part.tokens > 0)
        and (part.digest is None or type(part.digest) is str)
        for row in parts
        for part in row
    )
    if not sound or len(parts) != len(seen) or not (name is None or type(name) is str):
        return False
    rest = [tokens - sum(part.tokens for part in row) for tokens, row in zip(seen, parts, strict=True)]
    return all(tokens >= 0 and tokens % block_size == 0 for tokens in rest)


def _expected(
    cache: "MemoryCache",
    seen: list[int],
    longest: int,
    described: dict[str, tuple[str, tuple[int, ...]]],
    precision: torch.dtype,
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors that a file of this model, in some precision, must hold; it may have been saved `exact` or not."""
    config, batch = cache.model.config, len(seen)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    exact = any(".open." in name for name in described)
    names = {torch_type: name for name, torch_type in DTYPES.items()}
    dtype = names[precision]
    heads, dim = cache.memories[0].geometry.kv_heads, cache.memories[0].geometry.head_dim
    if "tokens" in described or not exact:
        expected["tokens"] = ("I64", (batch, longest))
    for index, stream in enumerate(cache.streams):
        for name, tensor in stream.file_tensors(cache.model.dtype, None).items():
            expected[f"layers.{index}.{name}"] = ("F32", tuple(tensor.shape))
        for name in sorted(stream.buffer_names) if exact else ():
            shape = (batch, longest, config.hidden_size) if name == "output" else (batch, heads, longest, dim)
            expected[f"layers.{index}.open.{name}"] = (dtype, shape)
        window = f"layers.{index}.window"
        if exact and stream.window_size and any(name.startswith(window) for name in described):
            # Rows that had read more may be gone, and have left room behind.
            _, shape = described.get(f"{window}.0", ("", ()))
            columns = min(max([*seen, *shape[2:3]]), stream.window_size)
            for part in range(2 if stream.window_size == cache.block_size else 3):
                expected[f"{window}.{part}"] = (dtype, (batch, heads, columns, dim))
    return expected
