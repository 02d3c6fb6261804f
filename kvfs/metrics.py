"""What kvfs counts, and the log of events that `tail -f .kvfs/events` shows. Keys are named, prompts never."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import groupby

import msgspec
import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvfs.system import System

MAX_EVENT_BYTES = 4 << 20
KEPT_EVENT_BYTES = 1 << 20
_encoder = msgspec.json.Encoder(enc_hook=str)  # 0.4 us an event, json.dumps 5.5


@dataclass(slots=True)
class Counters:
    """Totals since the daemon started; units are in the names, the rest are numbers of chunks."""

    loads_ram: int = field(default=0, metadata={"help": "chunks loaded that were in RAM"})
    loads_nvme: int = field(default=0, metadata={"help": "chunks loaded that were on NVMe only"})
    loads_on_volume: int = field(default=0, metadata={"help": "chunks left on NVMe for a client to read from there"})
    missed_chunks: int = field(default=0, metadata={"help": "chunks that loads asked for and that were not there"})
    loads_unavailable: int = field(default=0, metadata={"help": "chunks that could not be read in time or at all"})
    loaded_bytes: int = field(default=0, metadata={"help": "bytes placed for engines"})
    matches: int = field(default=0, metadata={"help": "prefix matches"})
    matched_chunks: int = field(default=0, metadata={"help": "chunks found by prefix matches"})
    stores_published: int = field(default=0, metadata={"help": "chunks published"})
    stores_returned: int = field(default=0, metadata={"help": "chunks published again that had been evicted"})
    stores_existing: int = field(default=0, metadata={"help": "stores of chunks that were there already"})
    stores_refused: int = field(default=0, metadata={"help": "stores refused for want of room"})
    stores_over_quota: int = field(default=0, metadata={"help": "of these, stores that a quota had no room for"})
    stores_bad: int = field(default=0, metadata={"help": "stores whose bytes did not have their checksums"})
    stores_aborted: int = field(default=0, metadata={"help": "reserved stores that were never published"})
    copies_admitted: int = field(default=0, metadata={"help": "chunks that were copied in as files"})
    copies_existing: int = field(default=0, metadata={"help": "files copied in of chunks that were there already"})
    copies_refused: int = field(
        default=0, metadata={"help": "files copied in that did not prove to be a chunk, or found no room"}
    )
    published_bytes: int = field(default=0, metadata={"help": "bytes published"})
    promotions: int = field(default=0, metadata={"help": "chunks read from NVMe into RAM"})
    promotions_refused: int = field(default=0, metadata={"help": "promotions that found no room in RAM"})
    prefetches_begun: int = field(default=0, metadata={"help": "chunks that prefetches began to read into RAM"})
    prefetches_useful: int = field(default=0, metadata={"help": "of these, chunks that were then loaded"})
    prefetches_wasted: int = field(
        default=0, metadata={"help": "of these, chunks that left RAM, or could not be read, before anybody loaded them"}
    )
    prefetches_dropped: int = field(
        default=0, metadata={"help": "chunks of prefetches that ended, or came too late, before they were begun"}
    )
    hints: int = field(default=0, metadata={"help": "hints given by engines and people"})
    hints_closed: int = field(default=0, metadata={"help": "chunks that were said not to be used again"})
    hints_closed_used: int = field(
        default=0, metadata={"help": "of these, chunks that were used, or built on, after all"}
    )
    hints_expect_met: int = field(default=0, metadata={"help": "chunks expected to be used that were, in time"})
    hints_refused: int = field(default=0, metadata={"help": "chunks too many that a namespace expected"})
    read_aheads_begun: int = field(
        default=0, metadata={"help": "chunks read into RAM because a chain goes on with them"}
    )
    read_aheads_useful: int = field(default=0, metadata={"help": "of these, chunks that were then loaded"})
    read_aheads_wasted: int = field(
        default=0, metadata={"help": "of these, chunks that nobody loaded before they left"}
    )
    read_aheads_dropped: int = field(default=0, metadata={"help": "chunks not read ahead after all: there was no time"})
    warms_begun: int = field(default=0, metadata={"help": "chunks that the operator brought into RAM, or found there"})
    warms_useful: int = field(default=0, metadata={"help": "of these, chunks that were then loaded"})
    warms_wasted: int = field(default=0, metadata={"help": "of these, chunks that nobody loaded before they left"})
    corrupt: int = field(default=0, metadata={"help": "chunks dropped because they were proven bad"})
    rows_dropped: int = field(
        default=0, metadata={"help": "rows of the index dropped at the start: they cannot be true"}
    )
    io_errors: int = field(default=0, metadata={"help": "reads and writes that failed on the device"})
    written_bytes: int = field(default=0, metadata={"help": "bytes written to NVMe"})
    not_admitted_unused: int = field(default=0, metadata={"help": "chunks kept from NVMe until their second use"})
    not_admitted_budget: int = field(
        default=0, metadata={"help": "chunks kept from NVMe by the write budget of the day"}
    )
    evictions_ram: int = field(default=0, metadata={"help": "chunks evicted from RAM"})
    evictions_nvme: int = field(default=0, metadata={"help": "chunks evicted from NVMe, and so from everywhere"})
    evictions_quota: int = field(default=0, metadata={"help": "chunks evicted because of their namespace's quota"})
    expired: int = field(default=0, metadata={"help": "chunks that reached the max_age of their namespace"})
    removals: int = field(default=0, metadata={"help": "chunks removed by the user"})
    protocol_errors: int = field(default=0, metadata={"help": "malformed session messages"})
    session_errors: int = field(default=0, metadata={"help": "sessions that ended by a defect inside kvfs"})
    mount_errors: int = field(default=0, metadata={"help": "file system requests that failed inside kvfs"})


class EventLog:
    """One JSON object a line, newest last, bounded: past 4 MiB it is cut to its last 1 MiB, as ``copytruncate`` does.

    Attributes: num_events: events so far, those cut off included.
    """

    def __init__(self, system: System) -> None:
        self._system = system
        self._text = bytearray()
        self.num_events = 0

    @property
    def size(self) -> int:
        """Bytes now."""
        return len(self._text)

    def append(self, kind: str, **facts: object) -> None:
        """Add an event."""
        self.num_events += 1
        self._text += _encode({"time_ns": self._system.time_ns(), "event": kind, **facts}) + b"\n"
        if len(self._text) > MAX_EVENT_BYTES:
            cut = self._text.index(b"\n", len(self._text) - KEPT_EVENT_BYTES) + 1
            del self._text[:cut]

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from `offset`; fewer than `size` at the end."""
        return bytes(self._text[offset : offset + size])


