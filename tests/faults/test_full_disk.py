"""No room on the file system of an index: changes are in force, said not to be durable, and durable when there is room."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvfs.commits import Commits
from kvfs.documents import Document, Documents
from kvfs.errors import DiskFullError
from kvfs.messages import StoreStatus
from kvfs.mount.errnos import errno_of
from kvfs.pins import FOREVER
from kvfs.store import Store
from kvfs.testing import chain_of, open_table, store_chain, tiny_namespace

NS = tiny_namespace()
FULL = "the index could not be written, trying again"


def commits_of(store: Store) -> Commits:
    assert store._residency.nvme is not None
    [stripe] = store._residency.nvme
    return stripe.commits


def give_pages(commits: Commits, number: int) -> None:
    """Let the index have so many pages, or the most that SQLite knows."""
    commits._index._connection.execute(f"PRAGMA max_page_count = {number}")


@pytest.mark.expect_log(FULL)
async def test_a_pin_without_room(tmp_path: Path) -> None:
    """It is ENOSPC at the mount, a field of the status, and durable when there is room again."""
    chain = chain_of(NS, 400)
    async with open_table(tmp_path, ram=32 << 20) as (store, table):
        assert set(await store_chain(store, table, chain)) == {StoreStatus.STORED}
        assert await store.flush()
        commits = commits_of(store)
        assert not store.statistics().volumes[0].is_disk_full
        give_pages(commits, 1)  # as many as it has
        with pytest.raises(DiskFullError, match=r"is full: what was asked for is in force") as raised:
            await store.limits.pin(list(table.chunks.values()), FOREVER)
        assert errno_of(raised.value) == errno.ENOSPC
        assert store.statistics().volumes[0].is_disk_full
        assert store.statistics().num_pinned == 400
        give_pages(commits, 1 << 30)
        await store.settle()
        assert not store.statistics().volumes[0].is_disk_full
    async with open_table(tmp_path, ram=32 << 20) as (store, _):
        assert store.statistics().num_pinned == 400


@pytest.mark.expect_log(FULL)
async def test_a_document_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of what stands beside the index."""
    write, is_full = Documents.write, True

    def full(documents: Documents, document: Document) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(documents, document)

    monkeypatch.setattr(Documents, "write", full)
    async with open_table(tmp_path) as (store, _):
        with pytest.raises(DiskFullError):
            await store.settle()
        is_full = False
        await store.settle()
