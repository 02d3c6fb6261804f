"""The daemon: opens the store, mounts it, serves sessions, and takes it all down in reverse. The composition root.

Concurrency: one event loop in the main thread. Two nurseries, one inside the other, because the order of the end
matters: the FUSE main loop must answer as long as anything can ask it, so sessions and invalidations end first, then the
mount goes while the loop still runs, then the loop; then the exit stack closes what was opened, reads that a request
did not wait for among them, the store last, which writes what is dirty. What ends the daemon is SIGTERM, SIGINT, or an unmount from outside; all three are a clean end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pyfuse3
import trio

from kvfs.collecting import leave_out
from kvfs.config import Settings
from kvfs.errors import UnavailableError, UsageError
from kvfs.kept import DIRECTORY_NAME
from kvfs.mount import libfuse_words, mountpoint
from kvfs.mount.control import ControlFiles
from kvfs.mount.ending import Ending
from kvfs.mount.errnos import Faults
from kvfs.mount.operations import MAX_TASKS, Operations
from kvfs.mount.session import serve_sessions
from kvfs.mount.sockets import socket_directory
from kvfs.mount.tree import Tree
from kvfs.opening import open_store
from kvfs.store import Store

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.00005
"""How long a thread may keep the interpreter when the event loop wants it. xxhash gives it up for long inputs only: at
Python's 5 ms a request waits 5.7 ms behind the checksums of 64 KiB layers, at 0.2 ms 0.8 ms (measured). Each message
that is received or sent while checksums are taken waits once: at 0.2 ms, stores of 1 MiB chunks run at 0.62 to 0.88 of
memcpy, at this at 0.85 to 0.96, and at 0.02 ms no faster."""
EXPIRE_EVERY_S = 10.0
_M_MMAP_THRESHOLD = -3  # <malloc.h>
READY_DEADLINE_S = 10.0


def run(settings: Settings, ready: Callable[[Sequence[str]], None]) -> None:
    """Serve until told to stop; `ready` is called once, when the mount answers, with sentences for whoever mounts.

    Raises UsageError, in one sentence, for what cannot be mounted as asked. Must be called from the main thread.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # each session takes two
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _give_large_memory_back()
    try:
        trio.run(_serve, settings, ready)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, BaseExceptionGroup):
            raise
        raise error from error.__cause__  # one thing went wrong: nurseries are no news to whoever called


