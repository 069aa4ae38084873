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


def test_ctrl_c_that_was_ignored_from_the_start_stays_ignored():
    """As in a background job of a shell without job control, or under a launcher; SIGTERM still asks for an end."""

    def in_background():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Interrupts() as noted:
            os.kill(os.getpid(), signal.SIGINT)
            ignored = noted.pending == 0
            os.kill(os.getpid(), signal.SIGTERM)
            if not (ignored and noted.pending == signal.SIGTERM):
                os._exit(1)
        os._exit(2 if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN else 0)

    assert child(in_background) == 0
