"""`elastic reproduce`: the tables of the paper, one file of `elastic_memory/reproduction/tables` each."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from elastic_memory.reproduction.experiment import Experiment
    from elastic_memory.reproduction.lab import Lab

TIERS = ("smoke", "small", "paper")


def reproduce(
    tables: Annotated[
        list[str], typer.Argument(help="Tables by name, such as `signals`; or `list`, `status`, `claims`.")
    ],
    tier: Annotated[str, typer.Option(help="smoke: minutes; small: one GPU; paper: the paper's own sizes.")] = "smoke",
    out: Annotated[Path, typer.Option(help="Folder for tables, JSON, and the records they are made of.")] = Path(
        "results"
    ),
    data: Annotated[Path | None, typer.Option(help="Folder with prepared rows in one folder per corpus.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="The model that finds LongPPL's key tokens: a run, a folder, a .gguf file, a hub name."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after so long; the next call continues. 0 only writes the tables.")
    ] = None,
    parallel: Annotated[int, typer.Option(help="Training processes side by side on one GPU.")] = 1,
    seeds: Annotated[
        int | None, typer.Option(help="At most so many seeds a model (default: what a table wants).")
    ] = None,
    keep_weights: Annotated[bool, typer.Option("--keep-weights", help="Keep the weights of measured models.")] = False,
) -> None:
    """Regenerate tables of the paper, its values beside ours.

    Prints each table and writes it to --out as JSON and Markdown. `signals` needs no training and takes seconds:

        elastic reproduce signals

    Others train their models first, from the recipes of the tier, and measure them; of each run a small record is kept
    in OUT/runs, and tables share them. What is interrupted, by Ctrl-C or --minutes, continues with the same command:

        elastic reproduce main

        elastic reproduce main corruption --tier small --data rows --minutes 25 --parallel 3

        elastic reproduce injection --tier paper --data rows32k --reference meta-llama/Llama-3.1-8B

    What there is, what is done and missing with estimated GPU minutes, and the paper's claims checked against ours:

        elastic reproduce list

        elastic reproduce status --tier small

        elastic reproduce claims --tier small
    """
    from rich.console import Console

    from elastic_memory.reproduction.tables import NAMES, load, summary

    if tier not in TIERS:
        raise ValueError(f"tier {tier!r}: {', '.join(TIERS)} fit")
    if parallel < 1 or (seeds is not None and seeds < 1) or (minutes is not None and minutes < 0):
        raise ValueError(f"--parallel {parallel}, --seeds {seeds}, --minutes {minutes}: at least 1, 1 and 0")
    if tables == ["list"]:
        print("\n".join(f"{name:16}{summary(name)}" for name in NAMES))
        return
    console = Console()
    if tables == ["status"]:
        _status(console, tier, out)
        return
    if tables == ["claims"]:
        from elastic_memory.reproduction.ledger import write

        console.print(write(out, tier).rich())
        return
    modules = {name: load(name) for name in dict.fromkeys(tables)}
    trained = [module.EXPERIMENT for module in modules.values() if hasattr(module, "EXPERIMENT")]
    for name, module in modules.items():
        if not hasattr(module, "EXPERIMENT"):
            given = {"data": data, "reference": reference, "minutes": minutes, "seeds": seeds}
            for option in (option for option, value in given.items() if value is not None):
                raise ValueError(f"table {name!r} has no use for --{option}: leave it out")
            console.print(module.run(tier, out).rich())
    failed = False
    if trained:
        from elastic_memory.reproduction.lab import Lab

        lab = Lab(tier, out, data, reference)
        failed = _train(lab, trained, minutes, parallel, seeds, keep_weights)
        for experiment in trained:
            console.print(experiment.write(lab).rich())
    print(f"written to {out}")
    if failed:
        raise typer.Exit(1)


def _train(
    lab: "Lab",
    tables: "list[Experiment]",
    minutes: float | None,
    parallel: int,
    seeds: int | None,
    keep_weights: bool,
) -> bool:
    """Train and measure what is missing; whether something failed."""
    from elastic_memory.reproduction.planning import tasks, to_do
    from elastic_memory.reproduction.scheduler import Scheduler
    from elastic_memory.reproduction.tables import wanted
    from elastic_memory.training.runs import StoppedError
    from elastic_memory.training.session import tell

    for experiment in tables:
        experiment.check_earlier(lab.out / f"{experiment.name}-{lab.name}.json", lab.name)
    todo = to_do(lab, tables, seeds)
    if minutes == 0 or not todo:
        return False
    pairs = [pair for one in todo for pair in lab.missing(one.model, wanted(one.model))]
    lab.require((one.model.corpus for one in todo), longppl=any(metric == "longppl" for metric, _ in pairs))
    for corpus in dict.fromkeys(one.model.corpus for one in todo):
        lab.folder(corpus)  # text that comes with the tier is prepared once, not by each process
    tell(f"{len(todo)} models to train or measure at tier {lab.name}")
    if minutes is None and parallel == 1:
        for number, one in enumerate(todo, 1):
            tell(f"model {number} of {len(todo)}: {one.name}")
            try:
                lab.complete(one.model, wanted(one.model), keep_weights)
            except StoppedError as error:
                print(f"elastic: {error}", file=sys.stderr)
                return True
            finally:
                for experiment in tables:
                    experiment.write(lab)
        return False
    seconds = None if minutes is None else 60 * minutes
    scheduler = Scheduler(tasks(lab, todo, parallel, keep_weights), parallel, lab.work / "logs", seconds)
    scheduler.run()
    tell(
        f"{len(scheduler.done)} jobs done, {len(scheduler.failed)} failed, {len(scheduler.left)} left for the next call"
    )
    return bool(scheduler.failed)


def _status(console: Any, tier: str, out: Path) -> None:
    """Cells done and missing, by table, with estimated minutes of one GPU."""
    from elastic_memory.report.tables import Table
    from elastic_memory.reproduction.lab import Lab
    from elastic_memory.reproduction.planning import status

    rows, note = status(Lab(tier, out))
    columns = ["table", "cells", "missing", "runs to do", "more seeds", "GPU minutes"]
    console.print(Table(f"Tier {tier}: what is done", columns, rows, note).rich())
