"""The command `elastic`, which starts without torch: its help is there at once, and Ctrl-C ends it quietly.

`import elastic_memory` takes seconds; where this module was imported first, it waits until a command needs it.
"""

import os
import signal


def main() -> None:
    """Run the command line."""
    try:
        from elastic_memory.cli import main as run

        run()
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # nothing has begun that would need an orderly end
