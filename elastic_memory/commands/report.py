"""`elastic report`."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[Path, typer.Argument(help="A folder of results; folders inside it are read too.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Results",
) -> None:
    """Make one self-contained HTML page from a folder of results.

    The page shows the tables of `elastic reproduce`, the results of `elastic evaluate --out`, perplexity by block, and
    the loss curves of runs. It needs no other file and no network.

        elastic report results --out report.html

        elastic report runs --out runs.html --title "This week's runs"
    """
    from elastic_memory.common.files import write_text
    from elastic_memory.report.page import page

    text = page(results, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    print(f"written to {out}")
