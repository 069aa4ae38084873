"""`elastic train`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_memory.commands.options import check_range

MEASURED = Path("results")


def train(
    recipe: Annotated[str, typer.Argument(help="What to train: a YAML file, or a packaged one such as smoke/elastic.")],
    data: Annotated[Path | None, typer.Option(help="A folder that `elastic prepare` wrote.")] = None,
    out: Annotated[Path, typer.Option(help="Where run folders go; a run is named by what it trains.")] = Path("runs"),
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a key: training.tokens=1e9")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Go on with the run, or start it: for jobs that a scheduler starts again.")
    ] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Bit-exact on a GPU too, slower.")] = False,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="With --resume: a fresh optimizer, where its state was removed.")
    ] = False,
    new_machine: Annotated[
        bool, typer.Option("--new-machine", help="With --resume: accept other devices, micro-batches or versions.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Do not train: print the resolved recipe, memory, time and cost.")
    ] = False,
    devices: Annotated[int, typer.Option(help="For --plan: how many GPUs.")] = 8,
    price: Annotated[float, typer.Option(help="For --plan: what a GPU costs an hour.")] = 2.5,
    measured: Annotated[Path, typer.Option(help="For --plan: results to take speeds from.")] = MEASURED,
) -> None:
    """Train the model of a recipe, or go on with a run that was interrupted.

    A run folder holds the resolved recipe, metrics, checkpoints and, at the end, the model. However it is interrupted,
    `--resume` goes on with the same samples and reaches the same weights. Ctrl-C and SIGTERM save first.

        elastic prepare stdlib --tokenizer bytes --length 512 --out data/stdlib

        elastic train smoke/elastic --data data/stdlib

        torchrun --nproc-per-node 8 --no-python elastic train paper/elastic --data data/pg19
    """
    from elastic_memory.training.recipe import load_recipe
    from elastic_memory.training.runs import StoppedError

    overrides = [*(set_ or []), *(["execution.deterministic=true"] if deterministic else [])]
    chosen = load_recipe(recipe, overrides)
    if plan:
        check_range(1, devices=devices)
        check_range(0, 10**9, price=price)
        if not measured.is_dir() and measured != MEASURED:
            raise ValueError(f"--measured {measured}: no such folder")
        _print_plans(recipe, overrides, measured, devices, price)
        return
    if data is None:
        raise ValueError("--data is missing: a folder that `elastic prepare` wrote")

    from elastic_memory.training.session import Resume
    from elastic_memory.training.session import train as run

    try:
        begun = Resume(allowed=resume or requeue, or_start=requeue, weights_only=weights_only, new_machine=new_machine)
        run(chosen, data, out, begun)
    except StoppedError as error:
        print(f"elastic: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _print_plans(recipe: str, overrides: list[str], measured: Path, devices: int, price: float) -> None:
    import yaml
    from rich.console import Console
    from rich.table import Table

    from elastic_memory.training.plan import make_plan, measurements
    from elastic_memory.training.recipe import load_recipe, variants

    chosen = load_recipe(recipe, overrides)
    print(yaml.safe_dump(chosen.to_dict(), sort_keys=False))
    speeds = measurements(measured)
    plans = [make_plan(run, speeds, devices, price) for run in ([chosen] if overrides else variants(recipe))]
    training = chosen.training
    table = Table("model", "parameters", "GB a GPU", "tokens/s a GPU", "hours", "cost")
    table.title = f"{training.tokens:,} tokens, {training.steps:,} steps, {devices} GPUs at {price} an hour each"
    for made in plans:
        model = made.recipe.model
        name = " ".join(filter(None, (model.preset, model.memory, f"{model.memory_multiple}x", model.sampling)))
        known = ["?" if x is None else f"{x:,.0f}" for x in (made.tokens_per_second, made.hours, made.cost)]
        table.add_row(name, f"{made.parameters:,}", f"{made.gigabytes:.1f}", *known)
    table.add_row(f"all {len(plans)}", "", "", "", *(_total(plans, key) for key in ("hours", "cost")))
    console = Console()
    console.print(table)
    for source in sorted({made.source for made in plans}):
        console.print(f"speed: {source}")


def _total(plans: list[Any], key: str) -> str:
    """The sum of what is known, marked where something is not."""
    known = [getattr(made, key) for made in plans if getattr(made, key) is not None]
    if not known:
        return "?"
    return f"{sum(known):,.0f}" + (" + ?" if len(known) < len(plans) else "")
