"""A process that ends with the one that started it, however that ends: ``python tied.py PARENT SIGNAL LOCK COMMAND…``.

The kernel sends the signal when the thread that started it is gone, also by SIGKILL (prctl(2), PR_SET_PDEATHSIG; it
survives execve). While the process lives it holds a shared lock on the file LOCK, if one is named: so nobody clears
away what it uses. This file is run by itself, so that it costs no imports: 10 ms.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tied(command: list[str], number: signal.Signals, lock: str = "") -> list[str]:
    """The command line for that, of a process which the main thread of this one starts."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), str(int(number)), lock, *command]


def main() -> None:
    """Become the command."""
    parent, number, lock, *command = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != int(parent):  # it was gone before
        return
    if lock:
        descriptor = os.open(lock, os.O_RDONLY)
        os.set_inheritable(descriptor, True)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
