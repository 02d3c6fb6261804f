"""The cache of a replay: the tiers, policies, ghosts and admission of the store, and what comes and goes between them.

What `kvfs.residency` and `kvfs.write_behind` are to the store this is to a replay, without time: what is dirty is written
at once, and nothing fails. Chunks are known by their numbers in the trace, which are also their inodes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from functools import cached_property

from kvfs.admission import Admission
from kvfs.catalog import NOWHERE, Catalog, Chunk
from kvfs.departures import BYPASSED, GHOSTS_A_CHUNK
from kvfs.ghosts import MAX_GHOSTS, Ghost, Ghosts
from kvfs.heeding import Hints
from kvfs.kept_back import Judge, KeptBack
from kvfs.keys import Key
from kvfs.policies import Clock, Policy
from kvfs.tiers.nvme import NvmeTier
from kvfs.tiers.ram import RamTier
from kvfs.tools.simulate.stand_ins import NoBytes, keys, namespace_of
from kvfs.tools.simulate.tally import Tally
from kvfs.tools.simulate.traces import Trace

MakePolicy = Callable[[Clock], Policy[Chunk]]
_NOBODY = Key(b"\0" * 16)
_NS = 10**9


class Cache:
    """Both tiers, and every chunk of the trace that was ever stored.

    `nvme_bytes` of 0 makes it a RAM cache, `admission` None writes everything to NVMe. Without `has_ghosts` no uses are
    remembered of what went, which is right for policies that do not look at them, and faster. With `has_tree` the prefix
    tree of the store is kept, in which reading ahead finds what a chain goes on with.

    Attributes: ram, nvme; tally: what came of it; counters: of prefetches, admission and hints; now_s: the time of the trace; hints.
    """

    def __init__(
        self,
        trace: Trace,
        make_policy: MakePolicy,
        bytes_per_token: int,
        ram_bytes: int,
        nvme_bytes: int,
        tally: Tally,
        *,
        has_ghosts: bool = True,
        admission: Admission | None = None,
        has_tree: bool = False,
    ) -> None:
        self.now_s = 0.0
        self.ram = RamTier(NoBytes(ram_bytes), make_policy(self.clock))
        self.nvme = NvmeTier(NoBytes(nvme_bytes), 1, make_policy(self.clock)) if nvme_bytes else None
        self.counters = tally.counters
        policies = [self.ram.policy] if self.nvme is None else [self.ram.policy, self.nvme.policy]
        self.hints = Hints(policies, self.counters, self.clock, lambda: self.below)
        self.tally = tally
        self._trace = trace
        self._has_tree = has_tree
        self._kept_back = KeptBack()
        is_judged = admission is not None and self.nvme is not None
        self._judge = Judge(admission, self._kept_back, self.counters) if admission is not None and is_judged else None
        self._ghosts = Ghosts()
        self._has_ghosts = has_ghosts or is_judged
        self._chunks: list[Chunk | None] = [None] * trace.num_chunks
        self._keys = keys(trace.num_chunks)
        self._num_below = array("I", bytes(4 * trace.num_chunks))  # that are stored
        catalog = Catalog()
        self._tables = [
            catalog.table(namespace_of(source, *trace.blocks(source, bytes_per_token)), 0)
            for source in range(max(trace.sources) + 1)
        ]

    def clock(self) -> float:
        """For policies."""
        return self.now_s

    # looking

    def get(self, number: int) -> Chunk | None:
        """A chunk that is stored."""
        chunk = self._chunks[number]
        return None if chunk is None or chunk.is_removed else chunk

    def match(self, numbers: Sequence[int]) -> list[Chunk]:
        """The longest stored prefix."""
        chunks = self._chunks
        found: list[Chunk] = []
        for number in numbers:
            chunk = chunks[number]
            if chunk is None or chunk.is_removed:
                break
            found.append(chunk)
        return found

    def below(self, chunk: Chunk) -> list[Chunk]:
        """What is stored and built on a chunk directly."""
        found = map(self.get, self._below.get(chunk.inode, ()))
        return [below for below in found if below is not None]

    @cached_property
    def _below(self) -> dict[int, list[int]]:
        """For each chunk of the trace those that are built on it directly."""
        found: dict[int, list[int]] = {}
        for number, above in enumerate(self._trace.parents):
            if above >= 0:
                found.setdefault(above, []).append(number)
        return found

    def lease_all(self, chunks: Collection[Chunk]) -> None:
        """What is leased is not evicted."""
        for chunk in chunks:
            chunk.leases += 1

    def release_all(self, chunks: Collection[Chunk]) -> None:
        """End one hold of each."""
        for chunk in chunks:
            chunk.leases -= 1

    def release(self, chunk: Chunk) -> None:
        """End one hold."""
        chunk.leases -= 1

    # coming

    def trim_ghosts(self) -> None:
        """Have as many as the store would; called before something is stored."""
        self._ghosts.limit = max(MAX_GHOSTS, GHOSTS_A_CHUNK * len((self.nvme or self.ram).policy))

    def new_chunk(self, number: int, above: Chunk | None) -> Chunk:
        """A chunk that is about to be stored, if there is room."""
        chunk = self._chunks[number]
        if chunk is None:
            trace = self._trace
            table = self._tables[trace.sources[number]]
            parent = _NOBODY if above is None else above.key
            position = trace.positions[number]
            tokens = table.namespace.identity.tokens_per_chunk
            chunk = Chunk.new(table, self._keys[number], parent, position, tokens, 0, number)
            chunk.is_removed = True
            self._chunks[number] = chunk
        return chunk

    def recall(self, chunk: Chunk) -> bool:
        """A chunk is stored: it goes on with the uses that its ghost has. Returns whether it has one."""
        chunk.hint = None
        ghost = self._ghosts.pop(chunk.table.directory, chunk.key) if self._has_ghosts else None
        if ghost is None:
            chunk.hits = chunk.returns = 0
            return False
        chunk.hits = ghost.hits
        chunk.returns = ghost.returns + 1
        return True

    def reserve(self, length: int, count: int, above: Chunk | None) -> list[int]:
        """Extents in RAM for `count` new chunks, or for as many as room can be made for.

        In a RAM cache none goes that they would be built on.
        """
        if self.nvme is not None:
            return self.ram.reserve_all(length, count, self._may_leave_ram, self._evict_from_ram)
        return self.ram.reserve_all(length, count, _is_free, self.evict, above)

    def reserve_cold(self, length: int, count: int, spared: Collection[Chunk] = ()) -> list[int]:
        """The same for chunks that come from NVMe; what is `spared` stays."""
        may_go = self._may_leave_ram
        if spared:
            return self.ram.reserve_all(
                length, count, lambda chunk: chunk not in spared and may_go(chunk), self._evict_from_ram
            )
        return self.ram.reserve_all(length, count, may_go, self._evict_from_ram)

    def place(self, chunk: Chunk, offset: int) -> None:
        """A new chunk is in RAM, and visible."""
        chunk.is_removed = False
        chunk.table.chunks[chunk.key] = chunk
        if chunk.position:
            self._num_below[self._trace.parents[chunk.inode]] += 1
        if self._has_tree:
            chunk.table.prefixes.add(chunk)
        self.ram.place(chunk, offset)

    def bypass(self, chunk: Chunk, behind: Sequence[int]) -> None:
        """A chunk is not worth its place, or there is none; nor are those behind it."""
        above = chunk
        self._remember_bypassed(chunk)
        for number in behind:
            known = self._chunks[number]
            if known is None or known.is_removed:
                above = self.new_chunk(number, above)
                self._remember_bypassed(above)
            else:
                above = known

    def _remember_bypassed(self, chunk: Chunk) -> None:
        self.tally.num_bypassed += 1
        if self.nvme is None:
            self.recall(chunk)
            self.ram.policy.bypassed(chunk)
            if self._has_ghosts:
                self._ghosts.add(chunk.table.directory, chunk.key, Ghost(0, BYPASSED, chunk.hits, chunk.returns))

    # to NVMe

    def is_admitted(self, chunk: Chunk, *, is_used: bool) -> bool:
        """Whether a chunk that is in RAM only is to be written; else it is kept back, until it is used."""
        if self._judge is None:
            return True
        return self._judge.admits(chunk, int(self.now_s * _NS), is_used=is_used, is_asked_for=False)

    def used(self, prefix: Sequence[Chunk]) -> None:
        """An engine loaded these: what is kept back of them is judged again."""
        if self._judge is None or self.nvme is None:
            return
        admitted = [chunk for chunk in self._judge.again(prefix) if self.is_admitted(chunk, is_used=True)]
        if admitted:
            self.write(admitted, prefix)
            self.nvme.policy.built_on(prefix)

    def write(self, new: list[Chunk], prefix: Sequence[Chunk]) -> None:
        """Write-behind of these chunks of a prefix; what there is no room for goes, and what is built on it."""
        nvme = self.nvme
        assert nvme is not None
        kept = frozenset(prefix)
        for place, chunk in enumerate(new):
            while (offset := nvme.extents.allocate(chunk.length)) is None:
                victims = nvme.least_worthy(chunk.length, lambda victim: not victim.leases and victim not in kept)
                if not victims:
                    for lost in reversed(new[place:]):
                        self.evict(lost)
                    return
                for victim in victims:
                    self.evict(victim)
            self.tally.num_written += 1
            self.tally.written_bytes += chunk.length
            nvme.place(chunk, offset)

    # going

    def _may_leave_ram(self, chunk: Chunk) -> bool:
        return not chunk.leases and (chunk.nvme != NOWHERE or chunk in self._kept_back)

    def _evict_from_ram(self, chunk: Chunk) -> None:
        if chunk.nvme != NOWHERE:
            self.ram.drop(chunk)
        else:
            self.evict(chunk)

    def evict(self, chunk: Chunk) -> None:
        """A chunk goes from everywhere."""
        del chunk.table.chunks[chunk.key]
        chunk.is_removed = True
        if self._has_tree:
            chunk.table.prefixes.remove(chunk)
        if chunk.position:
            self._num_below[self._trace.parents[chunk.inode]] -= 1
        if self._num_below[chunk.inode]:
            self.demote_below(chunk)
        self.ram.drop(chunk)
        if self.nvme is not None:
            self._kept_back.discard(chunk)
            extent = self.nvme.forget(chunk)
            if extent is not None:
                self.nvme.extents.free(*extent)
        if self._has_ghosts:
            self._ghosts.add(chunk.table.directory, chunk.key, Ghost(0, "evict", chunk.hits, chunk.returns))

    def demote_below(self, chunk: Chunk) -> None:
        """What is built on a chunk that went goes before all others: it cannot be reached any more."""
        below = self._below
        numbers = below.get(chunk.inode, [])[:]
        while numbers:
            number = numbers.pop()
            orphan = chunk.table.chunks.get(self._keys[number])
            if orphan is not None:
                self.ram.policy.demote(orphan)
                if self.nvme is not None:
                    self.nvme.policy.demote(orphan)
                numbers += below.get(number, ())


def _is_free(chunk: Chunk) -> bool:
    return not chunk.leases
