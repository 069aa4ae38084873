"""`elastic evaluate`."""

import dataclasses
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_memory.commands.options import LARGEST_MEMORY, check_range

PADDING = 1024  # how many more tokens a model may have than its tokenizer, to make its size round


def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A run, a model folder, or a causal LM on the hub.")],
    data: Annotated[Path | None, typer.Option(help="A folder that `elastic prepare` wrote.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="ppl, longppl, reconstruction, spectrum, recall; may be repeated.")
    ] = None,
    split: Annotated[str, typer.Option(help="Which rows.")] = "test",
    limit: Annotated[int | None, typer.Option(help="Only so many rows, spread over all documents.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write JSON here; run again after an interruption, it goes on.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows at a time.")] = 1,
    protocol: Annotated[
        list[str] | None, typer.Option(help="P0 streams; P1 overlapping windows; P4 forgets at every block.")
    ] = None,
    stride: Annotated[int | None, typer.Option(help="P1: how far windows move (default a quarter block).")] = None,
    sampling: Annotated[str | None, typer.Option(help="Read the memory by another sampling than trained with.")] = None,
    points: Annotated[int | None, typer.Option(help="... at another number of points.")] = None,
    order: Annotated[int | None, typer.Option(help="... with another order.")] = None,
    corrupt: Annotated[float, typer.Option(help="Share of each block's keys and values that noise replaces.")] = 0.0,
    corrupt_layers: Annotated[str, typer.Option(help="memory, or all: where the noise goes.")] = "memory",
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    reference: Annotated[
        str, typer.Option(help="LongPPL: the model that finds the key tokens.")
    ] = "meta-llama/Llama-3.1-8B",
    trunc_len: Annotated[int | None, typer.Option(help="LongPPL: short context (default 4096, or length/8).")] = None,
    sliding_window: Annotated[int | None, typer.Option(help="LongPPL: step (default 1024, or length/32).")] = None,
    alpha: Annotated[float, typer.Option(help="LongPPL: nats a long context must gain.")] = 2.0,
    beta: Annotated[float, typer.Option(help="LongPPL: least log-probability of a key token.")] = -2.0,
    keys: Annotated[Path | None, typer.Option(help="LongPPL: folder that keeps key tokens between runs.")] = None,
    orders: Annotated[list[int] | None, typer.Option("--reconstruct", help="Orders to reconstruct from.")] = None,
    recall_steps: Annotated[int, typer.Option(help="Recall: fine-tune a copy for so many steps first.")] = 600,
) -> None:
    """Measure a checkpoint: perplexity, LongPPL, and probes of its memory.

    Every number is printed with the protocol that made it. After an interruption, give the same command with the same
    --out again: it goes on where it stopped.

        elastic evaluate runs/small-elastic-1a2b3c --data rows --metric ppl --out results/elastic.json

        elastic evaluate runs/small-elastic-1a2b3c --data rows --metric longppl --reference runs/small-full-4d5e6f

        elastic evaluate runs/small-elastic-1a2b3c --data rows --sampling uniform --corrupt 0.5
    """
    from elastic_memory.common.files import check_replaceable
    from elastic_memory.data import samples
    from elastic_memory.evaluation.loading import check_tokenizer, load_model
    from elastic_memory.evaluation.longppl import Settings
    from elastic_memory.evaluation.metrics import Conditions, Task
    from elastic_memory.evaluation.record import with_progress, write_record
    from elastic_memory.evaluation.rows import Spread

    check_range(1, batch_size=batch_size, limit=limit, stride=stride, trunc_len=trunc_len)
    check_range(1, sliding_window=sliding_window)
    check_range(1, LARGEST_MEMORY, points=points, order=order)
    for one in orders or []:
        check_range(1, LARGEST_MEMORY, reconstruct=one)
    check_range(0, recall_steps=recall_steps, seed=seed)
    check_range(-1000, 1000, alpha=alpha, beta=beta)
    if out:
        check_replaceable(out)
    metrics = metric or ["ppl"]
    if data is None and metrics != ["recall"]:
        raise ValueError("--data is missing: a folder that `elastic prepare` wrote")
    rows, model = samples(data, split) if data else None, load_model(checkpoint)
    tokenizer = rows.tokenizer() if rows is not None else None
    if rows is not None and tokenizer is not None:
        check_tokenizer(checkpoint, tokenizer, f"{rows.folder} ({rows.manifest['tokenizer']['name']})")
    conditions = Conditions(
        sampling=sampling, points=points, order=order, corrupt=corrupt, corrupt_layers=corrupt_layers, seed=seed
    )
    conditions.apply(model)  # what the model cannot do is refused before anything is shown
    if rows is not None:
        rows.verify_rows()
        _check_vocabulary(checkpoint, model.config.vocab_size, rows)
    scaled = Settings.scaled(rows.length if rows else 32768)
    task = Task(
        model=model,
        rows=Spread(rows, limit or len(rows)) if rows is not None else [],
        tokenizer=tokenizer,
        conditions=conditions,
        protocols=protocol or ["P0"],
        stride=stride,
        batch_size=batch_size,
        reference=reference,
        settings=Settings(
            trunc_len=trunc_len or scaled.trunc_len,
            sliding_window=sliding_window or scaled.sliding_window,
            alpha=alpha,
            beta=beta,
        ),
        keys=keys or (out.parent / "keys" if out else None),
        orders=orders or [],
        recall_steps=recall_steps,
        partial=out.with_name(f".{out.name}.partial") if out else None,
        identity={"data": rows.fingerprint, "split": split} if rows is not None else {},
    )
    results = with_progress(task, metrics)
    _show(results)
    if out and task.partial:
        write_record(out, checkpoint, task, rows, results)
        shutil.rmtree(task.partial, ignore_errors=True)


