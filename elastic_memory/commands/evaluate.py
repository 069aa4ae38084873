"""`elastic evaluate`."""

import dataclasses
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_memory.commands.options import LARGEST_MEMORY, check_range, refuse_unused
from elastic_memory.common import defaults

# Options by the metrics that use them; a metric is given by its name or how that begins.
USED_BY = {
    ("ppl",): ("protocol", "stride", "batch_size"),
    ("longppl",): ("reference", "trunc_len", "sliding_window", "alpha", "beta", "keys"),
    ("reconstruction",): ("orders",),
    ("recall", "mqar"): ("recall_steps",),
    ("ruler-",): ("ruler_lengths",),
}

Metrics = Annotated[
    list[str] | None,
    typer.Option(
        help="ppl (default), longppl, reconstruction, spectrum, recall, mqar, ruler-niah, ruler-variables, "
        "ruler-words; repeatable."
    ),
]
Protocols = Annotated[
    list[str] | None,
    typer.Option(
        help="PPL: P0 streams each row with memory, P1 reads overlapping windows, P4 erases memory at every block; "
        "repeatable. Default P0."
    ),
]
Limit = Annotated[int | None, typer.Option(help="Evaluate only this many rows, spread evenly over all documents.")]
Out = Annotated[Path | None, typer.Option(help="Write the results to this JSON file; makes the evaluation resumable.")]
Stride = Annotated[int | None, typer.Option(help="P1: tokens between two windows (default: a quarter of a block).")]
Sampling = Annotated[str | None, typer.Option(help="Read the memory with another sampling than in training.")]
Points = Annotated[int | None, typer.Option(help="Read the memory at this many sample points.")]
Order = Annotated[int | None, typer.Option(help="Use a memory of this order instead of the trained one.")]
Corrupt = Annotated[float, typer.Option(help="Share of the tokens of each block whose keys and values become noise.")]
CorruptLayers = Annotated[str, typer.Option(help="Which layers get the noise: memory (those with memory) or all.")]
Reference = Annotated[str, typer.Option(help="LongPPL: the model that finds the key tokens.")]
TruncLen = Annotated[
    int | None,
    typer.Option(help=f"LongPPL: tokens of the short context (default {defaults.TRUNC_LEN}, at most length/8)."),
]
SlidingWindow = Annotated[
    int | None,
    typer.Option(
        help=f"LongPPL: tokens between two short contexts (default {defaults.SLIDING_WINDOW}, at most length/32)."
    ),
]
Alpha = Annotated[float, typer.Option(help="LongPPL: key tokens gain more than this from the long context, in nats.")]
Beta = Annotated[float, typer.Option(help="LongPPL: key tokens have a log-probability above this in the long context.")]
Keys = Annotated[Path | None, typer.Option(help="LongPPL: folder that keeps key tokens, to find them only once.")]
Orders = Annotated[list[int] | None, typer.Option("--reconstruct", help="Reconstruction: an order to try; repeatable.")]
RecallSteps = Annotated[
    int, typer.Option(help="Recall, MQAR: fine-tune a copy of the model for this many steps first.")
]
RulerLengths = Annotated[
    list[int] | None,
    typer.Option(
        "--ruler-length",
        help=f"RULER: tokens of a prompt; repeatable (default {', '.join(map(str, defaults.RULER_LENGTHS))}).",
    ),
]


