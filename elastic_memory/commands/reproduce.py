"""`elastic reproduce`: the tables of the paper, one file of `elastic_memory/reproduction/tables` each."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_memory.commands.options import check_range, refuse_unused
from elastic_memory.reproduction.tiers import TIERS

if TYPE_CHECKING:
    from elastic_memory.report.tables import Table
    from elastic_memory.reproduction.experiment import Experiment
    from elastic_memory.reproduction.lab import Lab

TIERS_HELP = "; ".join(f"{name}: {tier.summary}" for name, tier in TIERS.items())
# Options that only tables of trained models use.
TRAINING = ("data", "reference", "model", "minutes", "parallel", "seeds", "corpora", "designs", "keep_weights")

Out = Annotated[Path, typer.Option(help="Folder for the tables, their JSON, and one record per run.")]
Reference = Annotated[
    str | None,
    typer.Option(help="LongPPL: the model that finds key tokens (a run, a folder, a .gguf file, a name on the hub)."),
]
Minutes = Annotated[
    float | None, typer.Option(help="Stop after this long; the same command resumes. 0 only writes the tables.")
]
Seeds = Annotated[int | None, typer.Option(help="At most this many seeds per model (default: as the table says).")]
Corpora = Annotated[
    str | None, typer.Option(help="Train only on these of proofs, books and edu, separated by commas (default: all).")
]
Designs = Annotated[
    str | None, typer.Option(help="real-model: only these rows of its table, separated by commas (default: all).")
]


def reproduce(
    tables: Annotated[list[str], typer.Argument(help="Tables by name, such as main; or one of list, status, claims.")],
    tier: Annotated[str, typer.Option(help=TIERS_HELP)] = "smoke",
    out: Out = Path("results"),
    data: Annotated[Path | None, typer.Option(help="Prepared rows: a folder with one folder per corpus.")] = None,
    reference: Reference = None,
    model: Annotated[str | None, typer.Option(help="real-model: the pretrained model that gets the memories.")] = None,
    minutes: Minutes = None,
    parallel: Annotated[int, typer.Option(help="Training processes that share one GPU.")] = 1,
    seeds: Seeds = None,
    corpora: Corpora = None,
    designs: Designs = None,
    keep_weights: Annotated[bool, typer.Option("--keep-weights", help="Keep the weights of measured models.")] = False,
    context: typer.Context = None,  # type: ignore[assignment]
) -> None:
    """Regenerate tables of the paper, with its values beside ours.

    Prints each table and writes it to --out as JSON and Markdown. `signals` needs no training and takes seconds:

        elastic reproduce signals

    Other tables train their models first, with the recipes of the tier. Each run leaves a small record in OUT/runs,
    which all tables share. To resume after Ctrl-C or --minutes, repeat the same command:

        elastic reproduce main

        elastic reproduce main corruption --tier small --data rows --parallel 3

        elastic reproduce injection --tier paper --data rows32k --minutes 25

        elastic reproduce real-model --tier small --data rows16k --designs infini

    List all tables; show what is done and what is missing, with estimated GPU minutes; check the paper's claims:

        elastic reproduce list

        elastic reproduce status --tier small

        elastic reproduce claims --tier small
    """
    check_range(1, parallel=parallel, seeds=seeds)
    check_range(0, minutes=minutes)
    _check(context, tables, tier, out, minutes)
    if len(tables) == 1 and tables[0] in INFORMATION:
        INFORMATION[tables[0]](tier, out)
        return
    given = {"data": data, "reference": reference, "minutes": minutes, "seeds": seeds, "keep-weights": keep_weights}
    given |= {"parallel": parallel if parallel > 1 else None, "model": model, "corpora": corpora, "designs": designs}
    experiments = _run_untrained(tables, tier, out, given)
    succeeded = True
    if experiments:
        from elastic_memory.reproduction.lab import Lab

        lab = Lab(tier, out, data, reference)
        succeeded = _train(experiments, lab, minutes, parallel, seeds, _corpora(corpora), keep_weights)
        for experiment in experiments:
            _print(experiment.write(lab))
    print(f"written to {out}")
    if not succeeded:
        raise typer.Exit(1)


def _check(context: typer.Context, tables: list[str], tier: str, out: Path, minutes: float | None) -> None:
    """Refuse an unknown tier, a file as folder, and options that would have no effect."""
    from elastic_memory.common.names import suggest

    if tier not in TIERS:
        raise ValueError(f"tier {tier!r}: {suggest(tier, TIERS)}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a folder")
    if len(tables) == 1 and tables[0] in INFORMATION:
        refuse_unused(context, f"on {tables[0]}", *TRAINING, *(("tier", "out") if tables == ["list"] else ()))
    elif minutes == 0:
        refuse_unused(context, "with --minutes 0", "parallel", "keep_weights", "seeds", "corpora", "designs")


def _run_untrained(tables: list[str], tier: str, out: Path, given: dict[str, Any]) -> "list[Experiment]":
    """Make the tables that need no trained models, and return the others."""
    from elastic_memory.reproduction.tables import load

    modules = {name: load(name) for name in dict.fromkeys(tables)}
    for name, module in modules.items():
        if tier not in getattr(module, "PLANS", [tier]):
            raise ValueError(f"tier {tier} has no table {name}: choose {' or '.join(module.PLANS)}")
        uses = set(given) - {"model", "designs"} if hasattr(module, "EXPERIMENT") else getattr(module, "USES", ())
        for option in (option for option, value in given.items() if value not in (None, False)):
            if option not in uses:
                raise ValueError(f"table {name!r} does not use --{option}: leave it out")
    for module in modules.values():
        if not hasattr(module, "EXPERIMENT"):
            uses = getattr(module, "USES", ())
            _print(module.run(tier, out, **{option.replace("-", "_"): given[option] for option in uses}))
    return [module.EXPERIMENT for module in modules.values() if hasattr(module, "EXPERIMENT")]


def _corpora(named: str | None) -> list[str]:
    """The corpora named, separated by commas."""
    from elastic_memory.common.names import suggest
    from elastic_memory.reproduction.experiment import CORPUS_ORDER

    chosen = list(CORPUS_ORDER) if named is None else [name.strip() for name in named.split(",")]
    for name in chosen:
        if name not in CORPUS_ORDER:
            raise ValueError(f"--corpora: {name!r}: {suggest(name, CORPUS_ORDER)}")
    return chosen


def _train(
    tables: "list[Experiment]",
    lab: "Lab",
    minutes: float | None,
    parallel: int,
    seeds: int | None,
    corpora: list[str],
    keep_weights: bool,
) -> bool:
    """Train and measure what is missing; False if something failed."""
    from elastic_memory.common.locks import InUseError
    from elastic_memory.reproduction.planning import tasks, to_do
    from elastic_memory.reproduction.scheduler import Scheduler
    from elastic_memory.reproduction.tables import wanted
    from elastic_memory.training.runs import StoppedError
    from elastic_memory.training.session import tell

    for experiment in tables:
        experiment.check_earlier(lab.out / f"{experiment.name}-{lab.name}.json", lab.name)
    todo = [one for one in to_do(lab, tables, seeds) if one.model.corpus in corpora]
    if minutes == 0 or not todo:
        return True
    pairs = [pair for one in todo for pair in lab.missing(one.model, wanted(one.model))]
    needed = list(dict.fromkeys(one.model.corpus for one in todo))
    lab.check_inputs(needed, longppl=any(metric == "longppl" for metric, _ in pairs))
    for corpus in needed:
        lab.folder(corpus)  # prepares the text that comes with the tier: once, not in each process
    lab.check_rows(needed)
    tell(f"{len(todo)} models to train or measure at tier {lab.name}")
    if minutes is None and parallel == 1:
        for number, one in enumerate(todo, 1):
            tell(f"model {number} of {len(todo)}: {one.name}")
            try:
                lab.complete(one.model, wanted(one.model), keep_weights)
            except InUseError as error:
                tell(f"{one.name} is left to another call: {error}")
            except StoppedError as error:
                print(f"elastic: {error}", file=sys.stderr)
                return False
            finally:
                _write(tables, lab)
        return True
    seconds = None if minutes is None else 60 * minutes
    scheduler = Scheduler(tasks(lab, todo, parallel, keep_weights), parallel, lab.work / "logs", seconds)
    try:
        scheduler.run()
    finally:
        _write(tables, lab)  # after Ctrl-C too
    return not scheduler.failed


def _write(tables: "list[Experiment]", lab: "Lab") -> None:
    for experiment in tables:
        experiment.write(lab)


def _list(tier: str, out: Path) -> None:
    from elastic_memory.reproduction.tables import NAMES, summary

    print("\n".join(f"{name:16}{summary(name)}" for name in NAMES))


def _claims(tier: str, out: Path) -> None:
    from elastic_memory.reproduction.ledger import write

    _print(write(out, tier))


def _status(tier: str, out: Path) -> None:
    from elastic_memory.report.tables import Table
    from elastic_memory.reproduction.lab import Lab
    from elastic_memory.reproduction.planning import status
    from elastic_memory.reproduction.tables import NAMES, load

    rows, note = status(Lab(tier, out))
    others = [module for module in map(load, NAMES) if hasattr(module, "status") and tier in module.PLANS]
    rows += [module.status(tier, out) for module in others]
    columns = ["table", "cells", "missing", "runs to do", "more seeds", "GPU minutes"]
    _print(Table(f"Tier {tier}: what is done", columns, rows, note))


def _print(table: "Table") -> None:
    from rich.console import Console

    console = Console()
    console.print(table.text(console.width))


INFORMATION = {"list": _list, "status": _status, "claims": _claims}