def _give_large_memory_back() -> None:
    """Have tables of a mebibyte and more mapped each by itself, so that one that was outgrown goes back to the system.

    glibc raises its bound to 32 MiB as such tables come and go, and the heap keeps what they leave: 8 of 61 MiB after
    100,000 chunks, in every second run.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


async def _serve(settings: Settings, ready: Callable[[Sequence[str]], None]) -> None:
    async with AsyncExitStack() as stack:
        path = await trio.to_thread.run_sync(mountpoint.prepare, settings.mountpoint)
        socket_path = stack.enter_context(
            socket_directory(path, settings.socket_directory, is_shared=settings.allow_other)
        )
        outlive_signals = stack.enter_context(_until_all_is_written())
        ending = Ending(path, socket_path, functools.partial(_leave_mount, path))
        stack.callback(ending.is_over)
        place = Path(socket_path).with_name(DIRECTORY_NAME)  # below the directory that we hold locked
        store = ending.store = await stack.enter_async_context(open_store(settings, place=place))
        outlive_signals()
        signals = stack.enter_context(trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT))
        work = await stack.enter_async_context(trio.open_nursery())
        stack.callback(work.cancel_scope.cancel)
        work.start_soon(leave_out, lambda: store.catalog.num_chunks)
        operations = _operations(store, path, socket_path, work)
        store.on_change.append(operations.removal.changed)
        store.on_renamed.append(operations.removal.renamed)
        stack.callback(store.on_change.remove, operations.removal.changed)
        stack.callback(store.on_renamed.remove, operations.removal.renamed)
        mounted = stack.enter_context(_mounted(operations, path, settings))
        async with trio.open_nursery() as fuse:
            is_over = trio.Event()
            fuse.start_soon(_main_loop, mounted, is_over)
            async with trio.open_nursery() as nursery:
                sessions = await nursery.start(serve_sessions, store, socket_path)
                operations.control.num_sessions = lambda: sessions.num_open
                nursery.start_soon(operations.invalidations.run)
                nursery.start_soon(_expire_directories, operations)
                nursery.start_soon(_watch_signals, signals, is_over)
                if not await trio.to_thread.run_sync(mountpoint.answers, path, READY_DEADLINE_S):
                    raise UsageError(f"the new mount on {path} does not answer")
                # Not before the first answer: the kernel's handshake sets the read-ahead anew.
                await trio.to_thread.run_sync(mountpoint.raise_read_ahead, path)
                logger.info("mounted on %s", path)
                if store.arena.kept is None:
                    is_never = os.geteuid() == 0 and settings.huge_pages == "never"
                    logger.info(
                        "the RAM tier is a sealed memfd: it ends with this daemon, no other can take it over (%s)",
                        "huge_pages is never" if is_never else "only root can keep it",
                    )
                ready(store.notices)
                await is_over.wait()
                logger.info("stopping")
                ending.begin()
                nursery.cancel_scope.cancel()
            await mounted.unmount()
            logger.info("unmounted %s", path)
            fuse.cancel_scope.cancel()
    logger.info("ended")
    if store.unwritten is not None and not store.unwritten.is_kept:
        raise UnavailableError(store.unwritten.sentence)


def _leave_mount(path: str) -> None:
    """Take the mount away if it is there, and busy as it may be."""
    mount = mountpoint.mount_at(path)
    if mount is not None and mount.is_ours:
        mountpoint.unmount(path, lazy=True)


@contextlib.contextmanager
def _until_all_is_written() -> Iterator[Callable[[], None]]:
    """From when the function is called, signals that come while the store writes what is dirty do not end the process.

    To be entered before the store: what was entered after it is gone by then. Before the call they end a start.
    """
    before: dict[int, Any] = {}

    def begin() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, _is_stopping)

    try:
        yield begin
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_stopping(number: int, _: FrameType | None) -> None:
    logger.info("got %s: stopping already, what is dirty is being written", signal.Signals(number).name)


def _operations(store: Store, path: str, socket_path: str, nursery: trio.Nursery) -> Operations:
    faults = Faults(store.counters)
    control = ControlFiles(store, path, socket_path)
    return Operations(
        store,
        Tree(store.catalog, control.size, store.system.time_ns(), store.system.monotonic),
        control,
        faults,
        nursery,
    )


class _Mounted:
    """The mount, while it is there.

    Attributes:
        is_gone: it was unmounted, by us or from outside; what is at the path now is not ours to touch.
    """

    def __init__(self, path: str) -> None:
        self.is_gone = False
        self._path = path
        self._ours = mountpoint.mount_at(path)

    def close(self) -> None:
        """End pyfuse3's side, and the mount if it is still there."""
        pyfuse3.close(unmount=self._is_there())

    def _is_there(self) -> bool:
        """Whether the path still shows our mount: one that was detached lives on while files are open in it."""
        return not self.is_gone and (self._ours is None or mountpoint.mount_at(self._path) == self._ours)

    async def unmount(self) -> None:
        """Unmount while the main loop still answers; if the mount is busy, detach it from the tree of names."""
        if not self._is_there() or await trio.to_thread.run_sync(mountpoint.unmount, self._path):
            self.is_gone = True
            return
        logger.warning("%s is busy: detached; programs with files open there get errors from now on", self._path)
        self.is_gone = await trio.to_thread.run_sync(lambda: mountpoint.unmount(self._path, lazy=True))


@contextlib.contextmanager
def _mounted(operations: Operations, path: str, settings: Settings) -> Iterator[_Mounted]:
    """Mount; whatever happens, nothing of the mount is left at the end. pyfuse3 holds one mount a process."""
    options = {"fsname=" + mountpoint.SOURCE, "subtype=kvfs", "default_permissions", "noexec"}
    if settings.allow_other:
        options.add("allow_other")
    said: list[str] = []
    try:
        with libfuse_words.overheard() as said:
            pyfuse3.init(operations, path, options)
    except RuntimeError as error:
        raise UsageError(f"cannot mount on {path}: {libfuse_words.reason(said)}") from error
    mounted = _Mounted(path)
    try:
        yield mounted
    finally:
        mounted.close()
        operations.close()


async def _main_loop(mounted: _Mounted, is_over: trio.Event) -> None:
    """Answer the kernel until the file system is unmounted."""
    try:
        await pyfuse3.main(max_tasks=MAX_TASKS)
        mounted.is_gone = True
    finally:
        is_over.set()


async def _watch_signals(signals: AsyncIterator[int], is_over: trio.Event) -> None:
    async for number in signals:
        logger.info("got %s", signal.Signals(number).name)
        is_over.set()


async def _expire_directories(operations: Operations) -> None:
    while True:
        await trio.sleep(EXPIRE_EVERY_S)
        with contextlib.suppress(pyfuse3.FUSEError):  # logged and counted
            await operations.expire()
