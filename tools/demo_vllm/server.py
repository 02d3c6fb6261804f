"""A vLLM API server: started, waited for, asked and ended with whoever started it, also by SIGKILL (`tied`).

It and who asks it run in sessions of their own: Ctrl-C in the terminal is for the one who started them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvfs.errors import KvfsError
from kvfs.tools.bench.scratch import lock_above, scratch_below
from kvfs.tools.tied import tied

START_PATIENCE_S = 600.0
END_PATIENCE_S = 30.0
ROOT = Path(__file__).resolve().parents[2]
SERVED_NAME = "SmolLM2-135M-Instruct"


class Server:
    """A running server. Attributes: url; log: what it wrote."""

    def __init__(self, python: str, model: Path, mount: Path | None, log: Path, flags: Sequence[str]) -> None:
        """With a `mount` it has the connector; `flags` say everything else that matters."""
        self.log = log
        self._python = python
        # vLLM leaves sockets, locks and caches in the directory for temporary files. A path of a socket has 107 bytes.
        self._scratch = ExitStack()
        self._temporary = self._scratch.enter_context(scratch_below(None))
        lock = lock_above(str(self._temporary / "sockets"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--port", str(port), "--served-model-name", SERVED_NAME, "--enforce-eager", *flags,
        ]  # fmt: skip
        if mount is not None:
            command += ["--kv-transfer-config", json.dumps(transfer_config(mount))]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                tied(command, signal.SIGTERM, lock), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment(self._temporary),
                start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Return when it answers; raises KvfsError with its last words if it ends before."""
        deadline = time.monotonic() + START_PATIENCE_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                last = self.log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
                raise KvfsError(f"the vLLM server ended at start: {last[0]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise KvfsError(f"the vLLM server did not answer within {START_PATIENCE_S:g} s")

    def ask(self, module: str, task: str, log: Path) -> Generator[bytes]:
        """The lines that a module of ours prints in vLLM's Python, given a task. Raises KvfsError if it fails."""
        with log.open("wb") as errors:
            process = subprocess.Popen(
                tied([self._python, "-m", module, task], signal.SIGTERM), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=errors, env=environment(self._temporary), start_new_session=True,
            )  # fmt: skip
        assert process.stdout is not None
        try:
            yield from process.stdout
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if code:
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or [f"exit code {code}"]
            raise KvfsError(f"asking the vLLM server failed: {last[0]}")

    def metrics(self, beginning: str) -> list[str]:
        """Lines of /metrics that begin so."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return [line for line in lines if line.startswith(beginning)]

    def close(self) -> None:
        """End it, with all its processes, its temporary files and the shared memory that vLLM forgets when interrupted."""
        self._process.terminate()  # it ends the others
        shared: set[str] = set()
        deadline = time.monotonic() + END_PATIENCE_S
        while _look_at_session(self._process.pid, shared) and time.monotonic() < deadline:
            self._process.poll()
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for path in shared:
            Path(path).unlink(missing_ok=True)
        self._scratch.close()


def _look_at_session(session: int, shared: set[str]) -> bool:
    """Add to `shared` the files in /dev/shm that processes of a session have mapped; returns whether there is one left."""
    is_one_left = False
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, found, *_ = (process / "stat").read_text().rpartition(")")[2].split()
            if int(found) != session or state == "Z":
                continue
            is_one_left = True
            shared.update(re.findall(r"/dev/shm/psm_\w+", (process / "maps").read_text("utf-8", "replace")))
        except (OSError, ValueError):  # it has just ended
            continue
    return is_one_left


@contextmanager
def serve(python: str, model: Path, mount: Path | None, log: Path, flags: Sequence[str]) -> Iterator[Server]:
    """A server that answers, and is ended afterwards."""
    server = Server(python, model, mount, log, flags)
    try:
        server.wait()
        yield server
    finally:
        server.close()


def transfer_config(mount: Path) -> dict[str, object]:
    """What a user gives to --kv-transfer-config."""
    return {
        "kv_connector": "KvfsConnector",
        "kv_connector_module_path": "kvfs.engine_adapters.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"mount": str(mount)},
    }


def environment(temporary: Path) -> dict[str, str]:
    """That of vLLM's processes. On the CPU one core is left to the rest, and the cache takes 1 GiB."""
    cores = sorted(os.sched_getaffinity(0))
    ours = {
        "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[:-1] or cores)),
    }  # fmt: skip
    theirs = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**ours, **theirs, "TMPDIR": str(temporary), "VLLM_RPC_BASE_PATH": str(temporary)}
