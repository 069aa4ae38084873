"""`elastic report`."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[Path, typer.Argument(help="A folder of results; folders below it count too.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its heading.")] = "Results",
) -> None:
    """One self-contained HTML page from a folder of results.

    Shows the tables of `elastic reproduce`, the evaluations of `elastic evaluate --out`, perplexity by block, and the
    loss curves of runs. The page needs no other file and no network: send it, keep it, print it.

        elastic report results --out report.html

        elastic report runs --out runs.html --title "This week's runs"
    """
    from elastic_memory.common.files import write_text
    from elastic_memory.report.page import page

    text = page(results, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    print(f"written to {out}")
