"""Progress bars with the time that is left, on standard error."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(transient: bool = False) -> Progress:
    """A bar per task: what, how far, of how much, and how long still; in a log nothing is drawn."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=transient)
