"""What to train, and how: models of pydantic filled from YAML. A `Recipe` is all of a run but its data.

A file may name a `base:` file in its folder, whose keys it overrides, and a `grid:` of variants (`variants`).
"""

import copy
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from elastic_memory.common.names import suggest
from elastic_memory.common.strict import read_yaml

RECIPES = Path(__file__).parents[1] / "recipes"  # recipes that come with the package

# A whole number, which may be written as 40e9.
Count = Annotated[int, BeforeValidator(lambda value: int(value) if type(value) is float and value % 1 == 0 else value)]


class Section(BaseModel):
    """A part of a recipe: unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Model(Section):
    """The model: a preset of `MemoryLlamaConfig`, its memory, and any other field of the configuration."""

    preset: str
    memory: str = "none"
    memory_multiple: Count = 1
    sampling: str | None = None  # only for memories that sample their history
    order_per_multiple: Count | None = None  # None: the preset's own accounting (540 k, or 45 k summaries)
    config: dict[str, Any] = {}


class Start(Section):
    """The model that fine-tuning starts from; `elastic train --from` fills this in."""

    path: str
    sha256: str  # of its weights and configuration


class Lora(Section):
    """Train low-rank updates of some matrices, and the memory's own parameters; they are merged at the end."""

    rank: Count = Field(ge=1, le=10_000)
    alpha: float = Field(gt=0, le=10**6)
    targets: list[str] = Field(min_length=1)


class Training(Section):
    """What is done to the model: everything here changes the trained weights."""

    tokens: Count = Field(ge=1, le=10**15)
    length: Count = Field(ge=1, le=10**9)
    corpus_tokens: Count | None = None  # use only this many tokens of the corpus, spread over it; None: all
    batch_tokens: Count = Field(ge=1, le=10**11)
    precision: Literal["bf16", "fp32"] = "bf16"
    learning_rate: float = Field(2e-3, gt=0, le=100)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    epsilon: float = Field(1e-7, gt=0, le=1)
    weight_decay: float = Field(0.1, ge=0, le=1000)
    gate_lr_scale: float = Field(1.0, ge=0, le=10**6)
    clip: float = Field(1.0, gt=0, le=10**9)
    warmup: float = Field(0.01, ge=0, lt=1)  # share of all steps
    seed: Count = Field(42, ge=0, lt=2**32)
    lora: Lora | None = None  # None: all weights are trained

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.tokens // self.batch_tokens

    @property
    def batch(self) -> int:
        """Samples of one optimizer step, over all devices."""
        return self.batch_tokens // self.length

    @property
    def warmup_steps(self) -> int:
        """Steps until the full learning rate."""
        return max(1, math.ceil(self.steps * self.warmup))


class Stability(Section):
    """When a step is not applied, and when training restarts from an earlier checkpoint; see `spikes` for the rule."""

    sigmas: float = Field(6.0, gt=0, le=10**6)
    window: Count = Field(128, ge=1, le=10**6)
    patience: Count = Field(3, ge=1, le=10**6)
    restarts: Count = Field(3, ge=0, le=10**6)


class Execution(Section):
    """How the work is run and saved: these keys may change rounding, but not the model, the data or the optimizer."""

    micro_batch: Count = Field(1, ge=1, le=10**6)
    save_every: Count = Field(200, ge=1, le=10**12)
    keep: Count = Field(2, ge=1, le=10**6)
    compile: bool = False
    gradient_checkpointing: bool = False
    deterministic: bool = False
    on_oom: Literal["stop", "halve"] = "stop"
    device: Literal["auto", "cpu"] = "auto"
    report_to: list[str] = []


