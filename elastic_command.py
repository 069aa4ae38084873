"""The command `elastic`, which starts without torch: its help is there at once, and Ctrl-C ends it quietly.

`import elastic_memory` takes seconds; where this module was imported first, it waits until a command needs it.
"""

import os
import signal


def begin() -> None:
    """Let Ctrl-C end the process at once, until a command begins: commands/options.py."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def main() -> None:
    """Run the command line."""
    begin()
    from elastic_memory.cli import main as run

    run()


def _end(*_: object) -> None:
    """Nothing has begun that would need an orderly end, and an exception might be raised where Python ignores it."""
    os._exit(128 + signal.SIGINT)
