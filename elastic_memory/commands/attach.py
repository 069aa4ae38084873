"""`elastic attach`."""

from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_memory.commands.options import LARGEST_MEMORY, check_range
from elastic_memory.common.defaults import BLOCK_SIZE

Layers = Annotated[
    list[int] | None,
    typer.Option(help="A layer that gets the memory, counted from 0; repeatable. Default: as in the paper."),
]
BlockSize = Annotated[
    int | None,
    typer.Option(help=f"Tokens in a block, in all layers; memory is updated once a block. Default: {BLOCK_SIZE:,}."),
]
Local = Annotated[str, typer.Option(help="block: attention inside blocks; sliding: to the last --window tokens.")]
Window = Annotated[
    int | None, typer.Option(help="With --local sliding: a multiple of --block-size. Default: one block.")
]
Order = Annotated[int | None, typer.Option(help="Size of the memory: coefficients, or tokens of a queue.")]
Options = Annotated[
    list[str] | None, typer.Option("--set", help="A further option of the memory, as option=value; repeatable.")
]
Dtype = Annotated[
    str | None, typer.Option(help="bfloat16 or float32. Default: as the checkpoint; bfloat16 for a GGUF file.")
]


def attach(
    model: Annotated[str, typer.Argument(help="A name on the hub, a model folder, or a GGUF file.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist.")],
    memory: Annotated[str | None, typer.Option(help="Which memory (docs/catalogue.md). Default: elastic.")] = None,
    layers: Layers = None,
    block_size: BlockSize = None,
    local: Local = "block",
    window: Window = None,
    order: Order = None,
    points: Annotated[int | None, typer.Option(help="Number of sample points at which the memory is read.")] = None,
    sampling: Annotated[str | None, typer.Option(help="Where the points lie: uniform, exponential, ...")] = None,
    set_: Options = None,
    dtype: Dtype = None,
) -> None:
    """Give a pretrained model a memory, and write both to a folder.

    The weights are copied unchanged. All other commands take the folder as they take a training run. The memory is of
    use only after training: `elastic train --from`.

        elastic attach HuggingFaceTB/SmolLM2-135M --layers 20 --local sliding \\
          --out smollm2-memory

        elastic attach model.gguf --memory memorizing --layers 10 --layers 20 \\
          --order 540 --out with-queue
    """
    from elastic_memory.common.names import suggest
    from elastic_memory.evaluation.attaching import DTYPES, write_attached

    check_range(1, 10**8, block_size=block_size, window=window)
    check_range(1, LARGEST_MEMORY, order=order, points=points)
    check_range(0, layers=layers)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: {suggest(dtype, DTYPES)}")
    made = write_attached(
        model, out, dtype, memory=memory, layers=layers, block_size=block_size, local_attention=local,
        window=window, order=order, points=points, sampling=sampling, **_options(set_ or []),
    )  # fmt: skip
    _show(made, out)


def _options(given: list[str]) -> dict[str, Any]:
    """The values of `--set option=value`; what has an option of its own on the command line is refused."""
    from elastic_memory.common.strict import read_yaml
    from elastic_memory.model import attach_memory

    own = signature(attach_memory).parameters.keys() - {"sampling_options", "silent"}
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--set {text}: expected option=value, such as decay=0.9")
        if name in own or name in options:
            raise ValueError(f"--set {text}: {name} is given twice, or has an option of its own (see --help)")
        options[name] = read_yaml(value, f"--set {name}")
    return options


def _show(model: Any, out: Path) -> None:
    """What the memory holds and costs, and what to do next."""
    from rich.console import Console

    from elastic_memory.report.tables import Table

    report = model.memory_report()
    columns = ["layer", "memory", "state_floats", "extra_parameters"]
    cells = [[f"{x:,}" if isinstance(x := row[name], int) else x for name in columns] for row in report]
    console = Console()
    if cells:
        console.print(Table("memory", [name.replace("_", " ") for name in columns], cells).rich())
    size = sum(path.stat().st_size for path in out.iterdir())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"{out}: {parameters:,} parameters in {str(model.dtype).removeprefix('torch.')}, {size / 1e6:,.0f} MB. Next:\n"
        f"  elastic prepare stdlib --tokenizer {out} --length 16384 --out rows\n"
        f"  elastic train finetune/full --from {out} --data rows\n"
        f"  elastic evaluate {out} --data rows\n"
        f"  elastic generate {out} --prompt-file book.txt --memory book.memory.safetensors",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
