"""What to train, and how: dataclasses filled from YAML. `Recipe` is the whole of a run but its data.

A file may name a `base:` file beside it, whose keys it overrides, and a `grid:` of variants
(`variants`). Unknown keys are errors.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from elastic_memory.common.names import suggest
from elastic_memory.common.strict import read_yaml

RECIPES = Path(__file__).parents[1] / "recipes"  # recipes that come with the package
TINY, BELOW_ONE = 1e-30, 1 - 1e-9
RANGES: dict[str, tuple[float, float]] = {
    "training.tokens": (1, 10**15), "training.length": (1, 10**9), "training.batch_tokens": (1, 10**11),
    "training.learning_rate": (TINY, 100), "training.beta1": (0, BELOW_ONE), "training.beta2": (0, BELOW_ONE),
    "training.epsilon": (TINY, 1), "training.weight_decay": (0, 1000), "training.gate_lr_scale": (0, 10**6),
    "training.clip": (TINY, 10**9), "training.warmup": (0, BELOW_ONE), "training.seed": (0, 2**32 - 1),
    "stability.sigmas": (TINY, 10**6), "stability.window": (1, 10**6), "stability.patience": (1, 10**6),
    "stability.restarts": (0, 10**6), "execution.micro_batch": (1, 10**6), "execution.save_every": (1, 10**12),
    "execution.keep": (1, 10**6),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model: a preset of `MemoryLlamaConfig`, its memory, and any further field of the configuration."""

    preset: str
    memory: str = "none"
    memory_multiple: int = 1
    sampling: str | None = None  # only for memories that sample their history
    order_per_multiple: int | None = None  # None: the preset's own accounting (540 k, or 45 k summaries)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is done to the model: everything here changes the weights that come out."""

    tokens: int
    length: int
    corpus_tokens: int | None = None  # take so many of the corpus, spread over it; None: all
    batch_tokens: int
    precision: Literal["bf16", "fp32"] = "bf16"
    learning_rate: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-7
    weight_decay: float = 0.1
    gate_lr_scale: float = 1.0
    clip: float = 1.0
    warmup: float = 0.01  # share of all steps
    seed: int = 42

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return max(1, self.tokens // self.batch_tokens)

    @property
    def batch(self) -> int:
        """Samples of one optimizer step, over all devices."""
        return self.batch_tokens // self.length

    @property
    def warmup_steps(self) -> int:
        """Steps until the full learning rate."""
        return max(1, math.ceil(self.steps * self.warmup))


@dataclass(frozen=True, kw_only=True)
class Stability:
    """When a step is not applied, and when training starts again from the last good checkpoint (`spikes`)."""

    sigmas: float = 6.0
    window: int = 128
    patience: int = 3
    restarts: int = 3


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the machine does it: nothing here changes what is trained, only how sums are rounded and what is kept."""

    micro_batch: int = 1
    save_every: int = 200
    keep: int = 2
    compile: bool = False
    gradient_checkpointing: bool = False
    deterministic: bool = False
    on_oom: Literal["stop", "halve"] = "stop"
    device: Literal["auto", "cpu"] = "auto"
    report_to: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run, resolved: print it with `to_dict`, name it with `name` and `digest`."""

    name: str
    model: Model
    training: Training
    tokenizer: str | None = None  # how the hash of the rows' tokenizer must begin; None takes any of the right size
    stability: Stability = field(default_factory=Stability)
    execution: Execution = field(default_factory=Execution)
    variant: str = ""  # in what it differs from its file, for the name of the run's folder

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}", self.name):
            raise ValueError(
                f"name: {self.name[:120]!r}, which names a folder: up to 100 letters, digits and . _ + -, a letter or "
                "digit first"
            )
        for key, (least, most) in RANGES.items():
            section, name = key.split(".")
            value = getattr(getattr(self, section), name)
            if not least <= value <= most:
                bounds = f"{'above 0' if least == TINY else least} to {'below 1' if most == BELOW_ONE else f'{most:,}'}"
                raise ValueError(f"{key}: {value:,}, expected {bounds}")
        training = self.training
        if training.corpus_tokens is not None and not training.length <= training.corpus_tokens <= 10**15:
            raise ValueError(
                f"training.corpus_tokens: {training.corpus_tokens:,}, expected one row, {training.length:,}, or more"
            )
        if training.batch_tokens % training.length:
            raise ValueError(
                f"training.batch_tokens: {training.batch_tokens:,}, no multiple of training.length {training.length:,}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, every default written out."""
        return dataclasses.asdict(self)

    def digest(self, data: str = "") -> str:
        """Ten hex digits that name what is trained: model, training, stability and the data's hash.

        What is not set does not count, so that a key added later does not rename earlier runs.
        """
        sections = {key: self.to_dict()[key] for key in ("model", "training", "stability")}
        what = {key: {k: v for k, v in section.items() if v is not None} for key, section in sections.items()}
        return hashlib.sha256(json.dumps([what, data], sort_keys=True).encode()).hexdigest()[:10]

    def replace(self, **keys: Any) -> "Recipe":
        """A copy with dotted keys changed: `recipe.replace(**{"execution.micro_batch": 2})`."""
        tree = self.to_dict()
        for key, value in keys.items():
            _set(tree, key, value, "replace")
        return convert(tree, Recipe, "recipe", "")


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe of a YAML file, or of the package by its name, with `a.b=c` overrides applied.

    >>> load_recipe("smoke/elastic", ["model.memory_multiple=2"]).model.memory_multiple
    2
    """
    path = find_recipe(path)
    tree, _ = _read(path)
    different = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"--set {override}: expected key=value, such as training.learning_rate=1e-3")
        _set(tree, key.strip(), read_yaml(value, f"--set {key}"), f"--set {override}")
        if key.strip().startswith(("model.", "training.", "stability.")):
            different.append(re.sub(r"[^A-Za-z0-9.+-]+", "_", f"{key.strip().rpartition('.')[2]}_{value.strip()}"))
    if different:
        tree["variant"] = "-".join(different)[:80]
    return convert(tree, Recipe, path.name, "")


def find_recipe(path: str | Path) -> Path:
    """A file, or a recipe of the package such as `smoke/elastic`."""
    packaged = RECIPES / f"{path}.yaml"
    if Path(path).is_file() or not packaged.is_file() or RECIPES not in packaged.resolve().parents:
        return Path(path)
    return packaged


def variants(path: str | Path) -> list[Recipe]:
    """Every model a recipe file stands for: the products of the entries of its `grid:`, or the recipe alone."""
    path = find_recipe(path)
    tree, grid = _read(path)
    recipes = []
    for entry in grid or [{}]:
        lists = [value if isinstance(value, list) else [value] for value in entry.values()]
        for values in itertools.product(*lists):
            chosen = dict(zip(entry, values, strict=True))
            variant = json.loads(json.dumps(tree))
            for key, value in chosen.items():
                _set(variant, key, value, f"{path.name}: grid")
            recipes.append(convert(variant, Recipe, path.name, ""))
    return recipes


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if not path.is_file():
        packaged = [file.relative_to(RECIPES).with_suffix("").as_posix() for file in sorted(RECIPES.glob("*/*.yaml"))]
        known = [name for name in packaged if not name.endswith("/base") and not name.startswith("launch/")]
        raise FileNotFoundError(
            f"no recipe {path}: no such file, nor a recipe of the package; {suggest(str(path), known)}"
        )
    tree = read_yaml(path.read_text(encoding="utf-8", errors="replace"), path.name)
    if not isinstance(tree, dict):
        raise ValueError(f"{path.name}: a recipe is a mapping of sections, this is a {type(tree).__name__}")
    base, grid = tree.pop("base", None), tree.pop("grid", [])
    if not isinstance(grid, list) or not all(isinstance(entry, dict) for entry in grid):
        raise ValueError(f"{path.name}: grid: a list of mappings from keys to values was expected")
    if base is not None:
        if Path(str(base)).name != base or base == path.name:
            raise ValueError(f"{path.name}: base: {base!r}, expected another file of the same folder")
        below, _ = _read(path.parent / base)
        tree = _merge(below, tree)
    return tree, grid


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = _merge(below[key], value) if both else value
    return merged


def _set(tree: dict[str, Any], dotted: str, value: Any, source: str) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{source}: {section} is a value, not a section")
    tree[last] = value


def convert(value: Any, kind: Any, source: str, path: str) -> Any:
    """`value` as the annotated type `kind`, or a ValueError that names the key and what fits."""
    if dataclasses.is_dataclass(kind):
        return _convert_section(value, kind, source, path)
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        inner = next(option for option in options if option is not type(None))
        return None if value is None else convert(value, inner, source, path)
    if origin is Literal:
        if value in options:
            return value
        raise ValueError(f"{source}: {path}: {value!r}, expected one of {', '.join(map(str, options))}")
    if origin is list and isinstance(value, list):
        return [convert(item, options[0], source, f"{path}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return value
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is kind:
        return value
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}.get(kind, str(kind))
    raise ValueError(f"{source}: {path}: {str(value)[:80]!r}, expected {wanted}")


def _convert_section(value: Any, kind: Any, source: str, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{source}: {path or 'recipe'}: {str(value)[:80]!r}, expected a section of keys")
    fields = typing.get_type_hints(kind)
    filled = {}
    for key, item in value.items():
        here = f"{path}.{key}" if path else key
        if key not in fields:
            raise ValueError(f"{source}: unknown key {here}; {suggest(key, fields)}")
        filled[key] = convert(item, fields[key], source, here)
    missing = [
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in filled
    ]
    if missing:
        raise ValueError(f"{source}: {path + '.' if path else ''}{missing[0]} is missing")
    try:
        return kind(**filled)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
