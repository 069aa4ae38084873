"""One signal asks for an orderly end; a second one, a moment later, ends at once."""

import os
import signal

import pytest

from elastic_memory.training import interrupts
from elastic_memory.training.interrupts import PAUSE, Interrupts


def child(action):
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("later", "code"), [(0.0, 0), (PAUSE * 0.9, 0), (PAUSE * 1.1, "at once")])
def test_a_second_signal_ends_at_once_but_not_one_that_was_passed_on(number, later, code, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: clock[0])

    def twice():
        with Interrupts() as noted:
            os.kill(os.getpid(), number)
            if noted.pending != number:
                os._exit(1)
            clock[0] += later
            os.kill(os.getpid(), number)

    assert child(twice) == (128 + number if code == "at once" else 0)


def test_afterwards_signals_are_what_they_were():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as noted:
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert noted.exit_code == 128 + signal.SIGTERM
