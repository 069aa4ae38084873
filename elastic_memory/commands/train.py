"""`elastic train`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_memory.commands.options import check_range, refuse_unused

MEASURED = Path("results")

From = Annotated[
    str | None, typer.Option("--from", help="Fine-tune this model: a folder written by `elastic attach`, or a run.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting of the recipe: training.tokens=1e9; repeatable.")
]
Requeue = Annotated[
    bool, typer.Option("--requeue", help="Resume the run if there is one, else start it: for job schedulers.")
]
WeightsOnly = Annotated[
    bool, typer.Option("--weights-only", help="With --resume: start a fresh optimizer if its saved state is gone.")
]
ShowPlan = Annotated[
    bool, typer.Option("--plan", help="Do not train; print the resolved recipe and its memory, time and cost.")
]
NewMachine = Annotated[
    bool, typer.Option("--new-machine", help="With --resume: accept other devices, micro-batches or versions.")
]


def train(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a recipe of the package such as smoke/elastic.")],
    data: Annotated[Path | None, typer.Option(help="A folder written by `elastic prepare`.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs; each run gets a folder of its own.")] = Path("runs"),
    from_: From = None,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")] = False,
    requeue: Requeue = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Bit-exact results on a GPU; slower.")] = False,
    weights_only: WeightsOnly = False,
    new_machine: NewMachine = False,
    plan: ShowPlan = False,
    devices: Annotated[int, typer.Option(help="With --plan: number of GPUs.")] = 8,
    price: Annotated[float, typer.Option(help="With --plan: price of one GPU for an hour.")] = 2.5,
    measured: Annotated[Path, typer.Option(help="With --plan: folder of results with measured speeds.")] = MEASURED,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Train a model from a recipe, fine-tune a pretrained model, or resume an interrupted run.

    A run folder holds the resolved recipe, metrics, checkpoints and, at the end, the model. After any interruption
    `--resume` continues with the same samples and reaches the same weights. Ctrl-C and SIGTERM save a checkpoint first.

        elastic prepare stdlib --tokenizer bytes --length 512 --out data/stdlib

        elastic train smoke/elastic --data data/stdlib

        elastic train finetune/full --from smollm2-memory --data data/books

        torchrun --nproc-per-node 8 --no-python \\
          elastic train paper/elastic --data data/pg19
    """
    from elastic_memory.training.recipe import load_recipe
    from elastic_memory.training.runs import StoppedError

    _refuse_unused(context, plan, resume, requeue)
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
        raise ValueError("--data is missing: a folder written by `elastic prepare`")

    from elastic_memory.evaluation.loading import starting_model
    from elastic_memory.training.session import Resume
    from elastic_memory.training.session import train as run

    try:
        how = Resume(allowed=resume or requeue, or_start=requeue, weights_only=weights_only, new_machine=new_machine)
        run(chosen, data, out, how, starting_model(from_) if from_ else None)
    except StoppedError as error:
        print(f"elastic: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _refuse_unused(context: typer.Context, plan: bool, resume: bool, requeue: bool) -> None:
    if plan:
        refuse_unused(
            context, "with --plan", "data", "out", "from_", "resume", "requeue", "weights_only", "new_machine"
        )
        return
    refuse_unused(context, "without --plan", "devices", "price", "measured")
    if requeue:
        refuse_unused(context, "with --requeue, which resumes too", "resume")
    elif not resume:
        refuse_unused(context, "without --resume or --requeue", "weights_only", "new_machine")


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
        model = made.recipe.built
        name = " ".join(filter(None, (model.preset, model.memory, f"{model.memory_multiple}x", model.sampling)))
        known = ["?" if x is None else f"{x:,.0f}" for x in (made.tokens_per_second, made.hours, made.cost)]
        table.add_row(name, f"{made.parameters:,}", f"{made.gigabytes:.1f}", *known)
    table.add_row(f"all {len(plans)}", "", "", "", *(_total(plans, key) for key in ("hours", "cost")))
    console = Console()
    console.print(table)
    for source in sorted({made.source for made in plans}):
        console.print(f"speed: {source}")


def _total(plans: list[Any], key: str) -> str:
    """The sum of the known values, followed by `+ ?` if some are unknown."""
    known = [getattr(made, key) for made in plans if getattr(made, key) is not None]
    if not known:
        return "?"
    return f"{sum(known):,.0f}" + (" + ?" if len(known) < len(plans) else "")
