"""`elastic report`."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[
        Path, typer.Argument(help="A folder (searched recursively), a run, or a JSON file of an evaluation or a table.")
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Results",
) -> None:
    """One self-contained HTML page of results: charts with values on hover, tables below them.

    Shows loss curves, perplexity by block and by position in the block, what memory gains, memory size against
    perplexity, recall by distance, the paper's values beside ours, recipes and environment: whatever of these the
    results hold. The page needs no other file and no network: send it, keep it, print it.

        elastic report results --out report.html

        elastic report runs --out runs.html --title "This week's runs"
    """
    from elastic_memory.common.files import write_text
    from elastic_memory.report.page import page

    text = page(results, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    print(f"written to {out}")
