"""Progress on standard error, with the rate and the time left: bars on a terminal, a line per minute in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID
from rich.table import Column
from rich.text import Text

from elastic_memory.common.files import sha256

EVERY = 60  # seconds between two lines of a log
PERIOD = 600  # seconds that a rate is the mean of: some steps take minutes
LARGE = 2**30  # bytes of a file whose sum takes a while

console = Console(stderr=True, soft_wrap=True)  # one for all: bars may be opened inside others


class Bars(Progress):
    """A bar per task with description, amount, rate and time left; only the main process shows any.

    `add_task(..., unit="tokens")` names what is counted. In a narrow terminal numbers are never cut. In a log there are
    no bars, but one line per minute.
    """

    def __init__(self, transient: bool = False) -> None:
        from elastic_memory.common.environment import is_main  # imports torch, which help does not need

        self.logged = is_main() and not console.is_terminal
        super().__init__(
            _Cell(_description, "left", no_wrap=False), BarColumn(), _Cell(_amount), _Cell(_rate), _Cell(_left),
            console=console, transient=transient, disable=not (is_main() and console.is_terminal),
            speed_estimate_period=PERIOD, get_time=lambda: time.monotonic(),
            redirect_stdout=sys.stdout.isatty(),  # never send piped output to the console, which is standard error
        )  # fmt: skip
        self.printed_at = self.get_time()

    def stop(self) -> None:
        """As in rich, but without an empty line at the end of a log."""
        self.live.stop()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """As in rich."""
        super().advance(task_id, advance)
        self._print_if_due(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """As in rich."""
        super().update(task_id, **changes)
        self._print_if_due(task_id)

    def _print_if_due(self, task_id: TaskID) -> None:
        if self.get_time() - self.printed_at > EVERY:
            self.print_line(task_id)

    def print_line(self, task_id: TaskID) -> None:
        """In a log, print the state of a task; on a terminal its bar shows it."""
        self.printed_at, task = self.get_time(), self._tasks[task_id]
        if self.logged:
            words = (_description(task), _amount(task), _rate(task), _left(task))
            self.console.print("  ".join(filter(None, words)), highlight=False, markup=False)


class _Cell(ProgressColumn):
    """A column of text in one line; entries that are too long end in an ellipsis."""

    def __init__(self, show: Callable[[Task], str], justify: Any = "right", no_wrap: bool = True) -> None:
        super().__init__(Column(no_wrap=no_wrap, justify=justify))
        self.show = show

    def render(self, task: Task) -> Text:
        return Text(self.show(task), no_wrap=True, overflow="ellipsis")


def _description(task: Task) -> str:
    return task.description


def _unit(task: Task) -> str:
    return str(task.fields.get("unit", ""))


def _amount(task: Task) -> str:
    show = decimal if _unit(task) == "bytes" else lambda count: f"{count:,}"
    done = show(int(task.completed))
    return done if task.total is None else f"{done}/{show(int(task.total))}"


def _rate(task: Task) -> str:
    speed = task.finished_speed or task.speed
    if not speed:
        return ""
    if _unit(task) == "bytes":
        return f"{decimal(int(speed))}/s"
    if speed < 0.5:
        return f"{1 / speed:,.0f} s each"
    number = f"{speed:,.0f}" if speed >= 10 else f"{speed:.1f}"
    return f"{number} {_unit(task)}".rstrip() + "/s"


def _left(task: Task) -> str:
    left = task.time_remaining
    return "" if left is None or task.finished else f"{timedelta(seconds=int(left))} left"


def watched_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex; shows a bar for a large file."""
    size = path.stat().st_size
    if size < LARGE:
        return sha256(path)
    with Bars(transient=True) as progress:
        bar = progress.add_task(f"checking {path.name}", total=size, unit="bytes")
        return sha256(path, lambda count: progress.advance(bar, count))


@contextmanager
def transformers_bars() -> Iterator[None]:
    """In this context, show transformers' progress, such as loading weights, in our bars instead of its own."""
    from transformers.utils import logging

    with Bars(transient=True) as progress:

        def watched(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not args or not logging.is_progress_bar_enabled():
                return factory(*args, **kwargs | {"disable": True})  # not an iterator but updated by hand: rare
            description = str(kwargs.get("desc") or "working").rstrip(".: ").lower()
            return progress.track(args[0], total=kwargs.get("total"), description=description)

        before = logging.set_tqdm_hook(watched)
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)
