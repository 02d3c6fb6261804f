"""Entry point of the `kvfs` script: Ctrl-C ends it with exit code 130 at any time, without a traceback.

What takes long to import is imported in here, after Ctrl-C has been provided for. The commands are in `commands`.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line. Where SIGINT is ignored, as for jobs in the background of a script, it stays so."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, _leave)
    from kvfs.tools import commands  # a tenth of a second, and what the command needs

    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = commands.run(sys.argv[1:])
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if is_ours:
        signal.signal(signal.SIGINT, _leave)  # all is said; the interpreter would say where its threads are
    sys.exit(code)


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: nothing was begun yet, or all is done."""
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
