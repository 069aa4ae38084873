"""`elastic bench`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_memory.commands.options import check_range


def bench(
    preset: Annotated[str | None, typer.Option(help="tiny, 100m, 200m or 400m (default: tiny, on a GPU 100m).")] = None,
    memory: Annotated[list[str] | None, typer.Option(help="Memory to time; repeatable (default: all).")] = None,
    multiple: Annotated[int, typer.Option(help="Memory size, as a multiple of the paper's.")] = 1,
    length: Annotated[int | None, typer.Option(help="Tokens in a sample (default: 16 blocks).")] = None,
    rows: Annotated[int, typer.Option(help="Samples in a training step.")] = 2,
    repeats: Annotated[int, typer.Option(help="Timed rounds, after warm-up; an odd number is rounded up.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> None:
    """Time training, evaluation and decoding of every memory, as ratios to the model without memory.

    All models are timed in one process, in interleaved rounds. On a GPU they are compiled first, as in training: up to
    half a minute each.

        elastic bench

        elastic bench --preset 100m --memory elastic --multiple 4 --out bench.json
    """
    import torch
    from rich.console import Console

    import elastic_memory as em
    from elastic_memory.common.environment import environment, hardware
    from elastic_memory.common.files import check_writable, write_json
    from elastic_memory.common.progress import Bars
    from elastic_memory.evaluation.throughput import Workload, throughput
    from elastic_memory.memory import MEMORIES
    from elastic_memory.report.tables import Table

    check_range(1, rows=rows, length=length, repeats=repeats)
    check_range(1, 1000, multiple=multiple)
    if out:
        check_writable(out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = preset or ("100m" if device == "cuda" else "tiny")
    names = ["none", *(name for name in memory or MEMORIES if name != "none")]
    shared: dict[str, Any] = {"memory_multiple": multiple, "pad_heads": device == "cuda"}
    configs = {name: em.MemoryLlamaConfig.preset(size, memory=name, **shared) for name in names}
    block = configs["none"].block_size
    work = Workload(length=length or 16 * block, rows=rows, history=4 * block, decoded=32, repeats=repeats)
    models: dict[str, Any] = {name: em.MemoryLlamaForCausalLM(config) for name, config in configs.items()}
    for model in models.values():
        model.to(device)
        if device == "cuda":
            model.compile_blocks()
    with Bars(transient=True) as progress:
        task = progress.add_task("timing, after warm-up", total=work.rounds, unit="rounds")
        timed = throughput(models, work, lambda rounds: progress.advance(task, rounds))

    title = f"{size}, {multiple}x memory, samples of {work.length} tokens, {rows} at a time, on {hardware()}"
    columns = ["memory", "training samples/s", "ratio", "evaluation samples/s", "ratio", "decoding tokens/s", "ratio"]
    Console().print(Table(title, [*columns, "peak"], [_cells(one) for one in timed]).rich())
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"preset": size, "multiple": multiple, "device": hardware(), "torch": torch.__version__}
        facts |= {"work": dataclasses.asdict(work), "results": [dataclasses.asdict(one) for one in timed]}
        write_json(out, facts | environment())


def _cells(one: Any) -> list[str]:
    rates = [one.training, one.training_ratio, one.inference, one.inference_ratio, one.decoding, one.decoding_ratio]
    cells = [f"{value:.2f}" if i % 2 else f"{value:.3g}" for i, value in enumerate(rates)]
    return [one.name, *cells, "" if one.peak_memory is None else f"{one.peak_memory / 2**30:.2f} GiB"]