class Recipe(Section):
    """One run, resolved: print it with `to_dict`, name it with `name` and `digest`."""

    name: str
    model: Model | None = None  # None: that of `start`
    training: Training
    tokenizer: str | None = None  # how the hash of the rows' tokenizer must begin; None: any of the right size
    stability: Stability = Stability()
    execution: Execution = Execution()
    start: Start | None = None  # None: weights are drawn from the seed
    variant: str = ""  # what differs from its file, for the name of the run's folder

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}", self.name):
            raise ValueError(
                f"name: {self.name[:120]!r}, which names a folder: up to 100 letters, digits and . _ + -, a letter or "
                "digit first"
            )
        if self.model is not None and self.start is not None:
            raise ValueError("model, start: a model is built or taken from a folder, not both: leave one out")
        training = self.training
        if training.corpus_tokens is not None and not training.length <= training.corpus_tokens <= 10**15:
            raise ValueError(
                f"training.corpus_tokens: {training.corpus_tokens:,}, expected one row, {training.length:,}, or more"
            )
        if training.batch_tokens % training.length:
            raise ValueError(
                f"training.batch_tokens: {training.batch_tokens:,}, not a multiple of training.length "
                f"{training.length:,}"
            )
        if training.tokens < training.batch_tokens:
            raise ValueError(
                f"training.tokens: {training.tokens:,}, less than one step of {training.batch_tokens:,} "
                "(training.batch_tokens): give more tokens or a smaller step"
            )
        return self

    @property
    def built(self) -> Model:
        """The section `model`; a recipe for fine-tuning has none."""
        if self.model is None:
            raise ValueError(f"{self.name} has no section model: give --from FOLDER, the model to fine-tune")
        return self.model

    @classmethod
    def parse(cls, tree: Any, source: str) -> "Recipe":
        """The recipe of nested dictionaries; a ValueError names the first key that is wrong and what fits."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            # a misspelt required key gives two errors, "unknown" and "missing": report "unknown"
            first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        kind, path, value = first["type"], ".".join(map(str, first["loc"])), str(first["input"])[:80]
        if kind == "value_error":
            raise ValueError(f"{source}: {first['ctx']['error']}")
        if kind == "missing":
            raise ValueError(f"{source}: {path} is missing")
        if kind == "extra_forbidden":
            *sections, key = map(str, first["loc"])
            known = cls.model_fields
            for section in sections:
                known = _section(known[section].annotation).model_fields
            raise ValueError(f"{source}: unknown key {path}; {suggest(key, known)}")
        fits = first["msg"].removeprefix("Input should be ").partition(" or instance of")[0]
        fits = fits.replace("valid dictionary", "section of keys")
        raise ValueError(f"{source}: {path or 'recipe'}: {value!r}, expected {fits}")

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, every default written out."""
        return self.model_dump()

    def digest(self, data: str = "") -> str:
        """Ten hex digits that identify what is trained: model or start, training, stability and the data's hash.

        Keys that are None do not count, so that a key added later does not rename earlier runs.
        """
        tree = self.to_dict()
        sections = {key: tree[key] for key in ("model", "training", "stability", "start") if tree[key] is not None}
        sections.get("start", {}).pop("path", None)  # a folder that moved holds the same model
        what = {key: {k: v for k, v in section.items() if v is not None} for key, section in sections.items()}
        return hashlib.sha256(json.dumps([what, data], sort_keys=True).encode()).hexdigest()[:10]

    def replace(self, **keys: Any) -> "Recipe":
        """A copy with dotted keys changed: `recipe.replace(**{"execution.micro_batch": 2})`."""
        tree = self.to_dict()
        for key, value in keys.items():
            _set(tree, key, value, "replace")
        return Recipe.parse(tree, "recipe")


def _section(annotation: Any) -> type[Section]:
    """The class of a key that holds a section, or a section or None."""
    return next(kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and kind is not NoneType)


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
    return Recipe.parse(tree, path.name)


def find_recipe(path: str | Path) -> Path:
    """The path of a recipe file, or of a recipe of the package such as `smoke/elastic`."""
    packaged = RECIPES / f"{path}.yaml"
    if Path(path).is_file() or not packaged.is_file() or RECIPES not in packaged.resolve().parents:
        return Path(path)
    return packaged


def variants(path: str | Path) -> list[Recipe]:
    """All recipes of a file: every combination of values in each entry of its `grid:`, or the recipe alone."""
    path = find_recipe(path)
    tree, grid = _read(path)
    recipes = []
    for entry in grid or [{}]:
        lists = [value if isinstance(value, list) else [value] for value in entry.values()]
        for values in itertools.product(*lists):
            variant = copy.deepcopy(tree)
            for key, value in zip(entry, values, strict=True):
                _set(variant, key, value, f"{path.name}: grid")
            recipes.append(Recipe.parse(variant, path.name))
    return recipes


def _read(path: Path, above: tuple[str, ...] = ()) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The sections and the grid of a file, those of its base below them; `above`: the files that it is a base of."""
    if not path.is_file():
        packaged = [file.relative_to(RECIPES).with_suffix("").as_posix() for file in sorted(RECIPES.glob("*/*.yaml"))]
        known = [name for name in packaged if not name.endswith("/base") and not name.startswith("launch/")]
        raise FileNotFoundError(
            f"no recipe {path}: neither a file nor a recipe of the package; {suggest(str(path), known)}"
        )
    tree = read_yaml(path.read_text(encoding="utf-8", errors="replace"), path.name)
    if not isinstance(tree, dict):
        raise ValueError(f"{path.name}: a recipe is a mapping of sections, not a {type(tree).__name__}")
    base, grid = tree.pop("base", None), tree.pop("grid", [])
    if not isinstance(grid, list) or not all(isinstance(entry, dict) for entry in grid):
        raise ValueError(f"{path.name}: grid: expected a list of mappings from keys to values")
    if base is not None:
        if Path(str(base)).name != base or base in (*above, path.name):
            raise ValueError(f"{path.name}: base: {base!r}, expected another file of the same folder")
        below, _ = _read(path.parent / base, (*above, path.name))
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
