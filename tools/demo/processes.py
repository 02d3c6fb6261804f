"""Worker processes: started, listened to, and ended with the demo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvfs.errors import KvfsError
from kvfs.tools.demo.runs import Answer, Stage

END_PATIENCE_S = 5.0


def run_worker(kind: str, mount: Path, model_directory: Path, log: Path, say: Callable[[str], None]) -> Answer:
    """Run one worker to its end; `say` is told what it does. Raises KvfsError with its last word if it fails."""
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvfs.tools.demo.worker", kind, str(mount), str(model_directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C is for the demo, which ends the worker
        )
    assert process.stdout is not None
    last = b""
    try:
        for line in process.stdout:
            try:
                say(msgspec.json.decode(line, type=Stage).stage)
            except msgspec.MsgspecError:
                last = line
        code = process.wait()
    finally:
        _end(process)
    try:
        if code == 0:
            return msgspec.json.decode(last, type=Answer)
    except msgspec.MsgspecError as error:
        raise KvfsError(f"the process for the run {kind} reported nothing ({error})") from error
    said = log.read_text(errors="replace").strip().splitlines()[-1:] or [f"exit code {code}"]
    raise KvfsError(f"the process for the run {kind} failed: {said[0]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that is still running."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()
