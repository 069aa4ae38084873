"""`elastic demo`: the memory at work on this machine, without a download."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from torch import Tensor

ORDERS = (8, 32, 128, 512)
BLOCK, BLOCKS = 512, 16


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo"),
) -> None:
    """See the memory at work, on any machine and without a download.

    Compresses signals of growing difficulty into memories of growing order, block by block as a model would, prints
    what share comes back, and draws it:

        elastic demo --out demo
    """
    memory_at_work(out, Console())


def memory_at_work(out: Path, console: Console) -> Path:
    """Stream four signals through the bank, print how much of each every order keeps, and return the picture."""
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
        title=f"What a memory gives back of {length:,} tokens, read in {BLOCKS} blocks (share of the variance)",
        columns=("signal", *(f"order {order}" for order in ORDERS)),
        rows=rows,
        note="A memory of order N keeps N numbers per feature: what is smooth comes back whole, "
        f"of noise comes back about N/{length:,}.",
    )
    console.print(table.rich())
    picture = plots.reconstructions(panels, out / "memory.png")
    console.print(f"picture: {picture}")
    return picture


def _remember(signal: "Tensor", order: int) -> "Tensor":
    """Compress block by block as a model does while it reads, then reconstruct every token from the final state."""
    import torch

    from elastic_memory.operators import Bank

    bank = Bank(order, points=len(signal), sampling="midpoints")
    state = torch.zeros(order, signal.shape[1], dtype=torch.float64)
    for start in range(0, len(signal), BLOCK):
        step = bank.step(start, start + BLOCK, "cpu", torch.float64)
        state = step.transition @ state + step.projection @ signal[start : start + BLOCK]
    return bank.reconstruction(len(signal), "cpu", torch.float64) @ state
