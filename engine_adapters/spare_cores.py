"""Where threads beside an engine run: on the cores that it has not bound itself to.

vLLM's CPU backend binds each worker to the cores that it computes on, and leaves one to a connector; a thread that the
worker starts inherits the binding and would take turns with the computation. What the process might use without the
binding is what its parent may use.
"""

from __future__ import annotations

import os

MAX_THREADS = 4


def spare_cores() -> frozenset[int]:
    """Cores of this process's parent that this process is not bound to; all of its own if there are none."""
    own = os.sched_getaffinity(0)
    try:
        parents = os.sched_getaffinity(os.getppid())
    except OSError:
        return frozenset(own)
    return frozenset(parents - own if own < parents else own)


def move_to(cores: frozenset[int]) -> None:
    """Let the calling thread run on these cores; where that is not allowed it stays where it is."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        return


def num_helpers(cores: frozenset[int]) -> int:
    """Threads that help the one that is there anyway: none on a single core."""
    return min(MAX_THREADS, len(cores)) if len(cores) > 1 else 0
