"""`elastic selfcheck`."""

from typing import Annotated

import typer


def selfcheck(
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... (default: the GPU if there is one).")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Also check compiled models; takes minutes.")] = False,
) -> None:
    """Check that fast and plain computation agree on this machine, and print the largest errors.

    Compares streaming, padded batches, prompts in pieces, saved and loaded memories, gradient checkpointing and
    compiled code with one plain call, and the operators with their definitions. Exit code 1 if an error exceeds its
    bound.

        elastic selfcheck --device cuda
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from elastic_memory.common.progress import Bars
    from elastic_memory.evaluation.selfcheck import checks, count

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as reason:
        raise ValueError(f"--device {device}: {str(reason).splitlines()[0]}") from None
    console, failed = Console(), 0
    table = Table(
        "check", "largest error", "bound", "", title=f"elastic selfcheck on {device}, torch {torch.__version__}"
    )
    with Bars(transient=True) as progress:
        for name, error, bound in progress.track(checks(device, compiled), count(compiled), description="checking"):
            good = error <= bound
            failed += not good
            table.add_row(name, f"{error:.1e}", f"{bound:.0e}", "ok" if good else "[red]FAILED[/red]")
    console.print(table)
    raise typer.Exit(1 if failed else 0)
