"""Defaults in use are saved with a model, so that later versions with other defaults do not alter it."""

import warnings
from inspect import Parameter, signature
from typing import Any

from elastic_memory.memory import MEMORIES

RECORD = "memory_defaults"  # the key in config.json
NAMED = {"layers": "memory_layers", "order": "memory_order", "points": "memory_points", "sampling": "sampling"}


def defaults(settings: Any) -> dict[str, Any]:
    """What the settings leave to the mechanism: layers, and options whose default is not None."""
    kind, given = MEMORIES[settings.memory], settings.options()
    options = {
        name: parameter.default
        for name, parameter in signature(kind.__init__).parameters.items()
        if name not in given and parameter.default not in (None, Parameter.empty)
    }
    return {
        "memory": settings.memory,
        "layers": settings.layers() if settings.memory_layers is None else None,
        "layers_of": settings.geometry.layers,
        "options": options,
    }


def recorded(settings: Any, record: Any) -> dict[str, Any]:
    """The settings that restore the defaults in `record`: those that have changed since and are not given."""
    if not isinstance(record, dict) or not isinstance(record.get("options"), dict) or "layers" not in record:
        raise ValueError(f"{RECORD}={record!r}: it holds memory, layers and options, as saving a model writes them")
    now = defaults(settings)
    if record.get("memory") != now["memory"]:
        return {}
    options = {
        name: value
        for name, value in record["options"].items()
        if name not in settings.options() and now["options"].get(name) != value
    }
    as_deep = record.get("layers_of") == now["layers_of"]  # else its layers say nothing of this model's
    if as_deep and settings.memory_layers is None and record["layers"] not in (None, now["layers"]):
        options["layers"] = record["layers"]
    changes = {NAMED[name]: options.pop(name) for name in NAMED.keys() & options.keys()}
    return changes | ({"memory_options": settings.memory_options | options} if options else {})


def warn_of_defaults(settings: Any, place: Any) -> None:
    """Name the defaults of a model that was saved without them."""
    now = defaults(settings)
    left = ({"layers": now["layers"]} if now["layers"] else {}) | now["options"]
    if left:
        said = ", ".join(f"{name}={value!r}" for name, value in left.items())
        warnings.warn(
            f"{place} does not record which defaults its memory {settings.memory!r} was trained with. Those of this "
            f"version are used: {said}. If it was trained with others, give them",
            stacklevel=3,
        )