def _encode(line: dict[str, object]) -> bytes:
    try:
        return _encoder.encode(line)
    except UnicodeEncodeError:  # a path that is no UTF-8, in the reason of an error
        return json.dumps(line, default=str, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value as it stands now. Those of one name stand together; a label tells them apart."""

    name: str
    help: str
    value: float
    label: tuple[str, str] | None = None


class _Collector(Collector):
    def __init__(self, counters: Counters, gauges: list[Gauge]) -> None:
        self._counters = counters
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        for item in fields(self._counters):
            yield CounterMetricFamily(
                f"kvfs_{item.name}", item.metadata["help"], value=getattr(self._counters, item.name)
            )
        for _, named in groupby(self._gauges, key=lambda gauge: gauge.name):
            first, *others = named
            if first.label is None:
                yield GaugeMetricFamily(f"kvfs_{first.name}", first.help, value=first.value)
                continue
            family = GaugeMetricFamily(f"kvfs_{first.name}", first.help, labels=[first.label[0]])
            for gauge in (first, *others):
                family.add_metric([gauge.label[1] if gauge.label is not None else ""], gauge.value)
            yield family


def render(counters: Counters, gauges: list[Gauge]) -> bytes:
    """Counters and gauges in Prometheus' text format."""
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(counters, gauges))
    return prometheus_client.generate_latest(registry)
