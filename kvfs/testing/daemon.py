"""A daemon without FUSE in a process of its own, for tests that stop and kill it: the store, and its sessions at a socket.

It does what it is told over a pipe, one line a request; a `ForkedDaemonProcess` starts in a fifth of the time.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from kvfs import namespace as namespaces
from kvfs.config import Settings
from kvfs.namespace import Namespace

_DAEMON = """
import json, logging, os, signal, sys
from pathlib import Path
import msgspec, trio
from kvfs import namespace
from kvfs.config import Settings
from kvfs.errors import CapacityError, KvfsError, UsageError
from kvfs.mount.session import serve_sessions
from kvfs.opening import open_store
from kvfs.pins import FOREVER
from kvfs.testing import SlowSystem

system = SlowSystem()

async def talk(nursery, store, sessions):
    say = lambda value: print(json.dumps(value), flush=True)
    say("ready")
    while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        if line.strip() == "flush":
            say(await store.flush(30))
        elif line.strip() in ("clean", "die"):
            say([chunk.key.hex() for chunk in store.catalog.chunks() if not chunk.is_dirty])
            if line.strip() == "die":
                os.kill(os.getpid(), signal.SIGKILL)
        elif line.startswith("remove "):
            keys = {bytes.fromhex(key) for key in line.split()[1:]}
            doomed = [chunk for chunk in store.catalog.chunks() if chunk.key in keys]
            await store.remove(doomed)
            say(len(doomed))
        elif line.startswith(("pin ", "unpin ")):
            keys = {bytes.fromhex(key) for key in line.split()[1:]}
            chunks = [chunk for chunk in store.catalog.chunks() if chunk.key in keys]
            try:
                await (store.limits.pin(chunks, FOREVER) if line.startswith("pin ") else store.limits.unpin(chunks))
                say([chunk.key.hex() for chunk in chunks if not chunk.is_removed])
            except CapacityError:
                say([])
        elif line.strip() == "pinned":
            say([chunk.key.hex() for chunk in store.catalog.chunks() if store.limits.end_of_pin(chunk) is not None])
        elif line.startswith("admit "):
            directory, key, path = line[6:].strip().split(" ", 2)
            with open(path, "rb") as file:
                raw = file.read()
            staged = store.staging.create(store.catalog.next_inode(), len(raw), len(raw))
            try:
                await store.staging.write(staged, 0, raw)
                if directory not in store.catalog.tables:
                    raise UsageError("there is no such namespace")
                await store.admit(staged, store.catalog.tables[directory], bytes.fromhex(key))
                say("admitted")
            except KvfsError as error:
                store.staging.drop(staged)
                say(type(error).__name__)
        elif line.startswith("attach "):
            store.attach(namespace.decode(line[7:].encode()))
            await store.settle()
            say(True)
        elif line.startswith("forget "):
            store.remove_namespace(store.catalog.tables[line.split()[1]])
            await store.settle()
            say(True)
        elif line.startswith("slow "):
            system.read_delay_s = float(line.split()[1])
            say(True)
        elif line.strip() in ("hold", "let go"):
            (system.read_gate.clear if line.strip() == "hold" else system.read_gate.set)()
            say(True)
        elif line.strip() == "chill":
            say(await store.flush(30))
            for chunk in store.catalog.chunks():
                if not chunk.leases and not chunk.is_dirty:
                    store._residency.ram.drop(chunk)
        elif line.strip() == "keys":
            say([chunk.key.hex() for chunk in store.catalog.chunks()])
        elif line.strip() == "namespaces":
            say(list(store.catalog.tables))
        else:
            say({**msgspec.to_builtins(store.statistics()), "num_sessions": sessions.num_open})
    nursery.cancel_scope.cancel()

async def stop_on_term(nursery):
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            system.read_gate.set()
            nursery.cancel_scope.cancel()

async def main(settings, path, place=None):
    async with open_store(settings, system, Path(place) if place else None) as store, trio.open_nursery() as nursery:
        nursery.start_soon(stop_on_term, nursery)
        sessions = await nursery.start(serve_sessions, store, path)
        nursery.start_soon(talk, nursery, store, sessions)

