"""SIGTERM and Ctrl-C stop a run after the current step, with a checkpoint; a second signal stops it at once."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

PAUSE = 1.0  # seconds; a launcher repeats the signal that the terminal already delivered: both count as one


def unless_ignored(*numbers: int) -> list[int]:
    """The signals that were not ignored when the process began: nohup and background jobs keep what they asked for."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


class Interrupts:
    """A context that records signals (`pending`) instead of ending the process."""

    def __init__(self) -> None:
        self.pending = 0
        self.agreed = False  # whether any process of the run was asked to stop
        self.since = 0.0

    @property
    def exit_code(self) -> int:
        """The shell's convention: 143 after SIGTERM, 130 after Ctrl-C."""
        return 128 + (self.pending or signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pending and time.monotonic() - self.since > PAUSE:
            os._exit(128 + number)
        if not self.pending:
            self.pending, self.since = number, time.monotonic()

    def __enter__(self) -> "Interrupts":
        self.previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM, *unless_ignored(signal.SIGINT)]
            self.previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
