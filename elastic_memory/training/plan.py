"""What a run will need: memory by arithmetic, time and cost from measured throughput."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from elastic_memory.common.strict import read_json
from elastic_memory.model.parameters import count_parameters
from elastic_memory.training.build import build_config, flops_per_token
from elastic_memory.training.recipe import Recipe


@dataclass(frozen=True)
class Measured:
    """The speed of a finished run: its recipe, its device, and tokens per second of each device."""

    recipe: Recipe
    device: str
    tokens_per_second: float

    @cached_property
    def kind(self) -> tuple[str, str]:
        """Models of the same kind use a device equally well: same memory, same local attention."""
        return self.recipe.built.memory, build_config(self.recipe).local_attention

    @cached_property
    def flops_per_second(self) -> float:
        """Floating-point operations of a device per second, as `flops_per_token` counts them."""
        return self.tokens_per_second * flops_per_token(build_config(self.recipe), self.recipe.training.length)


@dataclass(frozen=True)
class Plan:
    """What one run needs; `hours` and `cost` are None if no run of its kind was measured."""

    recipe: Recipe
    parameters: int
    gigabytes: float
    tokens_per_second: float | None
    hours: float | None
    cost: float | None
    source: str


def measurements(folder: Path) -> list[Measured]:
    """All training results in a folder that were measured on an accelerator.

    Where several processes shared a device, as records of `elastic reproduce` say, each gets the speed of all of them.
    """
    found = []
    for path in sorted(folder.rglob("*.json")):
        result = read_json(path)
        if not isinstance(result, dict):
            continue
        trained = result["trained"] if isinstance(result.get("trained"), dict) else result
        if not {"recipe", "tokens_per_second", "machine"} <= trained.keys() or trained["machine"]["device"] == "cpu":
            continue
        speed, machine = trained["tokens_per_second"], trained["machine"]
        if "cost" in trained:
            speed = trained["tokens"] / trained["cost"]["seconds"] * trained["cost"]["processes_on_device"]
        recipe = Recipe.parse(trained["recipe"], path.name)
        if recipe.model is not None:  # else fine-tuned: its plan would need the model
            found.append(Measured(recipe, machine["device"], speed / machine["processes"]))
    return found


def make_plan(recipe: Recipe, measured: Iterable[Measured], devices: int, price: float) -> Plan:
    """Plan one run on `devices` devices at `price` per device and hour.

    Speed is that of the measured run of the same kind with the nearest operations per token, scaled by these, and is
    assumed to grow linearly with the number of devices. `source` names that run.
    """
    config = build_config(recipe)
    flops = flops_per_token(config, recipe.training.length)
    parameters = count_parameters(config)
    alike = [run for run in measured if run.kind == (recipe.built.memory, config.local_attention)]
    if not alike:
        source = f"no run with memory {recipe.built.memory} was measured"
        return Plan(recipe, parameters, gigabytes(recipe, config, parameters), None, None, None, source)
    nearest = min(alike, key=lambda run: abs(run.flops_per_second / run.tokens_per_second - flops))
    speed = nearest.flops_per_second / flops
    hours = recipe.training.tokens / (speed * devices) / 3600
    return Plan(
        recipe=recipe,
        parameters=parameters,
        gigabytes=gigabytes(recipe, config, parameters),
        tokens_per_second=speed,
        hours=hours,
        cost=hours * devices * price,
        source=f"{nearest.recipe.name} on {nearest.device}, scaled by operations per token",
    )


def gigabytes(recipe: Recipe, config: Any, parameters: int) -> float:
    """Device memory without sharding: float32 weights, gradients and two moments; activations of one micro-batch.

    A layer keeps about eight tensors of its width and three of its MLP's width for the backward pass.
    """
    tokens = recipe.execution.micro_batch * recipe.training.length
    size = 2 if recipe.training.precision == "bf16" else 4
    layer = size * (8 * config.hidden_size + 3 * config.intermediate_size)
    kept = layer * config.num_hidden_layers
    if recipe.execution.gradient_checkpointing:
        kept = layer + size * config.hidden_size * config.num_hidden_layers
    return (16 * parameters + tokens * kept) / 1e9