def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A run folder, a model folder, or a causal LM on the hub.")],
    data: Annotated[Path | None, typer.Option(help="A folder written by `elastic prepare`.")] = None,
    metric: Metrics = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    limit: Limit = None,
    out: Out = None,
    batch_size: Annotated[int, typer.Option(help="Rows evaluated at a time.")] = 1,
    protocol: Protocols = None,
    stride: Stride = None,
    sampling: Sampling = None,
    points: Points = None,
    order: Order = None,
    corrupt: Corrupt = 0.0,
    corrupt_layers: CorruptLayers = "memory",
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    reference: Reference = defaults.LONGPPL_REFERENCE,
    trunc_len: TruncLen = None,
    sliding_window: SlidingWindow = None,
    alpha: Alpha = defaults.ALPHA,
    beta: Beta = defaults.BETA,
    keys: Keys = None,
    orders: Orders = None,
    recall_steps: RecallSteps = defaults.RECALL_STEPS,
    ruler_lengths: RulerLengths = None,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Measure a model: perplexity, LongPPL, and probes of its memory.

    Every number is printed with its protocol. To resume an interrupted evaluation, repeat it with the same --out.

        elastic evaluate runs/my-model --data rows --out results/my-model.json

        elastic evaluate runs/my-model --data rows --metric longppl \\
          --reference runs/full-attention

        elastic evaluate runs/my-model --data rows --corrupt 0.5
    """
    from elastic_memory.data import samples
    from elastic_memory.evaluation.longppl import Settings
    from elastic_memory.evaluation.metrics import OWN_ROWS, Conditions

    check_range(1, batch_size=batch_size, limit=limit, stride=stride)
    check_range(1, 10**8, trunc_len=trunc_len, sliding_window=sliding_window, ruler_length=ruler_lengths)
    check_range(1, LARGEST_MEMORY, points=points, order=order, reconstruct=orders)
    check_range(0, recall_steps=recall_steps, seed=seed)
    check_range(-1000, 1000, alpha=alpha, beta=beta)
    _refuse_unused(context, metric or ["ppl"], protocol or ["P0"], bool(data), bool(corrupt))
    if data is None and not set(metric or ["ppl"]) <= OWN_ROWS:
        raise ValueError("--data is missing: a folder written by `elastic prepare`")
    rows = samples(data, split) if data else None
    longppl = {"trunc_len": trunc_len, "sliding_window": sliding_window, "alpha": alpha, "beta": beta}
    noise: dict[str, Any] = {"corrupt": corrupt, "corrupt_layers": corrupt_layers, "seed": seed}
    _evaluate(
        checkpoint, metric or ["ppl"], rows, limit, out,
        conditions=Conditions(sampling=sampling, points=points, order=order, **noise),
        settings=Settings.scaled(rows.length if rows else defaults.LENGTH, **longppl), keys=keys,
        protocols=protocol or ["P0"], stride=stride, batch_size=batch_size, reference=reference,
        orders=orders or [], recall_steps=recall_steps, ruler_lengths=ruler_lengths,
    )  # fmt: skip


def _refuse_unused(context: typer.Context, metrics: list[str], protocols: list[str], data: bool, noise: bool) -> None:
    """Refuse options that none of the metrics uses."""
    for users, names in USED_BY.items():
        if not any(metric.startswith(users) for metric in metrics):
            refuse_unused(context, f"without --metric {' or '.join(users)}", *names)
    if "P1" not in protocols:
        refuse_unused(context, "without --protocol P1", "stride")
    if not noise:
        refuse_unused(context, "without --corrupt", "corrupt_layers", "seed")
    if not data:
        refuse_unused(context, "without --data", "split", "limit")


def _evaluate(
    checkpoint: str, metrics: list[str], rows: Any, limit: int | None, out: Path | None, **fields: Any
) -> None:
    """Load the model, evaluate it, print the results and write them; `fields` are those of `Evaluation`."""
    from elastic_memory.common.files import check_writable
    from elastic_memory.evaluation.inputs import Spread
    from elastic_memory.evaluation.loading import tokenizer_of
    from elastic_memory.evaluation.metrics import Evaluation
    from elastic_memory.evaluation.record import with_progress, write_record

    if out:
        check_writable(out)
        fields |= {"keys": fields["keys"] or out.parent / "keys", "partial": out.with_name(f".{out.name}.partial")}
    if rows is not None:
        identity = {"data": rows.fingerprint, "split": rows.split}
        fields |= {"tokenizer": rows.tokenizer(), "identity": identity}
    else:
        fields["tokenizer"] = tokenizer_of(checkpoint)
    model = _load(checkpoint, rows, fields["conditions"])
    evaluation = Evaluation(model=model, rows=Spread(rows, limit or len(rows)) if rows is not None else [], **fields)
    results = with_progress(evaluation, metrics)
    _show(results)
    if out and evaluation.partial:
        write_record(out, checkpoint, evaluation, rows, results)
        shutil.rmtree(evaluation.partial, ignore_errors=True)


def _load(checkpoint: str, rows: Any, conditions: Any) -> Any:
    """Load the model; refuse rows of another tokenizer, and conditions that the model cannot have."""
    from elastic_memory.data.samples import check_vocabulary
    from elastic_memory.evaluation.loading import check_tokenizer, load_model, tokenizer_of

    model = load_model(checkpoint)
    if rows is not None:
        check_tokenizer(checkpoint, rows.tokenizer(), f"{rows.folder} ({rows.manifest['tokenizer']['name']})")
    conditions.apply(model)
    if rows is not None:
        rows.verify_rows()
        check_vocabulary(rows, checkpoint, tokenizer_of(checkpoint), model.config.vocab_size)
    return model


def _show(results: dict[str, Any]) -> None:
    from rich.console import Console

    from elastic_memory.report.tables import Table, number

    console = Console()
    for name, result in results.items():
        entries = list(result.values()) if isinstance(result, dict) else [result]
        if isinstance(result, list):
            fields = [field.name for field in dataclasses.fields(result[0])]
            cells = [[_cell(getattr(entry, field), number) for field in fields] for entry in result]
            console.print(Table(name, fields, cells).text(console.width))
            continue
        for entry in entries:
            console.print(str(entry), highlight=False, markup=False, soft_wrap=True)
        if name == "ppl":
            blocks = max(len(entry.by_block) for entry in entries)
            cells = [[str(i), *(f"{entry.by_block[i]:.4g}" for entry in entries)] for i in range(blocks)]
            if blocks <= 32:
                console.print(Table("PPL by block", ["block", *result], cells).text(console.width))


def _cell(value: Any, number: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(number, value[:8])) + (" ..." if len(value) > 8 else "")
    return number(value) if isinstance(value, float) else str(value)