logging.basicConfig(level="WARNING")
trio.run(main, msgspec.json.decode(sys.argv[1], type=Settings), *sys.argv[2:])
"""


class DaemonProcess:
    """A store and its session socket in a process of its own, without FUSE: it can be stopped and killed.

    Attributes: process; it also ends when this process does, since its standard input ends then.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._asking = threading.Lock()

    @classmethod
    def start(cls, settings: Settings, path: str, place: Path | None = None) -> DaemonProcess:
        """Start it and wait until it answers. Whatever a killed one left at `path` is removed.

        With `place` the arena is there, and outlives a kill (root, huge pages): `kvfs.kept.remove` it at the end.
        """
        daemon = cls.begin(settings, path, place)
        daemon.wait_until_ready()
        return daemon

    @classmethod
    def begin(cls, settings: Settings, path: str, place: Path | None = None) -> DaemonProcess:
        """The same without waiting; nothing but `wait_until_ready` and `kill` may be called yet."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        arguments = [msgspec.json.encode(settings).decode(), path, *([str(place)] if place is not None else [])]
        return cls(cls._process(arguments))

    @classmethod
    def _process(cls, arguments: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _DAEMON, *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> None:
        """Return when it answers; raises RuntimeError if it ended instead."""
        try:
            if self._read() != "ready":
                raise RuntimeError("the daemon did not start")
        except BaseException:
            self.kill()
            raise

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the daemon ended with {self.process.wait()}")
        return json.loads(line)

    def _ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        with self._asking:
            if self.process.stdin.closed:
                raise RuntimeError("the daemon was ended")
            try:
                self.process.stdin.write(command + "\n")
                self.process.stdin.flush()
                return self._read()
            except ConnectionError as error:
                raise RuntimeError("the daemon ended") from error

    def statistics(self) -> dict[str, Any]:
        """The store's statistics, and `num_sessions`."""
        found: dict[str, Any] = self._ask("statistics")
        return found

    def flush(self) -> bool:
        """Wait until nothing is dirty."""
        return self._ask("flush") is True

    def slow(self, read_delay_s: float) -> None:
        """From now on each read of the volume takes so much longer."""
        self._ask(f"slow {read_delay_s}")

    @contextlib.contextmanager
    def reads_held(self) -> Iterator[None]:
        """Reads of the volume that begin meanwhile end only after the block."""
        self._ask("hold")
        try:
            yield
        finally:
            self._ask("let go")

    def chill(self) -> None:
        """Let every chunk that may leave RAM do so: it is on NVMe only then."""
        if self._ask("chill") is not True:
            raise RuntimeError("not everything could be written")

    def clean_keys(self) -> set[bytes]:
        """The chunks that would survive a crash now."""
        return {bytes.fromhex(key) for key in self._ask("clean")}

    def keys(self) -> set[bytes]:
        """All chunks, dirty ones too."""
        return {bytes.fromhex(key) for key in self._ask("keys")}

    def die(self) -> set[bytes]:
        """SIGKILL by its own hand; returns the chunks that were clean at that very moment."""
        found = {bytes.fromhex(key) for key in self._ask("die")}
        self._end()
        return found

    def remove(self, keys: Iterable[bytes]) -> int:
        """Remove these chunks; when this returns they are gone for good. Raises RuntimeError if the daemon ends first."""
        count: int = self._ask("remove " + " ".join(key.hex() for key in keys))
        return count

    def pin(self, keys: Iterable[bytes]) -> set[bytes]:
        """Pin those of these chunks that are there, for ever; returns which that were, none if pins hold too much."""
        return {bytes.fromhex(key) for key in self._ask("pin " + " ".join(key.hex() for key in keys))}

    def unpin(self, keys: Iterable[bytes]) -> None:
        """End the pins of these chunks."""
        self._ask("unpin " + " ".join(key.hex() for key in keys))

    def pinned_keys(self) -> set[bytes]:
        """The chunks that have a pin of their own."""
        return {bytes.fromhex(key) for key in self._ask("pinned")}

    def admit(self, directory: str, key: bytes, path: Path) -> str:
        """Copy a file in as this chunk of a namespace; "admitted", or the name of the error."""
        word: str = self._ask(f"admit {directory} {key.hex()} {path}")
        return word

    def attach(self, wanted: Namespace) -> None:
        """Make a namespace; it is durable when this returns."""
        self._ask("attach " + namespaces.encode(wanted).decode().replace("\n", " "))

    def forget(self, directory: str) -> None:
        """Remove a namespace that is empty; when this returns it is gone for good."""
        self._ask(f"forget {directory}")

    def namespaces(self) -> set[str]:
        """The names of all namespaces."""
        return set(self._ask("namespaces"))

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP now, SIGCONT at the end."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self._end()

    def terminate(self) -> int:
        """SIGTERM, which flushes; returns the exit status."""
        self.process.terminate()
        return self._end()

    def _end(self) -> int:
        status = self.process.wait(timeout=300)
        with self._asking:
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.terminate()
        else:
            self._end()


class ForkedDaemonProcess(DaemonProcess):
    """The same, forked from a process that has imported all of it: there in 30 ms instead of 450."""

    @classmethod
    def _process(cls, arguments: list[str]) -> Any:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", "kvfs.mount.session", "kvfs.opening", "kvfs.testing.daemon"])
        ours, theirs = socket.socketpair()
        with theirs:
            process = context.Process(target=_run_forked, args=(theirs, arguments), daemon=True)
            process.start()
        return _Forked(process, ours)


def _run_forked(pipe: socket.socket, arguments: list[str]) -> None:
    sys.stdin, sys.stdout = pipe.makefile("r"), pipe.makefile("w")
    sys.argv = ["daemon", *arguments]
    exec(_DAEMON, {"__name__": "daemon"})


class _Forked:
    """What `DaemonProcess` uses of a Popen, of a process of multiprocessing."""

    def __init__(self, process: multiprocessing.process.BaseProcess, pipe: socket.socket) -> None:
        self._process = process
        self.stdin, self.stdout = pipe.makefile("w"), pipe.makefile("r")
        pipe.close()  # the files keep it

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("daemon", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)
