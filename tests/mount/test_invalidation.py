"""The queue of names that the kernel is to drop."""

from __future__ import annotations

import errno
import threading

import trio
import trio.testing

from kvfs.mount import invalidation
from kvfs.mount.invalidation import Invalidations
from kvfs.testing import DEADLINE_S


async def test_names_are_dropped_in_order_from_another_thread(nursery: trio.Nursery) -> None:
    dropped: list[tuple[int, bytes]] = []
    threads: set[int] = set()
    done = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def drop(inode: int, name: bytes) -> None:
        threads.add(threading.get_ident())
        dropped.append((inode, name))
        if name == b"999":
            token.run_sync_soon(done.set)
        if inode % 2:
            raise FileNotFoundError(errno.ENOENT, "the kernel did not know it")
        if inode % 10 == 0:
            raise OSError(errno.ENOTCONN, "unmounted")

    names = Invalidations(drop)
    nursery.start_soon(names.run)
    for number in range(500):
        names.put((number, b"%d" % number))
    await trio.testing.wait_all_tasks_blocked()
    for number in range(500, 1000):
        names.put((number, b"%d" % number))
    with trio.fail_after(DEADLINE_S):
        await done.wait()
    assert dropped == [(number, b"%d" % number) for number in range(1000)]
    assert threading.get_ident() not in threads
    nursery.cancel_scope.cancel()


async def test_the_queue_is_bounded() -> None:
    names = Invalidations(lambda inode, name: None)
    for number in range(invalidation.MAX_QUEUED + 3):
        names.put((1, b"%d" % number))
    assert names.num_overflowed == 3
