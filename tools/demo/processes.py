"""Worker processes: started, listened to, and ended with the demo.

Each run has a process of its own, forked from one that has imported what they all need and done nothing else: the
imports take longer than the runs that find their prompt in the cache.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from kvfs.errors import KvfsError
from kvfs.tools.demo.runs import Answer, Stage

END_PATIENCE_S = 5.0
_IMPORTED_ONCE = ("kvfs.tools.demo.worker", "transformers.models.llama.modeling_llama")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(_IMPORTED_ONCE))


def run_worker(kind: str, mount: Path, model_directory: Path, log: Path, say: Callable[[str], None]) -> Answer:
    """Run one worker to its end; `say` is told what it does. Raises KvfsError with its last word if it fails."""
    receiving, sending = _context.Pipe(duplex=False)
    process = _context.Process(target=_work, args=(kind, str(mount), str(model_directory), str(log), sending))
    answer: Answer | None = None
    try:
        process.start()
        sending.close()
        while answer is None:
            told = receiving.recv()
            if isinstance(told, Answer):
                answer = told
            else:
                say(told.stage)
        process.join()
    except EOFError:
        process.join()
    finally:
        _end(process)
        receiving.close()
    if answer is not None and process.exitcode == 0:
        return answer
    said = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
    raise KvfsError(f"the process for the run {kind} failed: {said[0] if said else f'exit code {process.exitcode}'}")


def _work(kind: str, mount: str, model_directory: str, log: str, sending: Connection) -> None:
    """In the worker: do the runs of one process, and send each `Stage` and the `Answer`."""
    os.setsid()  # Ctrl-C is for the demo, which ends the worker
    with open(log, "wb", buffering=0) as stderr:
        os.dup2(stderr.fileno(), sys.stderr.fileno())
    from kvfs.tools.demo import worker

    sending.send(worker.run(kind, mount, model_directory, lambda stage: sending.send(Stage(stage))))


def _end(process: ForkServerProcess) -> None:
    """End a process that is still running."""
    if process.pid is None:
        return
    if process.is_alive():
        process.terminate()
        process.join(END_PATIENCE_S)
        if process.is_alive():
            process.kill()
            process.join()
