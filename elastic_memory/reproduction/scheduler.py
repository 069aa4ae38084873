"""Several processes on one device, most important first, until all are done or time is up.

While one process compiles or measures, the others use the GPU. When time is up, running processes get SIGTERM and save
a checkpoint, from which the next call resumes.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from elastic_memory.training.interrupts import unless_ignored
from elastic_memory.training.session import tell

GRACE = 60.0  # seconds to save a checkpoint
IN_USE = 75  # exit status of a job that another call works on


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def running_now(logs: Path) -> int:
    """How many training processes share the device now: the sum over schedulers with these logs, at least 1."""
    counts = [int(file.read_text() or 1) for file in logs.glob("running-*") if _alive(file)]
    return max(sum(counts), 1)


def _alive(counter: Path) -> bool:
    """Whether the scheduler that writes the file `running-PID` still runs."""
    try:
        os.kill(int(counter.name.split("-")[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


@dataclass
class Task:
    """A command, and how long it is expected to take."""

    name: str
    command: list[str]
    seconds: float | None = None  # on the device, if it runs alone; None: unknown
    overlapped: float = 0.0  # further seconds off the device, in which other tasks use it
    process: subprocess.Popen | None = field(default=None, repr=False)
    log: IO | None = field(default=None, repr=False)
    begun: float = 0.0
    remaining: float = 0.0  # of its seconds alone


class Scheduler:
    """Runs tasks; afterwards `done`, `failed` and `left` (not finished) hold their names."""

    def __init__(self, tasks: Sequence[Task], parallel: int, logs: Path, seconds: float | None = None):
        self.waiting, self.parallel, self.logs = list(tasks), parallel, logs
        self.limit = None if seconds is None else time.monotonic() + seconds
        self.running: list[Task] = []
        self.done: list[str] = []
        self.failed: list[str] = []
        self.left: list[str] = []
        self.total = len(self.waiting)
        self._counter = logs / f"running-{os.getpid()}"

    def run(self) -> None:
        """Run until all tasks have ended or time is up, then stop the processes that still run."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for counter in self.logs.glob("running-*"):
            if not _alive(counter):  # its scheduler was killed
                counter.unlink(missing_ok=True)
        ended = [signal.SIGTERM, *unless_ignored(signal.SIGHUP, signal.SIGINT)]
        handlers = {number: signal.signal(number, _interrupt) for number in ended}
        try:
            while self.running or self.waiting:
                self._start()
                if not self.running:
                    break
                self._wait(0.2)
                self._collect()
                if self.limit is not None and time.monotonic() > self.limit:
                    tell("time is up: running jobs save a checkpoint")
                    break
        except KeyboardInterrupt:
            tell("interrupted: running jobs save a checkpoint")
            raise
        finally:
            for number in ended:
                signal.signal(number, signal.SIG_IGN)  # processes are already being stopped
            self._collect()
            self._stop()
            self._counter.unlink(missing_ok=True)
            self.left += [task.name for task in self.waiting]
            resume = ": repeat the command to resume" if self.left else ""
            tell(f"{len(self.done)} done, {len(self.failed)} failed, {len(self.left)} left{resume}")
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _start(self) -> None:
        while len(self.running) < self.parallel:
            task = next(filter(self._fits, self.waiting), None)
            if task is None and self.waiting and not (self.running or self.done or self.failed):
                task = self.waiting[0]  # none fits in the time: the first gets as far as it can and saves a checkpoint
            if task is None:
                return
            self._begin(task)

    def _begin(self, task: Task) -> None:
        self.waiting.remove(task)
        task.log, task.begun = (self.logs / f"{task.name}.log").open("ab"), time.monotonic()
        task.remaining = task.seconds or 0.0
        # its own process group: Ctrl-C reaches only this process, which then stops the others
        task.process = subprocess.Popen(
            task.command, stdout=task.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.running.append(task)
        self._count()
        tell(f"started {task.name} ({len(self.done)} of {self.total} done)")

    def _fits(self, task: Task) -> bool:
        """Whether this task and all running ones should end in time; tasks of unknown duration always fit."""
        if self.limit is None or task.seconds is None:
            return True
        work = task.seconds + sum(other.remaining for other in self.running)  # of the device, in whatever order
        return time.monotonic() + work + task.overlapped < self.limit

    def _wait(self, seconds: float) -> None:
        """Sleep, and subtract each running task's equal share of the device from its remaining seconds."""
        time.sleep(seconds)
        for task in self.running:
            task.remaining = max(task.remaining - seconds / len(self.running), 0.0)

    def _collect(self) -> None:
        for task in list(self.running):
            assert task.process and task.log
            code = task.process.poll()
            if code is None:
                continue
            task.log.close()
            self.running.remove(task)
            self._count()
            seconds = time.monotonic() - task.begun
            if code == 0:
                self.done.append(task.name)
                tell(f"finished {task.name} in {seconds:.0f} s")
            elif code == IN_USE:
                self.left.append(task.name)
                tell(f"{task.name} is left to another call, which works on it")
            elif self.running and "out of memory" in self._last_line(task).lower():
                # Neighbours held the rest of the device: try again when one of them has ended.
                self.parallel = len(self.running)
                self.waiting.insert(0, task)
                tell(f"{task.name} needs more memory than its neighbours leave: now at most {self.parallel} jobs")
            else:
                self.failed.append(task.name)
                tell(f"failed {task.name} (exit {code}): {self._last_line(task)}")

    def _count(self) -> None:
        """Write how many tasks share the device: they read it for their records."""
        self._counter.write_text(str(len(self.running)))

    def _last_line(self, task: Task) -> str:
        path = self.logs / f"{task.name}.log"
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1][:300] if lines else 'no output'} [{path}]"

    def _stop(self) -> None:
        for task in self.running:
            assert task.process
            task.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for task in self.running:
            assert task.process and task.log
            try:
                task.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                task.process.kill()
                task.process.wait()
            task.log.close()
            self.left.append(task.name)
        self.running = []
