"""The catalogue of memories, from the registry and from models built for it.

python -m elastic_memory.report.catalogue        # in the root of the repository: docs/catalogue.md
"""

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from elastic_memory.memory import MEMORIES, Memory, ParallelMemory
from elastic_memory.model import MemoryLlamaConfig, MemoryLlamaForCausalLM

SIZE = "100m"
MULTIPLES = (1, 2, 4, 8, 16)

INTRODUCTION = """\
# Memories

```python
import elastic_memory as em

config = em.MemoryLlamaConfig.preset("100m", memory="infini", memory_options={"update": "linear"})
```

All memories run on the same backbone behind one contract (`memory/contract.py`), so models differ in the mechanism
alone. `memory_options` takes the options listed below, except `order`, `points`, `sampling` and `sampling_options`,
which are settings of the configuration (`memory_order`, `memory_points`, `sampling`, `sampling_options`). Every memory
also takes `detach_every`: gradients are cut every so many blocks; and `silent`: a learned blend per head that starts at
zero ([silent start](choices.md#silent-start)). Training recipes scale the learning rate of gates and blends by
`gate_lr_scale`."""

NOTE = f"""\
At the {SIZE} preset and the paper's 1x. *State*: floats carried per sample, whole model. *Added*: parameters.
*Training*: whether all blocks of a sample are read in parallel or one after another. *Joins*: whether memories of texts
that were read separately can be joined ([joining](composing.md)). This page is written by
`python -m elastic_memory.report.catalogue`.
"""


def facts(name: str, multiple: int = 1) -> dict[str, Any] | None:
    """Counts of a model of the paper's size; None if the memory has no such multiple."""
    try:
        config = MemoryLlamaConfig.preset(SIZE, memory=name, memory_multiple=multiple)
    except ValueError:
        return None
    with torch.device("meta"):
        model = MemoryLlamaForCausalLM(config)
        memory = next(iter(model.memories.values()), model.model.layers[0].memory)
    report = model.memory_report()
    return {
        "memory": memory,
        "layers": [line["layer"] for line in report],
        "counted": sum(line["state_floats"] for line in report),
        "carried": sum(line["carried_floats"] for line in report),
        "added": sum(line["extra_parameters"] for line in report),
        "whole": sum(parameter.numel() for parameter in model.parameters()),
    }


def overview() -> str:
    """The table of all memories."""
    rows = []
    for name in MEMORIES:
        known = facts(name)
        assert known is not None
        memory, layers = known["memory"], known["layers"]
        rows.append(
            [
                f"`{name}`",
                memory.info.phrase,
                memory.info.source,
                f"{known['carried']:,}",
                f"{known['added']:,}",
                "all" if len(layers) == memory.geometry.layers else ", ".join(map(str, layers)) or "none",
                _reach(memory),
                "parallel" if isinstance(memory, ParallelMemory) else "sequential",
                _joins(memory, layers),
            ]
        )
    columns = ["memory", "in a phrase", "source", "state", "added", "layers", "reach", "training", "joins"]
    return f"{_table(columns, rows)}\n\n{NOTE}"


def page() -> str:
    """docs/catalogue.md."""
    parts = [INTRODUCTION, overview().rstrip()]
    parts += [_section(name, kind) for name, kind in MEMORIES.items()]
    return "\n\n".join(parts) + "\n"


def _section(name: str, kind: type[Memory]) -> str:
    known = [(multiple, found) for multiple in MULTIPLES if (found := facts(name, multiple))]
    memory = known[0][1]["memory"]
    lines = [f"## {name}", f"{inspect.getdoc(kind)}", f"Source: {kind.info.source}."]
    if known[0][1]["counted"]:
        sizes = [
            [f"{multiple}x", f"{it['counted']:,}", f"{it['carried']:,}", f"{it['added']:,}", f"{it['whole']:,}"]
            for multiple, it in known
        ]
        lines.append(_table(["size", "floats, as the paper counts", "carried", "added parameters", "all"], sizes))
    lines.append("Options: " + (", ".join(options(kind)) or "none") + ".")
    if memory.no_sliding:
        lines.append(f'`local_attention="sliding"` is refused: {memory.no_sliding}.')
    if memory.no_join:
        lines.append(f"Memories of parts cannot be joined: {memory.no_join}.")
    return "\n\n".join(lines)


def options(kind: type[Memory]) -> Iterable[str]:
    """A memory's options and their defaults."""
    for option in inspect.signature(kind.__init__).parameters.values():
        if option.name not in ("self", "geometry", "detach_every"):
            yield f"`{option.name}={option.default!r}`"


def _reach(memory: Memory) -> str:
    if memory.reach is None:
        return "whole history"
    return f"{memory.reach:,} tokens before the block" if memory.reach else "its own block"


def _joins(memory: Memory, layers: Sequence[int]) -> str:
    if memory.no_join:
        return "no"
    return "exactly" if len(layers) < 2 else "approximately"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows))


def write(root: Path) -> None:
    """Bring docs/catalogue.md up to date."""
    (root / "docs" / "catalogue.md").write_text(page(), encoding="utf-8")


def insert(text: str, table: str, mark: str = "catalogue") -> str:
    """`text` with `table` between its marks."""
    marked = re.compile(f"(?<=<!-- {mark} -->\n).*?(?=<!-- /{mark} -->)", re.DOTALL)
    if not marked.search(text):
        raise ValueError(f"no place for the {mark}: <!-- {mark} --> and <!-- /{mark} --> must mark it")
    return marked.sub(lambda _: table, text)


if __name__ == "__main__":
    write(Path.cwd())