def _check_vocabulary(checkpoint: str, size: int, rows: Any) -> None:
    """Refuse rows of another tokenizer than the model's: by what lies beside it, or at least by its size."""
    from elastic_memory.evaluation.loading import tokenizer_of

    made, own = rows.manifest["tokenizer"], tokenizer_of(checkpoint)
    if own is not None and own.sha256 != made["sha256"]:
        raise ValueError(
            f"{rows.folder} was prepared with {made['name']} ({made['sha256'][:12]}), {checkpoint} has another "
            f"tokenizer ({own.sha256[:12]}): prepare with --tokenizer {checkpoint}"
        )
    if not made["vocab_size"] <= size <= made["vocab_size"] + PADDING:
        raise ValueError(
            f"{rows.folder} has a vocabulary of {made['vocab_size']:,} ({made['name']}), {checkpoint} of {size:,}: "
            "prepare with the model's tokenizer"
        )


def _show(results: dict[str, Any]) -> None:
    from rich.console import Console

    from elastic_memory.report.tables import Table, number

    console = Console()
    for name, result in results.items():
        entries = list(result.values()) if isinstance(result, dict) else [result]
        if isinstance(result, list):
            fields = [field.name for field in dataclasses.fields(result[0])]
            cells = [[_cell(getattr(entry, field), number) for field in fields] for entry in result]
            console.print(_whole_words(Table(name, fields, cells)))
            continue
        for entry in entries:
            console.print(str(entry), highlight=False, markup=False, soft_wrap=True)
        if name == "ppl":
            blocks = max(len(entry.by_block) for entry in entries)
            cells = [[str(i), *(f"{entry.by_block[i]:.4g}" for entry in entries)] for i in range(blocks)]
            if blocks <= 32:
                console.print(_whole_words(Table("PPL by block", ["block", *result], cells)))


def _whole_words(table: Any) -> Any:
    """The table for a terminal, in which a narrow column breaks between numbers and never inside one."""
    shown = table.rich()
    for index, column in enumerate(shown.columns):
        texts = [table.columns[index], *(row[index] for row in table.rows)]
        column.min_width = max(len(word) for text in texts for word in text.split())
    return shown


def _cell(value: Any, number: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(number, value[:8])) + (" ..." if len(value) > 8 else "")
    return number(value) if isinstance(value, float) else str(value)
