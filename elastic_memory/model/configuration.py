"""`MemoryLlamaConfig`: a Llama and its memory; unknown and inconsistent settings are errors."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from elastic_memory.common.defaults import BLOCK_SIZE, LENGTH, POINTS
from elastic_memory.common.names import nearest, suggest
from elastic_memory.memory import MEMORIES, Geometry, Memory
from elastic_memory.memory.contract import check_type, with_new_names
from elastic_memory.model.adapters import tell_peft
from elastic_memory.model.locality import Locality
from elastic_memory.model.saved_defaults import RECORD, defaults, recorded, warn_of_defaults

LOCAL_ATTENTION = ("block", "sliding", "full")

# The paper's models as its figures determine them, and one that trains on a laptop (docs/choices.md, "sizes").
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4,
        "vocab_size": 512, "block_size": 64, "memory_points": 16,
    },
    "100m": {"hidden_size": 720, "intermediate_size": 1920, "num_hidden_layers": 12, "num_attention_heads": 8},
    "200m": {"hidden_size": 1080, "intermediate_size": 2880, "num_hidden_layers": 12, "num_attention_heads": 12},
    "400m": {"hidden_size": 1440, "intermediate_size": 4864, "num_hidden_layers": 12, "num_attention_heads": 16},
}  # fmt: skip
MEMORY = "elastic"  # if no memory is named
PAPER = {"block_size": BLOCK_SIZE, "memory_points": POINTS, "vocab_size": 32000}
COMMON = {
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": LENGTH,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip


# What saved models carry for programs that do not import us.
CODE = "elastic_memory_classes"
AUTO_CLASSES = {
    "AutoConfig": "MemoryLlamaConfig",
    "AutoModel": "MemoryLlamaModel",
    "AutoModelForCausalLM": "MemoryLlamaForCausalLM",
    "AutoModelForSequenceClassification": "MemoryLlamaForSequenceClassification",
}
IMPORTS = f'''"""The code of this model is in elastic_memory (pip install elastic-memory): import that, and it loads."""

from elastic_memory import {", ".join(AUTO_CLASSES.values())}  # noqa: F401
'''


@dataclass(frozen=True)
class MemorySettings:
    """Which memory, where, how large: what `MemoryLlamaConfig` adds to a model, and `attach_memory` too."""

    geometry: Geometry
    memory: str = MEMORY
    memory_layers: list[int] | None = None
    local_attention: str = "block"
    window: int | None = None
    memory_order: int | None = None
    memory_points: int | None = None
    sampling: str | Callable | None = None
    sampling_options: dict[str, float] | None = None
    memory_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known(self.memory, MEMORIES, "memory")
        known(self.local_attention, LOCAL_ATTENTION, "local_attention")
        if self.geometry.block_size < 1:
            raise ValueError(f"block_size={self.geometry.block_size}: give a number of tokens from 1 on")
        for layer in self.memory_layers or ():
            check_type("memory_layers", layer, int)
            if not 0 <= layer < self.geometry.layers:
                raise ValueError(f"memory_layers has {layer}; this model has layers 0 to {self.geometry.layers - 1}")
        if len(set(self.memory_layers or ())) < len(self.memory_layers or ()):
            raise ValueError(f"memory_layers={self.memory_layers}: name each layer once")
        _check_window(self.window, self.local_attention, self.geometry.block_size)
        kind = MEMORIES[self.memory]
        if not kind.info.layers(1) and self.memory_layers:
            raise ValueError(f"memory={self.memory!r} with memory_layers={self.memory_layers}: leave the layers out")
        with torch.device("meta"):  # only to check its options
            memory = kind.build(self._host_geometry, self.options())
        if self.local_attention == "full" and self.layers():
            raise ValueError("local_attention='full' sees everything already: use it with memory='none'")
        if self.local_attention == "sliding" and memory.no_sliding:
            raise ValueError(f"local_attention='sliding' is undefined for {self.memory!r}: {memory.no_sliding}")

    @property
    def locality(self) -> Locality:
        """What a token sees without memory."""
        return Locality(self.local_attention, self.geometry.block_size, self.window or self.geometry.block_size)

    @property
    def _host_geometry(self) -> Geometry:
        """The geometry that memories are built with: whether attention slides, too."""
        return replace(self.geometry, sliding=self.local_attention == "sliding")

    def options(self) -> dict[str, Any]:
        """Arguments of the mechanism: only those that were given, so that one it does not have is an error."""
        named = {
            "order": self.memory_order,
            "points": self.memory_points,
            "sampling": self.sampling,
            "sampling_options": self.sampling_options,
        }
        given = {name: value for name, value in named.items() if value is not None}
        for name in given.keys() & self.memory_options.keys():
            raise ValueError(f"{name!r} is in memory_options and is a setting of its own, too: give it once")
        return given | self.memory_options

    def layers(self) -> list[int]:
        """Layers with memory."""
        if self.memory_layers is not None:
            return self.memory_layers
        return MEMORIES[self.memory].info.layers(self.geometry.layers)

    def memory_at(self, index: int) -> Memory:
        """A fresh memory for one layer."""
        if index in self.layers():
            return MEMORIES[self.memory].build(self._host_geometry, self.options())
        return MEMORIES["none"].build(self.geometry, {})


@strict
class MemoryLlamaConfig(LlamaConfig):
    """A Llama and its memory.

    `memory`: a name of MEMORIES. `memory_layers`: indices, None for the mechanism's own choice. `block_size`: tokens
    that see each other. `local_attention`: block, sliding or full. `window`: tokens that a token sees under sliding
    attention, whole blocks; None for one block. Memory holds what is older. `memory_order`: size of the state
    (coefficients; for a queue its tokens; for summaries their number). `memory_points`, `sampling`, `sampling_options`:
    how the state is read. `memory_options`: further arguments of the mechanism. None leaves a setting to the
    mechanism's default.
    `pad_heads`: store each head padded with zeros to a multiple of 8, which the fastest attention kernels need.
    `residual_in_fp32`: under autocast, keep the residual stream in float32.
    """

    model_type = "memory_llama"
    base_model_tp_plan = base_model_pp_plan = None

    # Rows hold no special tokens, so no id means an end until somebody says so; Llama's 1 and 2 are Llama 2's own.
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    memory: str = MEMORY
    memory_layers: list[int] | None = None
    block_size: int = BLOCK_SIZE
    local_attention: str = "block"
    window: int | None = None
    memory_order: int | None = None
    memory_points: int | None = None
    sampling: str | None = None
    sampling_options: dict | None = None
    memory_options: dict | None = None
    pad_heads: bool = False
    residual_in_fp32: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        loaded, record = kwargs.pop(LOADED, {}), kwargs.pop(RECORD, None)
        for name, near in _unknown(type(self), kwargs).items():
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(f"MemoryLlamaConfig has no setting {name!r}{hint}")
        super().__post_init__(**kwargs, **loaded)
        refuse_dropout(self)
        self.settings()
        if record is not None:
            self._restore(record)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers. Unknown keys are kept, for other programs, and named in a warning."""
        if config_dict.get("memory_options"):
            config_dict = config_dict | {"memory_options": with_new_names(config_dict["memory_options"])}
        unknown = _unknown(cls, config_dict)
        if unknown:
            said = [f"{name} (did you mean {near!r}?)" if near else name for name, near in unknown.items()]
            warnings.warn(f"unknown keys in the configuration: {', '.join(said)}", stacklevel=2)
        loaded = {name: value for name, value in config_dict.items() if name in unknown}
        known = {name: value for name, value in config_dict.items() if name not in {*unknown, RECORD}}
        place = kwargs.get("name_or_path")
        made = super().from_dict(known | {LOADED: loaded}, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        if RECORD in config_dict:
            config._restore(config_dict[RECORD])  # after `kwargs`: what is given when loading counts
        elif place is not None:
            warn_of_defaults(config.settings(), place)
        return made

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; passes `name_or_path` on, as `AutoConfig` does."""
        told = {"name_or_path": str(pretrained_model_name_or_path)} | kwargs
        return super().from_pretrained(pretrained_model_name_or_path, *args, **told)

    def to_dict(self) -> dict[str, Any]:
        """As in transformers. peft calls it right before it looks up where adapters go."""
        tell_peft(self.model_type)
        return super().to_dict()

    def _restore(self, record: Any) -> None:
        """Set the options that the model was saved with, where defaults have changed since."""
        for name, value in recorded(self.settings(), record).items():
            setattr(self, name, value)
        self.settings()

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers, with the defaults in use, and a line by which `trust_remote_code=True` finds our code."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        Path(save_directory, f"{CODE}.py").write_text(IMPORTS, encoding="utf-8")
        self.auto_map = {auto: f"{CODE}.{name}" for auto, name in AUTO_CLASSES.items()}
        setattr(self, RECORD, defaults(self.settings()))
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            delattr(self, RECORD)  # it belongs to this file: settings may change before the next save

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing to do: models are saved with a line that imports our code, never with a copy of it."""

    def stored(self) -> Self:
        """The configuration with the shapes of the weights: with `pad_heads`, head_dim is a multiple of 8."""
        if not self.pad_heads:
            return self
        return type(self).from_dict(self.to_dict() | {"head_dim": -(-self.head_dim // 8) * 8, "pad_heads": False})

    def geometry(self) -> Geometry:
        """The shape of a layer."""
        return geometry_of(self, self.block_size)

    def settings(self, stored: bool = False) -> MemorySettings:
        """The memory part of the configuration, checked; `stored`: for heads as their weights are stored."""
        geometry = self.geometry()
        if stored:
            padded = self.head_dim if self.pad_heads else None
            geometry = replace(self.stored().geometry(), scale=self.head_dim**-0.5, features=padded)
        values = {item.name: getattr(self, item.name) for item in fields(MemorySettings) if item.name != "geometry"}
        return MemorySettings(**values | {"geometry": geometry, "memory_options": self.memory_options or {}})

    @classmethod
    def preset(cls, name: str, memory: str = MEMORY, memory_multiple: int = 1, **overrides: Any) -> Self:
        """A size of the paper (100m, 200m, 400m) or `tiny`, with a memory of a multiple of the paper's size.

        >>> MemoryLlamaConfig.preset("100m", memory="elastic", memory_multiple=16).memory_order
        8640
        """
        known(name, PRESETS, "preset")
        known(memory, MEMORIES, "memory")
        values = COMMON | PAPER | PRESETS[name] | overrides
        if memory_multiple < 1:
            raise ValueError(
                f"memory_multiple={memory_multiple}: give 1, 2, 4, 8 or 16, as the paper does, or any from 1 on"
            )
        bare = {key: value for key, value in values.items() if not key.startswith(("memory_", "sampling"))}
        shape = cls(memory="none", **(bare | {"local_attention": "block", "window": None})).geometry()
        kind = MEMORIES[memory]
        if "memory_order" not in overrides:
            values["memory_order"] = kind.info.order_at(memory_multiple, shape)
        if "memory_points" not in overrides and not kind.has_option("points"):
            del values["memory_points"]
        return cls(memory=memory, **values)


def geometry_of(config: Any, block_size: int) -> Geometry:
    """The shape of a layer of a Llama-like model."""
    return Geometry(
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        layers=config.num_hidden_layers,
        block_size=block_size,
        initializer_range=config.initializer_range,
    )


def head_dim(config: Any) -> int:
    """Features of a head; some families leave them to the width."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def known(name: Any, names: Any, what: str) -> None:
    """Refuse a name that is not among `names`; suggest the nearest."""
    if name not in names:
        raise ValueError(f"{what}={name!r}: {suggest(str(name), names)}")


def _check_window(window: int | None, local_attention: str, block_size: int) -> None:
    """Refuse a window that nothing uses, or that is not made of whole blocks."""
    if window is None:
        return
    if local_attention != "sliding":
        raise ValueError(f"window={window} with local_attention={local_attention!r}: only 'sliding' has a window")
    if window < block_size or window % block_size:
        raise ValueError(f"window={window}: give a multiple of block_size={block_size}, as memory is written by blocks")


def refuse_dropout(config: Any) -> None:
    """Refuse attention dropout: the kernels of attention with memory have none."""
    rate = getattr(config, "attention_dropout", 0)
    if rate:
        raise ValueError(f"attention_dropout={rate}: attention with memory has no dropout; give attention_dropout=0.0")


# What transformers itself passes beside the declared fields, in files and in code.
_TRANSFORMERS = {
    "attn_implementation", "auto_map", "dtype", "model_type", "name_or_path", "num_labels", "output_attentions",
    "quantization_config", "rope_scaling", "rope_theta", "torch_dtype", "experts_implementation", "default_theta",
    "ignore_keys_at_rope_validation", "return_unused_kwargs", RECORD,
}  # fmt: skip
LOADED = "_loaded"  # the keyword by which `from_dict` passes on unknown keys


def _unknown(kind: Any, given: dict[str, Any]) -> dict[str, str | None]:
    """Keys that no setting has, each with the setting that may be meant."""
    names = [item.name for item in fields(kind)]
    unknown = [name for name in sorted(given.keys() - {*names, *_TRANSFORMERS}) if not name.startswith("_")]
    return {name: nearest(name, names) for name in unknown}
