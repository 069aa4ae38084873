"""`elastic demo`: from text to two trained models and a report, on this machine, without a download."""

import contextlib
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from elastic_memory.commands.options import check_range

if TYPE_CHECKING:
    from torch import Tensor

ORDERS = (8, 32, 128, 512)
BLOCK, BLOCKS = 512, 16

MODELS: dict[str, dict[str, Any]] = {
    "transformer++": {"memory": "none"},
    "elastic": {"memory": "elastic", "sampling": "exponential", "memory_multiple": 4, "config": {"memory_points": 64}},
}
MODEL_BLOCK, LENGTH, STEP = 64, 1024, 4096  # bytes of a block, of a row, and of an optimizer step
HELD_OUT_ROWS = 192


def demo(
    out: Annotated[Path, typer.Option(help="Folder for data, runs, plots and the report.")] = Path("demo"),
    tokens: Annotated[int, typer.Option(help="Bytes of text that each model is trained on.")] = 2_048_000,
) -> None:
    """Train two tiny models on this machine and compare them: a few minutes on two cores, no download.

    First the memory alone: four signals are compressed block by block and reconstructed. Then a model without memory
    and one with it are trained on the source code of Python's standard library and evaluated on packages that neither
    has seen. All results are in one page, report.html. To resume after an interruption, repeat the command.

        elastic demo --out demo

        elastic demo --tokens 10000000
    """
    from elastic_memory.common.files import write_text
    from elastic_memory.report.page import page

    check_range(STEP, 10**12, tokens=tokens)
    console = Console()
    _step(console, 1, "The memory alone: compress four signals and reconstruct them")
    memory_at_work(out / "results", console)
    _step(console, 2, "Prepare the text: source code of Python's standard library, one token per byte")
    _prepare(out / "data")
    _step(console, 3, f"Train two models on {tokens:,} bytes each, the same ones in the same order")
    runs = [_train(name, out, tokens) for name in MODELS]
    _step(console, 4, "Evaluate both on packages they have not seen")
    _compare(runs, out, console)
    write_text(out / "report.html", page(out, "Elastic Memory: the demo"))
    console.print(f"report, with plots: {out / 'report.html'}")


def memory_at_work(out: Path, console: Console) -> Path:
    """Compress four signals, print how much of each every order keeps, and return the plot."""
    from elastic_memory.common.files import write_text
    from elastic_memory.evaluation.signals import noise, sines, text
    from elastic_memory.report import plots
    from elastic_memory.report.tables import Table

    length = BLOCK * BLOCKS
    signals = {
        "20 sines": sines(20, length)[:, None],
        "text, smoothed": text(length, features=16, smooth=64),
        "text, raw": text(length, features=16),
        "noise": noise(length)[:, None],
    }
    panels, rows = {}, []
    for name, signal in signals.items():
        back = {order: _remember(signal, order) for order in ORDERS}
        kept = [1 - (signal - guess).square().mean() / signal.var(0, correction=0).mean() for guess in back.values()]
        rows.append((name, *(f"{100 * share.item():.1f}%" for share in kept)))
        shown = {f"order {order}": guess[:, 0].tolist() for order, guess in back.items() if order != ORDERS[0]}
        panels[name] = (signal[:, 0].tolist(), shown)
    table = Table(
        title=f"Share of the variance reconstructed from {length:,} tokens, read in {BLOCKS} blocks",
        columns=("signal", *(f"order {order}" for order in ORDERS)),
        rows=rows,
        note="A memory of order N keeps N numbers per feature: a smooth signal is reconstructed in full, "
        f"of noise only about N/{length:,}.",
    )
    console.print(table.rich())
    picture = plots.reconstructions(panels, out / "memory.png")
    write_text(out / "memory.md", table.markdown())
    console.print(f"plot: {picture}")
    return picture


def _remember(signal: "Tensor", order: int) -> "Tensor":
    """Compress block by block, as a model does, then reconstruct every token from the final state."""
    import torch

    from elastic_memory.operators import Bank

    bank = Bank(order, points=len(signal), sampling="midpoints")
    state = torch.zeros(order, signal.shape[1], dtype=torch.float64)
    for start in range(0, len(signal), BLOCK):
        step = bank.step(start, start + BLOCK, "cpu", torch.float64)
        state = step.transition @ state + step.projection @ signal[start : start + BLOCK]
    return bank.reconstruction(len(signal), "cpu", torch.float64) @ state


def _step(console: Console, index: int, text: str) -> None:
    console.print(f"\n[bold]{index}. {text}[/bold]", highlight=False)


def _prepare(folder: Path) -> None:
    from elastic_memory.commands.prepare import prepare

    prepare(["stdlib"], tokenizer="bytes", length=LENGTH, out=folder)


def _train(name: str, out: Path, tokens: int) -> Path:
    """Train a model of `MODELS`, unless that is done; returns its run folder."""
    from elastic_memory.training.recipe import Recipe
    from elastic_memory.training.runs import StoppedError
    from elastic_memory.training.session import Resume, train

    chosen = MODELS[name]
    recipe = Recipe.parse(
        {
            "name": name,
            "model": {**chosen, "preset": "tiny", "config": {"block_size": MODEL_BLOCK, **chosen.get("config", {})}},
            "training": {"tokens": tokens, "length": LENGTH, "batch_tokens": STEP, "precision": "fp32"},
            "execution": {"device": "cpu", "micro_batch": STEP // LENGTH, "save_every": 50},
        },
        "demo",
    )
    try:
        # another number of threads only changes rounding: no reason to refuse a demo
        result = train(recipe, out / "data", out / "runs", Resume(allowed=True, or_start=True, new_machine=True))
    except StoppedError as error:
        print(f"elastic: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    return out / "runs" / result["name"]


def _compare(runs: list[Path], out: Path, console: Console) -> None:
    """Evaluate the models that are not evaluated yet, and print perplexity by block."""
    from elastic_memory.commands.evaluate import evaluate
    from elastic_memory.common.strict import read_json
    from elastic_memory.report.page import perplexity_by_block

    files = [out / "results" / f"{run.name}.json" for run in runs]
    for run, file in zip(runs, files, strict=True):
        if not file.exists():
            with contextlib.redirect_stdout(io.StringIO()):  # prints one model at a time; the table below has both
                evaluate(str(run), data=out / "data", limit=HELD_OUT_ROWS, batch_size=16, out=file)
    evaluations = [read_json(file) for file in files]
    for table in perplexity_by_block(evaluations):
        console.print(table.rich())
    first, last = (evaluation["metrics"]["ppl"]["P0"]["by_block"] for evaluation in evaluations)
    lower = sum(b < a for a, b in zip(first[1:], last[1:], strict=True))
    console.print(
        f"After the first block {runs[1].name} has the lower perplexity in {lower} of {len(first) - 1} blocks; "
        f"{runs[0].name} sees only its own block of {MODEL_BLOCK} bytes. One seed each: in block 0, where there is "
        f"nothing to remember yet, they already differ by {last[0] / first[0] - 1:+.1%}.",
        highlight=False,
    )
